"""Times, memory and page size of the viewer in a real browser on this machine, with the required values.

    .venv/bin/python benches/web/viewer.py --json benches/record/viewer.json

Each number is the median of several runs, with the fastest and the slowest beside it. Files are warm. The
contents of the page are compared with the known contents of the files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "view"))

from made_models import many

import ingot
import ingot.numpy
from ingot._view import report
from ingot._view.server import Server
from ingot._view.shelf import Shelf
from support.models import minilm
from support.sparse_models import write_file

# The time at which the overview is visible, since the start of the navigation.
FIRST = """() => new Promise((done) => {
  const look = () => document.querySelector("main dl")
    ? requestAnimationFrame(() => done(performance.now())) : setTimeout(look, 1);
  look();
})"""
# From a change of the fragment to what a selector finds, and until no job runs.
LOOK = """([hash, selector]) => new Promise((done) => {
  const begin = performance.now();
  let first = null;
  location.hash = hash;
  const look = () => {
    if (first === null && document.querySelector(selector)) first = performance.now() - begin;
    if (first !== null && !document.querySelector("[aria-busy]")) done([first, performance.now() - begin]);
    else setTimeout(look, 1);
  };
  setTimeout(look, 0);
})"""
SCROLL = """(pixels) => new Promise((done) => {
  const tree = document.querySelector(".tree");
  const begin = performance.now();
  let [frames, rows, last, longest] = [0, 0, begin, 0];
  const step = (now) => {
    frames++;
    longest = Math.max(longest, now - last);
    last = now;
    rows = Math.max(rows, document.querySelectorAll(".row").length);
    tree.scrollTop += pixels;
    if (now - begin < 2000) requestAnimationFrame(step);
    else done([(1000 * (frames - 1)) / (now - begin), rows, longest]);
  };
  requestAnimationFrame(step);
})"""
PRESS = """([text, until]) => new Promise((done) => {
  [...document.querySelectorAll("main button")].find((one) => one.textContent.startsWith(text)).click();
  const begin = performance.now();
  // Not by innerText, which lays the page out again each time.
  const look = () => (document.querySelector("main").textContent.includes(until)
    ? done(performance.now() - begin) : setTimeout(look, 5));
  look();
})"""
CANCEL = """() => new Promise((done) => {
  const buttons = [...document.querySelectorAll("main button")];
  buttons.find((one) => one.textContent === "Compare all values").click();
  setTimeout(() => {
    const begin = performance.now();
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    const look = () => (document.querySelector("main [role=status]").textContent.startsWith("Cancelled")
      ? done(performance.now() - begin) : setTimeout(look, 1));
    look();
  }, 150);
})"""


# Bytes of files that the page was given: short headers with their list, all others as ranges.
BYTES = """async () => {
  const authorization = `Bearer ${sessionStorage.getItem("ingot-token")}`;
  const { models } = await (await fetch("/files", { headers: { authorization } })).json();
  const heads = models.flatMap(({ files }) => files).map(({ head }) => atob(head ?? "").length);
  const asked = performance.getEntriesByType("resource").filter(({ name }) => /\\/f\\/\\d+$/.test(name));
  const ranges = asked.map(({ encodedBodySize }) => encodedBodySize);
  return [...heads, ...ranges].reduce((sum, one) => sum + one, 0);
}"""


class Bench:
    """Pages of one browser, and the table of their timings."""

    def __init__(self, browser: Any, looks: int) -> None:
        self.browser, self.looks = browser, looks
        self.rows: list[dict[str, object]] = []

    @contextmanager
    def page(self, *paths: Path, at: str = "") -> Iterator[Any]:
        shelf = Shelf([str(path) for path in paths])
        server = Server(shelf)
        context = self.browser.new_context(viewport={"width": 1200, "height": 800})
        try:
            page = context.new_page()
            page.set_default_timeout(120_000)
            page.goto(server.url + (f"&{at}" if at else ""), wait_until="commit")
            yield page
        finally:
            context.close()
            server.close()
            shelf.close()

    def tell(self, what: str, values: list[float], unit: str, owed: str) -> None:
        row = {
            "what": what,
            "median": median(values),
            "least": min(values),
            "most": max(values),
            "unit": unit,
            "owed": owed,
        }
        self.rows.append(row)
        print(
            f"{what:<62} {median(values):>9.5g} {unit:<5} "
            f"({min(values):.5g} to {max(values):.5g}); owed {owed}",
            flush=True,
        )

    def each(self, take: Callable[[], float]) -> list[float]:
        return [take() for _ in range(self.looks)]


def first_screen(bench: Bench) -> None:
    read: list[float] = []
    with minilm().open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    config = (minilm().parent / "config.json").stat().st_size

    def take() -> float:
        with bench.page(minilm()) as page:
            took = float(page.evaluate(FIRST))
            assert "22,713,728" in page.inner_text("main")
            read.append(float(page.evaluate(BYTES)))
            assert read[-1] == header + config
            return took

    bench.tell("first screen of 90.9 MB", bench.each(take), "ms", "150, aim 50")
    bench.tell("first screen of 90.9 MB: read, header and config.json", read, "bytes", "header only")


def long_header(bench: Bench, folder: Path) -> None:
    path = many(folder / "many.safetensors")
    frames: list[float] = []
    longest: list[float] = []
    rows: list[float] = []

    def take() -> float:
        with bench.page(path) as page:
            took = float(page.evaluate(FIRST))
            assert "100,000" in page.inner_text("main")
            page.fill("aside input", "weight")
            page.wait_for_function(
                "() => document.querySelector('aside .status').textContent.startsWith('100,000 of')"
            )
            rate, most, worst = page.evaluate(SCROLL, 400)
            frames.append(rate)
            rows.append(most)
            longest.append(worst)
            return took

    bench.tell("100,000 tensors: open", bench.each(take), "ms", "800, aim 500")
    bench.tell("100,000 tensors: scroll", frames, "fps", "60")
    bench.tell("100,000 tensors: longest frame", longest, "ms", "-")
    bench.tell("100,000 tensors: rows in the document", rows, "", "200")


def large_tensor(bench: Bench, folder: Path) -> None:
    path = folder / "large.safetensors"
    write_file(path, {"f32": ("F32", (250_000_000,)), "bf16": ("BF16", (500_000_000,))})
    for name in ("f32", "bf16"):
        memory: list[float] = []

        def take(name: str = name, memory: list[float] = memory) -> float:
            with bench.page(path, at=f"t={name}&view=code") as page:
                page.wait_for_selector("main pre")
                page.evaluate(LOOK, [f"t={name}&view=statistics", ".card button"])
                time.sleep(0.5)
                with watched() as peak:
                    took = float(page.evaluate(PRESS, ["Read all", "Standard"]))
                    page.wait_for_function("() => !document.querySelector('[aria-busy]')")
                    page.wait_for_selector("main figure")
                memory.append(peak[0])
                assert page.locator(".card button").count() == 0
                # All of it was counted: it is a hole, of zeros.
                zeros = {"f32": 250_000_000, "bf16": 500_000_000}[name]
                assert f"{zeros:,} (100\u00a0%)" in page.inner_text("main")
                return took

        times = bench.each(take)
        bench.tell(
            f"statistics and histogram of 1 GB of {name}",
            [1e6 / one for one in times],
            "MB/s",
            "200, aim 600",
        )
        bench.tell(f"memory of the page over idle, {name}", memory, "MiB", "64")


@contextmanager
def watched() -> Iterator[list[float]]:
    """How far the memory of the largest renderer grows, in MiB."""
    idle, peak, done = renderer(), [0.0], threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], renderer() - idle)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def renderer() -> float:
    """Return the private memory of the largest renderer, in MiB."""
    most = 0
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdigit() or b"--type=renderer" not in (process / "cmdline").read_bytes():
                continue
            fields = (process / "statm").read_text().split()
        except OSError:
            continue
        most = max(most, (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE"))
    return most / 2**20


def heatmap(bench: Bench, folder: Path) -> None:
    path = folder / "matrix.safetensors"
    write_file(path, {"matrix": ("F32", (32_000, 4096))})
    whole_of: list[float] = []

    def take() -> float:
        with bench.page(path) as page:
            page.evaluate(FIRST)
            first, all_of_it = page.evaluate(LOOK, ["t=matrix&view=picture", ".heat"])
            whole_of.append(all_of_it)
            return float(first)

    bench.tell("picture of [32000, 4096]: first", bench.each(take), "ms", "500, aim 200")
    bench.tell("picture of [32000, 4096]: every row of it", whole_of, "ms", "-")


def comparison(bench: Bench, folder: Path) -> None:
    other = folder / "other.safetensors"
    arrays = ingot.numpy.load_file(minilm())
    arrays = {name: array + array.dtype.type(1) for name, array in arrays.items()}
    ingot.numpy.save_file(arrays, other)

    def take() -> float:
        with bench.page(minilm(), other) as page:
            # The page compares small models when it opens, and a press does not start that again.
            page.wait_for_selector("text=tensors compared in")
            page.evaluate("() => document.querySelector('main [role=status]').replaceChildren()")
            took = float(page.evaluate(PRESS, ["Compare all values", "tensors compared in"]))
            assert "104 differ in values" in page.inner_text("main")
            return took

    def cancelled() -> float:
        with bench.page(minilm(), other) as page:
            page.wait_for_selector("text=tensors compared in")
            return float(page.evaluate(CANCEL))

    bench.tell("comparison of two models of 91 MB", bench.each(take), "ms", "500, aim 400")
    bench.tell("comparison: cancelled after", bench.each(cancelled), "ms", "100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--looks", type=int, default=5)
    given = parser.parse_args()
    program = shutil.which("chromium-headless-shell") or sys.exit("chromium-headless-shell is not installed")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        machine = {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "browser": browser.version,
            "load": os.getloadavg()[0],
        }
        print(" · ".join(f"{key} {value}" for key, value in machine.items()))
        bench = Bench(browser, given.looks)
        first_screen(bench)
        long_header(bench, Path(name))
        large_tensor(bench, Path(name))
        heatmap(bench, Path(name))
        comparison(bench, Path(name))
        size = len(gzip.compress(report.page().encode(), 9)) / 1000
        bench.tell("size of all of it, gzipped", [size], "kB", "90, aim 50")
        browser.close()
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
