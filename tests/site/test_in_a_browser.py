"""The site in a browser, opened from its folder: keyboard, screen reader, search, and no other requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

SITE = Path(__file__).parents[2] / "site"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
OF_THIS_MACHINE = ("file:", "data:", "blob:")
STANDARDS = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"]
PAGES = [
    "index",
    "start/install",
    "start/five-minutes",
    "guides/load",
    "guides/loading",
    "guides/credentials",
    "guides/javascript-api",
    "reference/codes",
    "reference/commands",
    "reference/names",
    "reference/python/ingot",
    "reference/python/generated/ingot.open",
    "reference/python/generated/ingot.safe_open",
    "explained/format",
    "explained/lazy",
    "explained/speed",
    "project/design",
    "project/make",
    "start/faq",
    "viewer",
    "search",
    "genindex",
]

pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="the site is not built: `make docs`"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="requirements/docs.txt is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(
            f"no browser is installed: {', '.join(BROWSERS)}"
        )
    with sync_api.sync_playwright() as playwright:
        # Chromium has no sandbox for root, as in containers.
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize(
    ("name", "scheme"), [*((name, "light") for name in PAGES), *((name, "dark") for name in PAGES[:4])]
)
def test_pages_are_accessible_and_request_no_host(browser: Any, name: str, scheme: str) -> None:
    import axe_playwright_python

    context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 800})
    page = context.new_page()
    asked: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto((SITE / f"{name}.html").as_uri())
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("standards => axe.run({runOnly: standards})", STANDARDS)
    context.close()
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20
    assert asked
    assert [url for url in asked if not url.startswith(OF_THIS_MACHINE)] == []
    assert faults == []


def test_site_viewer_opens_a_dropped_file_and_requests_no_host(browser: Any, tmp_path: Path) -> None:
    import numpy as np

    from ingot.numpy import save_file

    model = tmp_path / "model.safetensors"
    save_file({"encoder.weight": np.eye(64, dtype=np.float32)}, model)
    page = browser.new_page()
    asked: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    # Violations of its policy, such as a changed script, are errors on the console.
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.goto((SITE / "viewer.html").as_uri())
    page.set_input_files("input[type=file] >> nth=0", model)
    # Functions instead of text, since the page's policy forbids to run text as a script.
    page.wait_for_function("() => document.body.innerText.includes('4,096')")
    page.evaluate("() => { location.hash = 't=encoder.weight&view=statistics'; }")
    page.wait_for_function("() => document.body.innerText.includes('Standard deviation')")
    page.close()
    assert [url for url in asked if not url.startswith(OF_THIS_MACHINE)] == []
    assert faults == []


def test_site_search_works_without_a_server(browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{(SITE / 'search.html').as_uri()}?q=SIGBUS")
    page.wait_for_selector("#search-results ul.search li a")
    found = page.locator("#search-results ul.search li a").all_inner_texts()
    page.close()
    assert any("Backends and SIGBUS" in title for title in found)


SEARCHES = {
    "lazy": "explained/lazy",
    "benchmark": "explained/speed",
    "migrate": "start/from-safetensors",
    "multiprocessing": "guides/multiprocessing",
    "zero-copy": "explained/lazy",
    "sharded": "guides/sharded",
    "resume": "guides/resume",
    "convert": "guides/converting",
    "dequantize": "guides/converting",
    "numpy view": "explained/lazy",
}


@pytest.mark.parametrize(("words", "name"), SEARCHES.items())
def test_search_shows_the_right_page_first(browser: Any, words: str, name: str) -> None:
    page = browser.new_page()
    page.goto(f"{(SITE / 'search.html').as_uri()}?q={quote(words)}")
    page.wait_for_selector("#search-results ul.search li a")
    first = page.locator("#search-results ul.search li a").first.get_attribute("href")
    page.close()
    assert first.partition("#")[0] == f"{name}.html"


def test_code_blocks_fit_a_window_of_1280_pixels(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    too_wide = []
    for path in sorted(SITE.rglob("*.html")):
        if path.name != "viewer.html":
            page.goto(path.as_uri())
            lines = page.evaluate(
                "() => [...document.querySelectorAll('article pre')]"
                ".filter(one => one.scrollWidth > one.clientWidth)"
                ".map(one => one.textContent.split('\\n').sort((a, b) => b.length - a.length)[0])"
            )
            too_wide += [(path.relative_to(SITE).as_posix(), line) for line in lines]
    page.close()
    assert too_wide == []


def test_pages_fit_a_phone(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    wider = []
    for name in PAGES:
        page.goto((SITE / f"{name}.html").as_uri())
        # Code and wide tables scroll inside of their boxes.
        widths = page.evaluate(
            "() => [document.documentElement.scrollWidth,"
            " ...[...document.querySelectorAll('article img, article li')]"
            " .map(one => one.getBoundingClientRect().right)]"
        )
        if max(widths) > 390:
            wider.append((name, widths))
    page.close()
    assert wider == []
