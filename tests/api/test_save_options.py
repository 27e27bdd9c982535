"""The options of saving: declared and documented once, shown by every function that takes them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import ingot
from ingot._base.frameworks import FRAMEWORKS
from support.changed_package import said_by

MODULES = sorted(set(FRAMEWORKS.values()))


def save_functions() -> dict[str, Any]:
    found: dict[str, Any] = {"ingot.serialize_file": ingot.serialize_file}
    for name in MODULES:
        try:
            found[f"ingot.{name}.save_file"] = import_module(f"ingot.{name}").save_file
        except ImportError:
            continue
    return found


# A change that adds `save_file(mode=...)`: the files, with an existing line and the lines to add after it.
NEW_OPTION = {
    "typing.py": [
        (
            "    checksums : bool, str or sequence of str, optional\n",
            "    mode : int, optional\n        The mode of the file.\n",
        ),
        ("    checksums: Checksums\n", "    mode: int | None\n"),
    ],
    "_base/options.py": [
        ("    # None if the caller passed none.\n", "    mode: int | None = None\n"),
        ('    "metadata": checks.texts,\n', '    "mode": partial(checks.counted, "mode"),\n'),
    ],
    "_write/save.py": [
        (
            "    if not how.background:\n        save()\n",
            "        if how.mode is not None:\n            import os\n\n"
            "            os.chmod(path, how.mode)\n\n",
        ),
    ],
}
TRY_IT = """
import inspect, json, os, sys
from importlib import import_module
answer = {}
for name in sys.argv[2:]:
    try:
        save_file = import_module("ingot." + name).save_file
        numpy = import_module("ingot.numpy")
    except ImportError:
        continue
    tensors = {}
    save_file(tensors, sys.argv[1], mode=0o600, durable=False)
    refused = False
    try:
        save_file(tensors, sys.argv[1], mode="rw")
    except TypeError:
        refused = True
    shown = "mode" in inspect.signature(save_file).parameters and "The mode of the file." in save_file.__doc__
    answer[name] = [oct(os.stat(sys.argv[1]).st_mode & 0o777), refused, shown]
print(json.dumps(answer))
"""


def test_save_options_grow_in_three_files_at_most(tmp_path: Path) -> None:
    assert len(NEW_OPTION) <= 3
    answer = said_by(TRY_IT, NEW_OPTION, tmp_path, str(tmp_path / "t.safetensors"), *MODULES)
    assert {f"ingot.{name}.save_file" for name in answer} == save_functions().keys() - {
        "ingot.serialize_file"
    }
    assert set(map(tuple, answer.values())) == {("0o600", True, True)}
