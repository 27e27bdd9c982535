"""Headers of the reader in JavaScript when a browser follows a redirect."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import numpy
import pytest

import ingot.numpy
from support.servers import Answer, Handler, Request, Server, serving

DATA = ingot.numpy.save({"a": numpy.arange(9)})
CORS = {
    "Access_Control_Allow_Origin": "*",
    "Access_Control_Allow_Headers": "*, authorization",
    "Access_Control_Expose_Headers": "*",
}


def preflight(handler: Handler) -> None:
    handler.head(204, Content_Length=0, **CORS)


def file(handler: Handler, request: Request) -> None:
    """The file, for pages of every origin."""
    handler.part(DATA, request, ETag='"1"', **CORS)


def redirect(location: str) -> Answer:
    return lambda handler, request: handler.head(302, Location=location, Content_Length=0, **CORS)


def page(handler: Handler, request: Request) -> None:
    """The modules of the reader, and an empty page."""
    path = files("ingot") / "web" / request.path.strip("/")
    is_module = path.is_file()
    body = path.read_bytes() if is_module else b"<!doctype html>"
    handler.head(200, Content_Length=len(body), Content_Type="text/javascript" if is_module else "text/html")
    handler.body(body)


READ = """async ([url, headers]) => {
    const { readHeader } = await import("/index.js");
    try {
        return (await readHeader(new URL(url), { headers, allowPrivateRedirects: true })).tensors.length;
    } catch (error) {
        return error.code;
    }
}"""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, chromium: Any) -> Any:
    """Read through a redirect, and return the outcome and both servers."""
    monkeypatch.setattr(Handler, "do_OPTIONS", preflight, raising=False)
    with ExitStack() as stack:
        other = stack.enter_context(serving(file))
        home = stack.enter_context(serving(redirect(other.url().replace("127.0.0.1", "localhost"))))
        context = stack.enter_context(chromium.new_context())
        opened = context.new_page()
        opened.goto(stack.enter_context(serving(page)).url("/"))

        def read(headers: dict[str, str]) -> tuple[Any, Server, Server]:
            home.requests.clear()
            other.requests.clear()
            return opened.evaluate(READ, [home.url(), headers]), home, other

        yield read


def test_reader_keeps_headers_at_their_host_in_a_browser(hosts: Any) -> None:
    # Twice: after the first time, the reader knows that the browser hides redirects.
    for headers in ({"X-Api-Key": "s3cret"}, {"Authorization": "Bearer s3cret", "X-Key": "s3cret"}) * 2:
        found, home, other = hosts(headers)
        assert found == "redirect-refused"
        assert "s3cret" in str(home.requests)
        assert other.requests == []


def test_reader_follows_redirects_with_a_token_in_a_browser(hosts: Any) -> None:
    for headers in ({"Authorization": "Bearer s3cret"}, {}):
        found, _, other = hosts(headers)
        assert found == 1
        assert len(other.requests) == 1
        assert "s3cret" not in str(other.requests)
