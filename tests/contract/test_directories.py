"""A save costs the same in a directory with many files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ingot.numpy
from support.traced import traced

SAVES = {
    "save_file": "ingot.numpy.save_file(tensors, path)",
    "background": "ingot.numpy.save_file(tensors, path, background=True).result()",
    "in_place": "ingot.numpy.save_file(tensors, path, atomic=False)",
    "edit": "ingot.update_metadata(path, {'a': 'b'}, atomic=True)",
    "replace_tensor": "ingot.replace_tensor(path, 'a', numpy.zeros(4, 'f4'))",
    "rewrite": "ingot.rewrite(path, path, overwrite=True)",
    "Writer": """
with ingot.Writer(path, {"a": ("F32", (4,))}, overwrite=True) as writer:
    writer.write("a", tensors["a"])
    writer.commit()
""",
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_save_does_not_list_its_directory(save: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "model.safetensors"
    program = f"""
path, source, tensors = sys.argv[1], sys.argv[2], {{"a": numpy.ones(4, "f4")}}
ingot.numpy.save_file(tensors, path)
ingot.numpy.save_file(tensors, source)
save = compile({save!r}, "save", "exec")
exec(save)
mark("save")
exec(save)
mark("done")
"""
    ended = traced(program, path, tmp_path / "source.safetensors", folder=folder, trace="getdents64,openat")
    assert ended.code == 0, ended.err
    calls = ended.calls["save"]
    assert any("openat" in call for call in calls)
    assert not [call for call in calls if "getdents" in call and str(folder) in call]


def test_save_removes_the_temporary_files_of_dead_saves(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for number in range(20):
        (tmp_path / f".{path.name}.{number:016x}.ingot-tmp").write_bytes(b"left")
    other = tmp_path / f".other.safetensors.{1:016x}.ingot-tmp"
    other.write_bytes(b"of another file")
    ingot.numpy.save_file({}, path)
    assert sorted(os.listdir(tmp_path)) == [other.name, path.name]
