"""``ingot download`` calls `ingot.download`, which tests/remote tests with every kind of server."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import command_line, environment, good, in_a_terminal, run
from support.servers import Handler, Request, Server, serving
from support.shards import INDEX, NAMES, checkpoint, folder

FILES = checkpoint()
TOTAL = sum(map(len, FILES.values()))
SHA256 = hashlib.sha256(FILES[NAMES[0]]).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(folder(FILES)) as server:
        yield server


def test_download_command_fetches_a_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    answer = good(
        "download", server.url(f"/model/{NAMES[0]}"), path, "--expected-sha256", SHA256, "--json"
    ).json()
    size = len(FILES[NAMES[0]])
    assert answer == {"path": str(path), "nbytes": size, "fetched": size, "sha256": SHA256, "files": []}
    assert path.read_bytes() == FILES[NAMES[0]]


def test_download_command_takes_urls_of_local_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(FILES[NAMES[0]])
    good("download", f"file://{tmp_path}/a.safetensors", tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == FILES[NAMES[0]]


def test_download_command_fetches_a_sharded_model(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "gpt"
    rows = good("download", server.url(f"/model/{INDEX}"), f"{place}/", "--threads", "2").rows()
    assert rows == [[str(place / name), str(len(FILES[name]))] for name in [*NAMES, INDEX]]
    assert {name: (place / name).read_bytes() for name in FILES} == FILES
    assert good("check", place, "--json").json()["problems"] == []


def test_download_command_quiet_prints_the_path(server: Server, tmp_path: Path) -> None:
    assert good("download", server.url(f"/model/{INDEX}"), tmp_path, "-q").out == f"{tmp_path / INDEX}\n"


def test_download_command_prints_the_size(server: Server, tmp_path: Path) -> None:
    out = in_a_terminal("download", server.url(f"/model/{INDEX}"), tmp_path, columns=200).out
    assert out.splitlines()[-1] == "wrote 4 files: 1.57 MB"


def test_download_command_dry_run_writes_nothing(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "gpt"
    ended = good("download", server.url(f"/model/{INDEX}"), f"{place}/", "--dry-run", "--json")
    files = {str(place / name): len(FILES[name]) for name in [*NAMES, INDEX]}
    answer = ended.json()
    assert {file["path"]: file["nbytes"] for file in answer["files"]} == files
    assert (answer["path"], answer["nbytes"]) == (str(place / INDEX), sum(files.values()))
    assert list(tmp_path.iterdir()) == []
    assert server.sent < TOTAL // 10
    words = ["download", server.url(f"/model/{NAMES[0]}"), tmp_path / "x", "--dry-run"]
    assert good(*words).rows() == [[str(tmp_path / "x"), str(len(FILES[NAMES[0]]))]]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_download_command_replaces_nothing_without_force(
    server: Server, tmp_path: Path, dry: list[str]
) -> None:
    (tmp_path / NAMES[0]).write_text("precious")
    for name in (INDEX, NAMES[0]):
        ended = run("download", server.url(f"/model/{name}"), tmp_path, *dry)
        assert ended.code == 2
        assert f"{tmp_path / NAMES[0]}: File exists — --overwrite replaces it" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[0]]
    assert (tmp_path / NAMES[0]).read_text() == "precious"
    good("download", server.url(f"/model/{INDEX}"), tmp_path, "--overwrite")
    assert (tmp_path / NAMES[0]).read_bytes() == FILES[NAMES[0]]


def test_download_command_prints_failures_in_one_line(server: Server, tmp_path: Path) -> None:
    url = server.url(f"/model/{INDEX}")
    for words, code, said in [
        (["here.safetensors", tmp_path / "x"], 2, "expected a URL"),
        ([url, tmp_path / "new"], 2, "expected a directory"),
        ([url, tmp_path, "--expected-sha256", SHA256], 2, "one SHA-256"),
        ([server.url(f"/model/{NAMES[1]}"), tmp_path, "--expected-sha256", SHA256], 1, SHA256),
        ([server.url("/model/none"), tmp_path], 2, "404"),
        ([url, tmp_path, "--threads", "0"], 2, "--threads"),
    ]:
        ended = run("download", *words)
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1), ended
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []


def test_download_command_leaves_no_index_after_ctrl_c(tmp_path: Path) -> None:
    waiting = threading.Event()

    def answer(handler: Handler, request: Request) -> None:
        if request.range[1] > 64 << 10 and request.path.endswith(INDEX) is False:
            waiting.set()
            threading.Event().wait(60)
        folder(FILES)(handler, request)

    with serving(answer) as server:
        words = command_line("download", server.url(f"/model/{INDEX}"), tmp_path)
        with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as process:
            assert waiting.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.communicate()[1] == "error: interrupted\n"
            assert process.returncode == 130
    assert not (tmp_path / INDEX).exists()
