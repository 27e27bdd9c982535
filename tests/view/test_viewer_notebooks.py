"""`ingot.view`: its output in a page, as a notebook shows it."""

from __future__ import annotations

import gc
import io
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.models import minilm, save
from support.servers import good, serving
from view.conftest import Look

REMOTE = (
    *("SSH_CONNECTION", "JUPYTERHUB_SERVICE_PREFIX", "COLAB_RELEASE_TAG", "KUBERNETES_SERVICE_HOST"),
    *("KAGGLE_KERNEL_RUN_TYPE", "CODESPACES", "REMOTE_CONTAINERS"),
)


@pytest.fixture(autouse=True)
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REMOTE:
        monkeypatch.delenv(name, raising=False)


class Notebook(BaseHTTPRequestHandler):
    """A page of another server on this machine, with the output of a cell."""

    html = ""

    def do_GET(self) -> None:
        body = f"<!doctype html><title>notebook</title><link rel=icon href='data:,'>{self.html}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def notebook(chromium: Any) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Notebook)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    context = chromium.new_context(viewport={"width": 1000, "height": 800})
    look = Look(context.new_page(), "http://127.0.0.1:")

    def show(view: ingot.View) -> Any:
        Notebook.html = view._repr_html_()
        look.page.goto(f"http://127.0.0.1:{server.server_port}/")
        frame = look.page.frames[1]
        frame.wait_for_selector("main article")
        return frame

    def embedded(view: Any) -> Any:
        Notebook.html = view._repr_html_()
        look.page.goto(f"http://127.0.0.1:{server.server_port}/")
        frame = next(one for one in look.page.frames if one.url == "about:srcdoc")
        frame.wait_for_selector("main article")
        return frame

    show.look, show.embedded = look, embedded  # type: ignore[attr-defined]
    yield show
    look.check()
    context.close()
    server.shutdown()
    server.server_close()


def test_view_shows_a_server_in_a_frame(notebook: Any) -> None:
    with ingot.view(minilm(), height=500) as view:
        assert view.url is not None
        assert "token" not in repr(view)
        frame = notebook(view)
        assert "22,713,728" in frame.inner_text("main")
        frame.click(".link >> nth=0")
        frame.wait_for_selector("text=Standard deviation")


@pytest.mark.parametrize("how", ["page", "auto"])
def test_view_shows_a_page_in_a_frame(notebook: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "auto":
        monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    view = ingot.view(minilm(), how=how)
    assert view.url is None
    frame = notebook(view)
    assert "22,713,728" in frame.inner_text("main")
    frame.click(".link >> nth=0")
    frame.wait_for_selector("text=Standard deviation")
    frame.click("text=File map")
    frame.wait_for_selector(".strip")


def test_view_replaces_the_embedded_page_by_the_server(notebook: Any) -> None:
    with ingot.view(minilm()) as view:
        notebook(view)
        page = notebook.look.page
        page.wait_for_function("() => document.querySelectorAll('iframe').length === 1")
        assert page.evaluate("() => document.querySelector('iframe').style.visibility") == "visible"


@pytest.mark.parametrize("fault", ["blocked", "closed"])
def test_view_is_embedded_if_the_server_cannot_be_reached(notebook: Any, fault: str, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    look = notebook.look
    look.expected = "Failed to load resource"
    view = ingot.view(path)
    html = view._repr_html_()
    if fault == "closed":
        # As a notebook that is opened later.
        view.close()
    else:
        look.page.route(f"{view._server.origin}/**", lambda route: route.abort())
    view._repr_html_ = lambda: html
    frame = notebook.embedded(view)
    assert "52 tensors" in frame.inner_text("main .lead")
    frame.click(".link >> nth=0")
    frame.wait_for_selector("text=Standard deviation")
    hidden = look.page.evaluate("() => document.querySelector('iframe[src]').style.visibility")
    assert hidden == "hidden"
    view.close()


def test_view_embeds_two_models(notebook: Any, tmp_path: Path) -> None:
    paths = [
        save(tmp_path / f"{name}.safetensors", {name: numpy.eye(4), "x": numpy.eye(3)}) for name in ("a", "b")
    ]
    notebook.look.expected = "Failed to load resource"
    view = ingot.view(*paths)
    html = view._repr_html_()
    view.close()
    view._repr_html_ = lambda: html
    frame = notebook.embedded(view)
    assert "2 of 3 tensors differ by the headers" in frame.inner_text("main .lead")


@pytest.mark.parametrize("how", ["page", "server"])
def test_view_has_a_sentence_behind_the_frame(chromium: Any, tmp_path: Path, how: Any) -> None:
    with ingot.view(save(tmp_path / "model.safetensors"), how=how) as view:
        page = chromium.new_page()
        # A site that shows no frames.
        page.set_content(view._repr_html_().replace("<iframe", "<template").replace("</iframe", "</template"))
        assert page.inner_text("p").startswith("If no viewer is shown here, ")
        assert page.is_visible("p code:text('--html report.html')")
        assert (page.locator("p a").count() == 1) == (how == "server")
        page.close()


def test_view_embeds_the_headers_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model.safetensors")
    with ingot.view(path) as view:
        assert "&quot;std&quot;" in view._repr_html_()
        monkeypatch.setattr("ingot._view.notebook._EMBEDDED_NBYTES", 100)
        assert "&quot;std&quot;" not in view._repr_html_()


def test_view_takes_every_source(notebook: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"x": numpy.arange(6.0).reshape(2, 3)})
    with serving(good(path.read_bytes())) as store, ingot.safe_open(path, "np") as handle:
        for source in (
            path,
            str(path),
            bytes(path),
            handle,
            store.url("/model.safetensors"),
            io.BytesIO(path.read_bytes()),
        ):
            with ingot.view(source) as view:
                frame = notebook(view)
                frame.click("main .link")
                frame.click("button:text('Values')")
                frame.wait_for_selector("main tbody")
                assert [line.split("\t")[1:] for line in frame.inner_text("main tbody").split("\n")] == [
                    ["0", "1", "2"],
                    ["3", "4", "5"],
                ]


def test_view_stops_its_server(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    view = ingot.view(path)
    url = str(view.url).partition("#")[0]
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.status == 200
        assert "http://localhost:*" in answer.headers["Content-Security-Policy"]
    view.close()
    view.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)
    view = ingot.view(path)
    url = str(view.url).partition("#")[0]
    del view
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)


def test_view_explains_an_invalid_source(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        ingot.view(tmp_path / "none.safetensors")
    with pytest.raises(ingot.OptionError, match="how"):
        ingot.view(path, how="window")
    with pytest.raises(ingot.OptionError, match="one model"):
        ingot.view(path, path, how="page")
    with ingot.safe_open(path, "np") as handle:
        pass
    with pytest.raises(ingot.ClosedError):
        ingot.view(handle)
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    (tmp_path / "several").mkdir()
    save(tmp_path / "several" / "a.safetensors")
    save(tmp_path / "several" / "b.safetensors")
    (tmp_path / "empty").mkdir()
    for how in ("page", "server"):
        for name in ("bad.safetensors", "several", "empty"):
            with pytest.raises((ingot.SafetensorError, OSError)) as expected:
                ingot.inspect(tmp_path / name)
            with pytest.raises(type(expected.value)) as caught:
                ingot.view(tmp_path / name, how=how)
            assert str(caught.value) == str(expected.value)
