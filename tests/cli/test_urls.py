"""Commands on a file behind a URL print the same as for the local file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import run
from support.models import save
from support.servers import Server, serving
from support.servers import good as served

NAME = "model.layers.3.mlp.up_proj.weight"
# Commands that only read, with `PATH` in place of the file.
LOOKING = [
    ["PATH"],
    ["ls", "-l", "PATH"],
    ["tree", "PATH"],
    ["info", "PATH", NAME],
    ["params", "PATH"],
    ["layers", "PATH"],
    ["mem", "PATH"],
    ["stats", "PATH", NAME],
    ["stats", "PATH", "--all"],
    ["cat", "PATH", f"{NAME}[2:4,:5]"],
    ["check", "PATH", "--values"],
    ["diff", "PATH", "OTHER", "--values"],
    ["diff", "OTHER", "PATH", "--values"],
    ["meta", "get", "PATH"],
    ["meta", "get", "PATH", "title"],
    ["meta", "export", "PATH"],
    ["modelspec", "show", "PATH"],
    ["modelspec", "validate", "PATH"],
    ["hash", "PATH", "--all"],
    ["hash", "PATH", "-a", "md5"],
    ["verify", "PATH"],
]
# Commands that write to the file.
WRITING = [
    ["meta", "set", "URL", "a=b"],
    ["meta", "set", "--files", "URL", "a=b"],
    ["meta", "rm", "URL", "title"],
    ["meta", "clean", "URL"],
    ["meta", "import", "URL", "-"],
    ["modelspec", "set", "URL", "title=Ducks"],
    ["convert", "PATH", "URL"],
    ["cast", "PATH", "URL", "--dtype", "F16"],
    ["rename", "PATH", "URL", "-s", "model", "m"],
    ["rewrite", "PATH", "URL", "--remap", "RULES"],
    ["repair", "PATH", "URL"],
    ["merge", "PATH", "-o", "URL"],
    ["split", "PATH", "URL"],
    ["export", "PATH", NAME, "-o", "URL"],
    ["export", "PATH", NAME, "-d", "URL"],
    ["meta", "clean", "PATH", "-o", "URL"],
    ["meta", "export", "PATH", "URL"],
    ["download", "URL", "URL"],
]
# Commands that read the file and write another.
MAKING = [
    ["convert", "PATH", "OUT.bt"],
    ["rename", "PATH", "OUT", "-s", "model", "m"],
    ["rewrite", "PATH", "OUT", "--remap", "RULES"],
    ["repair", "PATH", "OUT"],
    ["merge", "PATH", "-o", "OUT"],
    ["split", "PATH", "OUT", "--max-shard-size", "100KB"],
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("urls")
    (folder / "rules.json").write_text('[{"select": "*"}]')
    return save(folder / "model.safetensors", metadata={"format": "pt", "title": "Ducks"})


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    with serving(served(path.read_bytes())) as facts:
        yield facts


def typed(words: list[str], **meant: object) -> list[str]:
    return [str(meant.get(word, word)) for word in words]


# `meta export` has no --json: it prints nothing else.
@pytest.mark.parametrize(
    "words",
    [*LOOKING, *([*words, "--json"] for words in LOOKING if words[:2] != ["meta", "export"])],
    ids=" ".join,
)
def test_commands_print_the_same_for_a_url_and_a_file(words: list[str], path: Path, server: Server) -> None:
    url = server.url()
    of_file = run(*typed(words, PATH=path, OTHER=path))
    of_url = run(*typed(words, PATH=url, OTHER=path))
    assert of_url.code == of_file.code
    assert of_url.out.replace(url, str(path)) == of_file.out
    assert of_url.err.replace(url, str(path)) == of_file.err


def test_export_and_cast_read_urls(path: Path, server: Server, tmp_path: Path) -> None:
    for word in (path, server.url()):
        folder = tmp_path / str(word == path)
        folder.mkdir()
        assert run("export", word, NAME, "-d", folder).code == 0
        assert run("cast", word, folder / "cast.safetensors", "--dtype", "F16").code == 0
    for name in (f"{NAME}.npy", "cast.safetensors"):
        of_file, of_url = ((tmp_path / word / name).read_bytes() for word in ("True", "False"))
        assert of_file == of_url


@pytest.mark.parametrize("words", MAKING, ids=" ".join)
def test_commands_write_from_a_url(words: list[str], path: Path, server: Server, tmp_path: Path) -> None:
    made = []
    for place, source in (("file", path), ("url", server.url())):
        folder = tmp_path / place
        folder.mkdir()
        outputs = {word: folder / word for word in ("OUT", "OUT.bt")}
        ended = run(*typed(words, PATH=source, RULES=path.parent / "rules.json", **outputs))
        assert ended.code == 0, ended
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        made.append([(each.relative_to(folder), each.read_bytes()) for each in files])
    assert made[0]
    assert made[0] == made[1]


def test_convert_dry_run_rejects_a_url(path: Path, server: Server, tmp_path: Path) -> None:
    ended = run("convert", server.url(), str(tmp_path / "x.bt"), "--dry-run")
    assert ended.code == 2
    assert "a URL has to be fetched first" in ended.err
    assert not list(tmp_path.iterdir())


def test_ls_of_a_url_reads_the_header_only(path: Path, server: Server) -> None:
    before = len(server.requests)
    run("ls", server.url())
    assert len(server.requests) == before + 1


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_commands_reject_a_bad_url(words: list[str], dry: list[str], path: Path, server: Server) -> None:
    if dry and words[:2] == ["meta", "export"]:
        dry = ["--overwrite"]
    url, before = server.url(), (len(server.requests), sorted(path.parent.iterdir()))
    folder = path.parent
    ended = run(*typed(words, PATH=path, URL=url, OUT=folder / "out", RULES=folder / "rules.json"), *dry)
    assert ended.code == 2, ended
    assert url in ended.err
    assert "is a URL" in ended.err
    assert (len(server.requests), sorted(path.parent.iterdir())) == before
