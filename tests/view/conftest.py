"""A real browser, and pages of the viewer in it. Every page is checked for the common rules."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ingot._view.server import Server
from ingot._view.shelf import Shelf

JS = Path(__file__).parents[2] / "js"
PROGRAM = "chromium-headless-shell"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"{PROGRAM} is not installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="chromium needs playwright to be driven")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs rights that containers lack.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def plain(text: str) -> str:
    """Return a text with spaces at which lines may break in place of those at which they may not."""
    return text.replace("\xa0", " ")


class Look:
    """A page of the viewer, with its requests and its errors."""

    def __init__(self, page: Any, allowed: str) -> None:
        self.page = page
        self.requests: list[Any] = []
        self.faults: list[str] = []
        # A part of the text of faults that a test expects, maybe late.
        self.expected: str | None = None
        self.allowed = allowed
        page.set_default_timeout(120_000)
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.faults.append(message.text))

    def serve_modules(self) -> None:
        """Answer requests for the modules of `js`, which the server does not have."""
        for folder in ("src", "viewer"):
            self.page.route(
                f"{self.allowed}/{folder}/*.js",
                lambda route: route.fulfill(path=JS / urlsplit(route.request.url).path[1:]),
            )

    def text(self, selector: str = "main") -> str:
        return plain(self.page.inner_text(selector))

    def facts(self) -> dict[str, str]:
        """Return the facts that the screen shows, by label."""
        found = self.page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll('main dt')].map((term) => "
            "[term.textContent, term.nextElementSibling.textContent]))"
        )
        return {term: plain(text) for term, text in found.items()}

    def wait(self, text: str) -> None:
        """Wait until the screen shows a text."""
        self.page.wait_for_function(
            "(text) => document.body.innerText.replaceAll('\\u00a0', ' ').includes(text)", arg=text
        )

    def settle(self) -> None:
        """Wait until all jobs have ended and all pictures are final."""
        self.page.wait_for_function(
            "() => document.querySelector('main article, main .card') "
            "&& !document.querySelector('[aria-busy]')"
        )

    def draw(self) -> None:
        """Wait for two frames, in which observers of sizes hide what does not fit."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def rows(self) -> list[list[str]]:
        """Return the rows of the tree that are in the document."""
        found = self.page.evaluate(
            "() => [...document.querySelectorAll('.rows .row:not([hidden])')].sort((a, b) => "
            "a.ariaRowIndex - b.ariaRowIndex).map((row) => [...row.children].map((cell) => "
            "cell.ariaLabel ?? cell.textContent))"
        )
        return [[plain(cell) for cell in row] for row in found]

    def check(self) -> None:
        """Check every page: it requests no other host, and has no errors."""
        elsewhere = [
            one.url for one in self.requests if not one.url.startswith((self.allowed, "blob:", "data:"))
        ]
        assert elsewhere == []
        assert [one for one in self.faults if self.expected is None or self.expected not in one] == []


Opener = Callable[..., Look]


@pytest.fixture
def viewed(chromium: Any) -> Iterator[Opener]:
    """Open the viewer on paths, at a fragment, and check the page in the end. `modules` may be imported."""
    looks: list[Look] = []
    with ExitStack() as stack:

        def view(*paths: Path | str, at: str = "", modules: bool = False, **settings: Any) -> Look:
            shelf = Shelf([str(path) for path in paths])
            stack.callback(shelf.close)
            server = Server(shelf)
            stack.callback(server.close)
            size = {"width": 1200, "height": 800}
            context = chromium.new_context(**{"viewport": size, "bypass_csp": modules} | settings)
            stack.callback(context.close)
            look = Look(context.new_page(), server.origin)
            if modules:
                look.serve_modules()
            looks.append(look)
            look.page.goto(server.url + (f"&{at}" if at else ""))
            look.settle()
            return look

        yield view
        for look in looks:
            look.check()


@pytest.fixture
def opened_by_hand(chromium: Any) -> Iterator[Look]:
    """Yield the viewer with no open file."""
    shelf = Shelf([])
    server = Server(shelf)
    context = chromium.new_context(viewport={"width": 1200, "height": 800})
    look = Look(context.new_page(), server.origin)
    look.page.goto(server.origin)
    look.settle()
    yield look
    look.check()
    context.close()
    server.close()
