"""The viewer as one file, empty and with a report, opened by a double click (file://)."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._view import report as _report
from support.commands import good, run
from support.models import minilm, save
from view import made_models
from view.conftest import Look

NAME = "embeddings.word_embeddings.weight"
DoubleClick = Callable[[Path], Look]


@pytest.fixture
def double_click(chromium: Any) -> Iterator[DoubleClick]:
    looks: list[Look] = []

    def opened(path: Path) -> Look:
        context = chromium.new_context(viewport={"width": 1200, "height": 800})
        look = Look(context.new_page(), "file://")
        looks.append(look)
        look.page.goto(path.as_uri())
        look.settle()
        return look

    yield opened
    for look in looks:
        look.check()
        look.page.context.close()


def test_viewer_file_is_small() -> None:
    assert len(gzip.compress(_report.page().encode(), 9)) <= 90_000


def test_viewer_is_one_file(double_click: DoubleClick, tmp_path: Path) -> None:
    path = tmp_path / "viewer.html"
    good("view", "--html", path)
    assert run("view", "--html", path).code == 2
    good("view", "--html", path, "--overwrite")
    look = double_click(path)
    look.page.set_input_files("input[type=file] >> nth=0", minilm())
    look.wait("22,713,728")
    look.page.evaluate("(name) => { location.hash = `t=${name}&view=statistics`; }", NAME)
    look.wait("Standard deviation")
    assert look.facts()["Maximum"] == "1.0494"
    for view in ("Picture", "Values", "Code"):
        look.page.click(f".tabs button:has-text('{view}')")
        look.settle()
        assert look.page.locator(".fault").count() == 0
    # It requests nothing from a network or from the disk beside it.
    assert [one.url.partition("#")[0] for one in look.requests if not one.url.startswith("blob:")] == [
        path.as_uri()
    ]


def drop(look: Look, *paths: Path) -> None:
    """Drop files on the page as a user does."""
    session = look.page.context.new_cdp_session(look.page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})


@pytest.mark.parametrize("report", [False, True])
def test_page_opens_dropped_files(double_click: DoubleClick, tmp_path: Path, report: bool) -> None:
    first, second = (
        save(tmp_path / name, {name: numpy.eye(8)}) for name in ("a.safetensors", "b.safetensors")
    )
    good("view", *([first] if report else []), "--html", tmp_path / "viewer.html")
    look = double_click(tmp_path / "viewer.html")
    for path in (second, first):
        drop(look, path)
        look.wait("Tensors")
        look.page.wait_for_function(
            "(name) => document.querySelector('main h2').textContent === name", arg=path.name
        )
    drop(look, first, second)
    look.wait("Comparison")
    # Three files are one model, or a card.
    drop(look, first, second, save(tmp_path / "c.safetensors", {"c": numpy.eye(8)}))
    look.wait("ambiguous-checkpoint")


@pytest.mark.parametrize("is_served", [False, True])
def test_page_opens_a_dropped_folder_or_shows_a_card(
    double_click: DoubleClick, opened_by_hand: Look, tmp_path: Path, is_served: bool
) -> None:
    (tmp_path / "folder").mkdir()
    save(tmp_path / "folder" / "model.safetensors", {"x": numpy.eye(8)})
    good("view", "--html", tmp_path / "viewer.html")
    look = opened_by_hand if is_served else double_click(tmp_path / "viewer.html")
    drop(look, tmp_path / "folder")
    # Chromium lets no page of file:// read a folder that is dropped on it.
    look.wait("64" if is_served else "choose it with the button")


def test_page_works_on_a_web_site(chromium: Any, tmp_path: Path) -> None:
    """The page works on an ordinary web server without support for ranges."""
    (tmp_path / "viewer.html").write_text(_report.page(), "utf-8")
    save(tmp_path / "model.safetensors", {"x": numpy.arange(6.0).reshape(2, 3)})
    handler = partial(Quiet, directory=tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    context = chromium.new_context(viewport={"width": 1200, "height": 800})
    look = Look(context.new_page(), origin)
    try:
        look.page.goto(f"{origin}/viewer.html#a=model.safetensors&t=x&view=values")
        look.page.wait_for_selector("main tbody")
        assert [line.split("\t")[1:] for line in look.text("main tbody").split("\n")] == [
            ["0", "1", "2"],
            ["3", "4", "5"],
        ]
        look.page.click("text=Statistics")
        look.wait("Standard deviation")
        look.check()
    finally:
        context.close()
        server.shutdown()
        server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        # A browser may answer ranges of cached files without a request.
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["one file", "many files", "bt"])
def test_report_shows_the_page(double_click: DoubleClick, tmp_path: Path, kind: str) -> None:
    model = minilm()
    if kind == "many files":
        ingot.split(model, tmp_path / "shards", "30MB")
        model = tmp_path / "shards"
    if kind == "bt":
        model = tmp_path / "model.bt"
        ingot.rewrite(minilm(), model)
    path = tmp_path / "report.html"
    answer = good("view", model, "--html", path, "--json").json()
    assert answer == {"file": str(path), "nbytes": path.stat().st_size}
    assert path.stat().st_size < 1_000_000
    look = double_click(path)
    facts = look.facts()
    assert facts["Parameters"] == "22.7M (22,713,728)"
    assert facts["Files"] == ("3" if kind == "many files" else "1")
    assert facts["Format"] == ("bintensors" if kind == "bt" else "safetensors")
    look.page.evaluate("(name) => { location.hash = `t=${name}&view=statistics`; }", NAME)
    look.wait("Standard deviation")
    assert look.facts()["Maximum"] == "1.0494"
    assert look.page.locator("main canvas").count() == 1
    look.page.click(".tabs button:has-text('Picture')")
    look.wait("values, spread evenly over the tensor")
    look.page.click(".tabs button:has-text('Values')")
    look.wait("The report holds no values.")
    look.page.click("text=File map")
    assert look.page.locator(".strip").count() >= 1


def test_report_holds_the_configuration_of_an_adapter(double_click: DoubleClick, tmp_path: Path) -> None:
    good("view", made_models.peft(tmp_path), "--html", tmp_path / "report.html")
    look = double_click(tmp_path / "report.html")
    assert "alpha 8 (adapter_config.json)" in look.facts()["Kind"]


def test_page_reads_the_configuration_of_a_chosen_adapter(double_click: DoubleClick, tmp_path: Path) -> None:
    good("view", "--html", tmp_path / "viewer.html")
    look = double_click(tmp_path / "viewer.html")
    files = [made_models.peft(tmp_path), tmp_path / "adapter_config.json"]
    look.page.set_input_files("input[type=file] >> nth=0", files)
    look.wait("alpha 8 (adapter_config.json)")
    assert look.text("main h2") == "adapter_model.safetensors"


def test_report_holds_no_whole_tensor(tmp_path: Path) -> None:
    secret = numpy.arange(10_000, dtype=numpy.int64) * 7919
    path = save(tmp_path / "model.safetensors", {"x": secret.reshape(100, 100)})
    good("view", path, "--html", tmp_path / "report.html")
    (report,) = json.loads(
        (tmp_path / "report.html").read_text().partition('id="report">')[2].partition("</script>")[0]
    )
    assert len(report["thumbnails"]["x"]["data"]) < 12_000
    assert report["statistics"]["x"]["max"] == int(secret.max())


def test_report_treats_hostile_names_as_data(double_click: DoubleClick, tmp_path: Path) -> None:
    path = made_models.hostile(tmp_path / "hostile.safetensors")
    good("view", path, "--html", tmp_path / "report.html")
    look = double_click(tmp_path / "report.html")
    assert look.facts()["Tensors"] == str(len(made_models.HOSTILE_NAMES))
    assert look.page.locator("script").count() == 2
    assert look.page.locator("main img, main script, main b, main i").count() == 0


def test_report_holds_values_that_json_lacks(double_click: DoubleClick, tmp_path: Path) -> None:
    arrays = {
        "big": numpy.array([2**63 - 1, -(2**63)]),
        "nan": numpy.array([numpy.nan]),
        "none": numpy.zeros((0, 3)),
        "bool": numpy.array([[True, False]]),
    }
    path = save(tmp_path / "model.safetensors", arrays)
    good("view", path, "--html", tmp_path / "report.html")
    look = double_click(tmp_path / "report.html")
    look.page.evaluate("() => { location.hash = 't=big&view=statistics'; }")
    look.wait("9223372036854775807")
    for name in ("nan", "none", "bool"):
        for view in ("statistics", "picture"):
            look.page.evaluate("(hash) => { location.hash = hash; }", f"t={name}&view={view}&go=tensor")
            look.settle()
            assert look.page.locator(".fault").count() == 0


def test_page_allows_its_own_script_and_style_only() -> None:
    page = _report.page()
    for kind, begin in (("script", '<script id="viewer">'), ("style", "<style>")):
        assert page.count(begin) == page.count(f"</{kind}>") == 1
        text = page.partition(begin)[2].partition(f"</{kind}>")[0]
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in _report.policy()
    assert _report.policy().startswith("default-src 'none'; ")
