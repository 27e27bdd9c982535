"""README.md and docs/ are short, their links are valid, and their code blocks run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from support import stores
from support.servers import Handler, Request, serving

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The test that runs the blocks of a language, and its pages.
RUN_BY = {
    "python": None,
    # tests/cli/test_session.py prints the session again.
    "console": {"docs/reference/command.md"},
    # tests/web/docs.test.mjs runs it.
    "js": {"docs/guides/javascript.md"},
    # The doc test of crates/format/README.md, which has the same block.
    "rust": {"docs/guides/rust.md"},
    "toml": None,
    "json": None,
    # Commands to install, messages and drawings: nothing to run.
    "": None,
}
SYBIL = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(ROOT), pattern="*.md")
# Packages that code blocks import, and that may not be installed for the tests.
OPTIONAL = re.compile(
    r"^(?:import|from) (jax|torch|numpy|h5py|fsspec|lightning|obstore|transformers|accelerate)\b",
    re.MULTILINE,
)


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each code block."""
    return FENCE.findall(page.read_text("utf-8"))


def programs(page: Path) -> list[str]:
    return [text for language, text in fences(page) if language == "python"]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as on GitHub, and its rules as on the site."""
    text = page.read_text("utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    rules = re.findall(r"^\*\*([A-Z]\d+)\.\*\*", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads + rules}


every_page = pytest.mark.parametrize("page", PAGES, ids=called)


def test_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_pages_are_in_the_contents_of_the_site() -> None:
    listed = set()
    for page in PAGES:
        for language, text in fences(page):
            if language == "{toctree}":
                names = [line for line in text.splitlines() if line and not line.startswith(":")]
                listed |= {(page.parent / f"{name}.md").relative_to(DOCS).as_posix() for name in names}
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES[1:]} - {"index.md"}


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@every_page
def test_blocks_of_code_are_run(page: Path) -> None:
    for language, text in fences(page):
        # Directives of the site.
        if language.startswith("{"):
            continue
        assert language in RUN_BY, language
        assert called(page) in (RUN_BY[language] or {called(page)})
        if language == "toml":
            assert tomllib.loads(text)
        if language == "json":
            assert json.loads(text)


def test_rust_block_is_run_by_cargo() -> None:
    blocks = [text for language, text in fences(DOCS / "guides" / "rust.md") if language == "rust"]
    readme = (ROOT / "crates" / "io" / "README.md").read_text("utf-8")
    assert blocks
    assert all(f"```rust\n{block}```" in readme for block in blocks)


def files_of_far_servers() -> dict[str, bytes]:
    """Small versions of the files that the pages read from the Hub and from S3."""
    import torch

    import ingot.torch

    gpt2 = {"wte.weight": torch.ones(2000, 4), "h.0.weight": torch.ones(4), "h.1.weight": torch.ones(4)}
    hub = "/{}/resolve/main/{}"
    index = b'{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}'
    one = ingot.torch.save({"model.norm.weight": torch.ones(4)})
    return {
        hub.format("openai-community/gpt2", "model.safetensors"): ingot.torch.save(gpt2),
        hub.format("deepseek-ai/DeepSeek-V3", "model.safetensors.index.json"): index,
        hub.format("deepseek-ai/DeepSeek-V3", "model-00001-of-00001.safetensors"): one,
        "/models/ours.safetensors": one,
    }


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a server that replaces the Hub and S3."""
    files = files_of_far_servers()

    def answer(handler: Handler, request: Request) -> None:
        data = files.get(request.path.partition("?")[0])
        if data is None:
            handler.head(404, X_Error_Message="Entry not found", Content_Length=0)
        else:
            handler.part(data, request, ETag='"v1"')

    with serving(answer) as server:
        for variable in ("HF_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(variable, server.url(""))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        yield


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a store to which pages save."""
    with stores.running(is_signed=False) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.server.url(""))
        yield


@pytest.mark.parametrize("page", list(filter(programs, PAGES)), ids=called)
def test_programs_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "hf://" in "".join(programs(page)):
        pytest.importorskip("torch")
        request.getfixturevalue("far")
    if page.stem in ("stores", "deltas"):
        pytest.importorskip("torch")
        request.getfixturevalue("store")
    monkeypatch.chdir(tmp_path)
    ran = lacking = 0
    for example in SYBIL.parse(page).examples():
        if not all(map(find_spec, OPTIONAL.findall(str(example.parsed)))):
            lacking += 1
        else:
            try:
                example.evaluate()
                ran += 1
            except SkipTest:
                continue
    # All blocks of the guide to engines need a missing package.
    assert ran or lacking


def test_environment_variables_are_documented() -> None:
    """Two pages have all variables: one page the variables of cloud providers, the other page the rest."""
    pages = [DOCS / "reference" / "environment.md", DOCS / "guides" / "credentials.md"]
    told = {name for page in pages for name in re.findall(r"`(\w+)[`=]", page.read_text("utf-8"))}
    assert {name for name in looked_up() if name not in told} == set()


def looked_up() -> set[str]:
    """Return all words of the sources that look like the name of an environment variable."""
    name = re.compile(
        r'"((?:INGOT|AWS|AZURE|CLOUDSDK|GCE|GOOGLE|GS|HF|HUGGING)_\w+|\w+_(?:OFFLINE|HOST|CACHE)|\w+_proxy)"'
    )
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/ingot/**/*.py")]
    found = set()
    for source in sources:
        # Files named `tests`, or in such a folder, are built for tests alone.
        if not {"fake-cuda", "tests"} & {*source.relative_to(ROOT).with_suffix("").parts}:
            found |= set(name.findall(source.read_text("utf-8").partition("\nmod tests {")[0]))
    assert len(found) > 40
    return found
