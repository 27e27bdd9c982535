"""The session that docs/reference/command.md shows, printed again.

Renew it after an intended change, and review it with `git diff`::

    INGOT_RENEW_GOLDEN=1 python -m pytest tests/cli/test_session.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import numpy

from ingot.cli.program import COMMANDS
from ingot.numpy import save_file
from support import stores
from support.commands import in_a_terminal
from support.models import minilm
from support.servers import Answer, Handler, Request, Server, serving
from support.stores import Store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command.md"
SESSION = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
# The numbers of lines that the page shows from the start and from the end of a long output.
LONGEST, HEAD, TAIL = 16, 7, 3


def hub(folder: Path) -> Answer:
    """A server that imitates the Hub, with the output of `ingot split` as its repository."""

    def answer(handler: Handler, request: Request) -> None:
        file = folder / "shards" / request.path.removeprefix("/me/minilm/resolve/main/")
        if file.is_file():
            handler.part(file.read_bytes(), request, ETag='"v1"')
        else:
            handler.head(404, X_Error_Message="Entry not found", Content_Length=0)

    return answer


def save_adapter(path: Path) -> None:
    """Save an adapter of the queries of all layers, which changes their first columns."""
    up, down = numpy.ones((384, 8), "f2"), numpy.eye(8, 384, dtype="f2")
    factors = {"lora_up.weight": up, "lora_down.weight": down}
    tensors = {
        f"lora_te_encoder_layer_{layer}_attention_self_query.{part}": factor
        for layer in range(6)
        for part, factor in {**factors, "alpha": numpy.array(16, "f2")}.items()
    }
    save_file(tensors, path)


def printed(session: str, folder: Path, hub: Server, store: Store) -> str:
    """Return the commands of a session with their current output."""
    plain = {"NO_COLOR": "1", "TERM": "dumb"}
    reach = {"HF_ENDPOINT": hub.url(""), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": ""}
    reach |= store.environment
    lines = []
    for line in session.splitlines():
        if line.startswith("$ "):
            words = shlex.split(line[2:])
            assert words[0] == "ingot"
            answer = in_a_terminal(*words[1:], folder=folder, **plain, **reach).out.splitlines()
            if len(answer) > LONGEST:
                answer[HEAD:-TAIL] = ["..."]
            lines += [line, *answer]
    return "".join(f"{line}\n" for line in lines)


def test_session_covers_every_command() -> None:
    shown = set(re.findall(r"^\$ ingot (\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    # The page runs `summary` as `ingot PATH`. The output of the others differs between machines.
    assert set(COMMANDS) - shown == {"summary", "doctor", "completion", "credentials"}


def test_session_equals_the_output_of_the_commands(tmp_path: Path) -> None:
    shutil.copy(minilm(), tmp_path / "model.safetensors")
    save_adapter(tmp_path / "adapter.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(minilm().read_bytes()[:90_200_000])
    stack = '{"stack": "keys", "old": "encoder.layer.{i}.attention.self.key.bias"}'
    (tmp_path / "rules.json").write_text(f'[{stack}, {{"select": "keys"}}]')
    text = PAGE.read_text(encoding="utf-8")
    assert len(SESSION.findall(text)) >= 3
    with serving(hub(tmp_path)) as server, stores.running(is_signed=False) as store:
        renewed = SESSION.sub(lambda session: printed(session[0], tmp_path, server, store), text)
    if os.environ.get("INGOT_RENEW_GOLDEN"):
        PAGE.write_text(renewed, encoding="utf-8")
    assert renewed == PAGE.read_text(encoding="utf-8")
