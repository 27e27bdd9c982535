"""The layout of the viewer: panes, names, colours that the system forces, and files over the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from support.models import Arrays, minilm, save
from support.shards import INDEX, NAMES, checkpoint
from view.conftest import Look, Opener

WIDTH = "() => document.querySelector('aside').getBoundingClientRect().width"
# Texts of the tree that are wider than their cells.
CUT = """(selector) => [...document.querySelectorAll(selector)]
  .filter((cell) => cell.offsetParent !== null && cell.scrollWidth > cell.clientWidth)
  .map((cell) => cell.textContent)"""
NAMES_SHOWN = """() => [...document.querySelectorAll(".rows .row:not([hidden]) bdi")]
  .map((one) => one.textContent)"""
# The names follow the width of their column in the next frame.
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
PLACES = ("attn1_to_k", "attn1_to_out_0", "attn1_to_q", "attn2_to_k", "ff_net_0_proj", "ff_net_2")


def lora(path: Path) -> Path:
    """A LoRA with names as kohya's scripts write them."""
    arrays: Arrays = {}
    for block in range(3):
        for depth in range(2):
            for place in PLACES:
                stem = f"lora_unet_down_blocks_{block}_attentions_{depth}_transformer_blocks_0_{place}"
                arrays[f"{stem}.lora_down.weight"] = numpy.ones((4, 32), numpy.float16)
                arrays[f"{stem}.lora_up.weight"] = numpy.ones((32, 4), numpy.float16)
                arrays[f"{stem}.alpha"] = numpy.array(4, numpy.float16)
    return save(path, arrays)


def test_splitter_moves_by_pointer_and_keyboard(viewed: Opener) -> None:
    look = viewed(minilm())
    page = look.page
    assert page.evaluate(WIDTH) == 540
    splitter = page.locator("[role=separator]")
    box = splitter.bounding_box()
    page.mouse.move(box["x"] + 4, 400)
    page.mouse.down()
    page.mouse.move(700, 400)
    page.mouse.up()
    assert page.evaluate(WIDTH) == pytest.approx(700, abs=1)
    assert splitter.get_attribute("aria-valuenow") == "58"
    splitter.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(WIDTH) == pytest.approx(676, abs=1)
    page.keyboard.press("Home")
    assert splitter.get_attribute("aria-valuenow") == "20"
    # The next page has the same width.
    page.reload()
    look.settle()
    assert page.evaluate(WIDTH) == pytest.approx(240, abs=1)
    page.locator("[role=separator]").dblclick()
    assert page.evaluate(WIDTH) == 540


def test_narrow_screen_shows_details_first(viewed: Opener) -> None:
    look = viewed(minilm(), viewport={"width": 360, "height": 740})
    page = look.page
    assert page.is_visible("main h2")
    assert not page.is_visible(".tree")
    marked = "() => [...document.querySelectorAll('nav button')].filter((one) => "
    marked += "getComputedStyle(one).fontWeight === '600').map((one) => one.textContent)"
    assert page.evaluate(marked) == ["Overview"]
    page.click("nav button:has-text('Tensors')")
    assert page.evaluate(marked) == ["Tensors"]
    assert page.is_visible(".tree")
    assert not page.is_visible("main")
    page.click(".row:has-text('position_ids')")
    look.settle()
    assert page.is_visible("main h2:has-text('position_ids')")
    assert not page.is_visible(".tree")


def test_headings_are_whole(viewed: Opener) -> None:
    for width in (360, 1280, 1920):
        look = viewed(minilm(), viewport={"width": width, "height": 800})
        if width == 360:
            look.page.click("nav button:has-text('Tensors')")
        for sort in ("Name", "Shape") if width == 360 else ("Name", "Params", "Size", "Dtype", "Shape"):
            look.page.click(f".heads button:has-text('{sort}')")
            assert look.page.evaluate(CUT, ".heads span, .heads button") == [], width


@pytest.mark.parametrize("width", [360, 768, 1000, 1280])
def test_comparison_cuts_no_cell(viewed: Opener, tmp_path: Path, width: int) -> None:
    look = viewed(minilm(), two_models(tmp_path)[0], viewport={"width": width, "height": 800})
    if width == 360:
        look.page.click("nav button:has-text('Tensors')")
    selector = ".tree .row:not([hidden]) > :nth-child(n+2), .heads span"
    assert look.page.evaluate(CUT, selector) == []
    tree = look.page.evaluate(
        "() => [...document.querySelectorAll('.tree')].map((one) => one.scrollWidth - one.clientWidth)"
    )
    assert tree == [0]


@pytest.mark.parametrize("width", [360, 1280])
def test_rows_of_long_names_differ(viewed: Opener, tmp_path: Path, width: int) -> None:
    look = viewed(lora(tmp_path / "lora.safetensors"), viewport={"width": width, "height": 800})
    if width == 360:
        look.page.click("nav button:has-text('Tensors')")
        look.page.wait_for_selector(".rows .row")
    # Modules at their numbers.
    assert [row[0] for row in look.rows()] == ["▾ lora_unet_down_blocks", "▸ 0–2 ×3"]
    look.page.fill("aside input", "lora_up")
    look.wait("36 of 108 tensors")
    shown = look.page.evaluate(NAMES_SHOWN)
    assert len(shown) > 20
    assert len(set(shown)) == len(shown)
    assert look.page.evaluate(CUT, ".rows .row:not([hidden]) > :first-child") == []
    names = [row[0] for row in look.rows()]
    assert all(name.startswith("lora_unet_down_blocks_") for name in names)
    for name, text in zip(names, shown, strict=True):
        assert is_cut(name, text), (name, text)


def is_cut(name: str, shown: str) -> bool:
    """Whether only ellipses replace parts of a name, and its end is whole words."""
    parts = shown.split("…")
    pattern = ".+".join(map(re.escape, parts))
    return re.fullmatch(pattern, name) is not None and parts[-1].endswith("lora_up.weight")


def test_rows_of_any_names_differ(viewed: Opener, tmp_path: Path) -> None:
    # Names that differ at one place only, and parts without a word that fits.
    stems = ["transformer.h.{}.mlp.down_proj", "a" * 60 + "{}" + "b" * 60, "x_{}.y", "x.{}.y"]
    names = [stem.format(number) for stem in stems for number in (*range(6), 40, 41, 410)]
    path = save(tmp_path / "names.safetensors", {f"{name}.weight": numpy.ones(2) for name in names})
    look = viewed(path)
    look.page.fill("aside input", "weight")
    look.wait("36 of 36 tensors")
    look.page.focus("[role=separator]")
    for key in ("Home", "ArrowRight", "Enter"):
        look.page.keyboard.press(key)
        look.page.evaluate(NEXT_FRAME)
        shown = look.page.evaluate(NAMES_SHOWN)
        assert len(set(shown)) == len(shown) > 20
        assert look.page.evaluate(CUT, ".rows .row:not([hidden]) > :first-child") == []


def test_rows_of_names_without_words_differ(viewed: Opener, tmp_path: Path) -> None:
    # They differ at the last character, or far from both ends, where a column has no room for all before.
    names = [*("W" * 300 + end for end in "012"), *("v" * 400 + place + "v" * 400 for place in "01")]
    path = save(tmp_path / "names.safetensors", {name: numpy.ones(2) for name in names})
    for width in (360, 1280):
        look = viewed(path, viewport={"width": width, "height": 800})
        if width == 360:
            look.page.click("nav button:has-text('Tensors')")
            look.page.wait_for_selector(".rows .row")
        shown = look.page.evaluate(NAMES_SHOWN)
        assert len(set(shown)) == len(shown) == 5
        assert look.page.evaluate(CUT, ".rows .row:not([hidden]) > :first-child") == []


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_push_nothing_out(viewed: Opener, tmp_path: Path, width: int) -> None:
    name = "W" * 300
    path = save(tmp_path / "long.safetensors", {name: numpy.ones((4, 4))})
    page = viewed(path, viewport={"width": width, "height": 800}).page
    table = page.locator("[aria-label='Largest tensors']")
    assert table.evaluate("(region) => region.scrollWidth - region.clientWidth") == 0
    table.locator(".link").click()
    page.wait_for_selector("main dl")
    # The heading is not a region that scrolls, and the whole name is below it.
    heading = page.locator("main h2")
    assert heading.inner_text() == f"{name[:60]}…{name[:60]}"
    assert heading.evaluate("(one) => [getComputedStyle(one).overflowY, one.tabIndex]") == ["visible", -1]
    assert page.inner_text("main dd >> nth=0") == name


def test_comparison_gives_names_the_room(viewed: Opener, tmp_path: Path) -> None:
    path = lora(tmp_path / "lora.safetensors")
    look = viewed(path, path, viewport={"width": 1280, "height": 800})
    look.wait("108 tensors compared in")
    heights = look.page.evaluate(
        "() => [...document.querySelectorAll('main tbody tr')].map((row) => row.clientHeight)"
    )
    # Three lines of 20 pixels.
    assert max(heights) < 75


def test_names_break_at_dots_only(viewed: Opener) -> None:
    name = "encoder.layer.3.attention.self.query.weight"
    look = viewed(minilm(), at=f"t={name}", viewport={"width": 360, "height": 740})
    lines = look.page.evaluate(
        """() => {
          const lines = new Map();
          const range = document.createRange();
          for (const text of [...document.querySelector("main h2").childNodes].filter((one) => one.data)) {
            range.selectNode(text);
            const { top } = range.getBoundingClientRect();
            lines.set(top, (lines.get(top) ?? "") + text.data);
          }
          return [...lines.values()];
        }"""
    )
    assert "".join(lines) == name
    assert len(lines) > 1
    assert all(line.endswith(".") for line in lines[:-1])


def test_numbers_stay_beside_their_units(viewed: Opener) -> None:
    page = viewed(minilm(), viewport={"width": 360, "height": 740}).page
    assert "90.9\xa0MB" in page.inner_text("main .lead")
    assert ">\xa099.99\xa0%" in page.inner_text("[aria-label=Dtypes]")


def test_keys_of_screens_work_in_the_tree(viewed: Opener) -> None:
    look = viewed(minilm())
    for key, heading in (("m", "File map"), ("o", "model.safetensors"), ("c", "Comparison")):
        look.page.focus(".tree")
        look.page.keyboard.press(key)
        look.page.wait_for_function(
            "(text) => document.querySelector('main h2').textContent === text", arg=heading
        )


def test_narrow_screen_has_all_buttons_in_one_line(viewed: Opener) -> None:
    page = viewed(minilm(), viewport={"width": 360, "height": 700}).page
    boxes = [button.bounding_box() for button in page.locator("nav button").all()]
    assert len(boxes) == 6
    assert {box["y"] for box in boxes} == {boxes[0]["y"]}
    page.get_by_role("button", name="Keys").click()
    assert page.get_by_role("dialog").is_visible()


@pytest.mark.parametrize("width", [360, 640, 1000])
def test_tree_shows_all_columns_of_a_narrow_window(viewed: Opener, width: int) -> None:
    page = viewed(minilm(), viewport={"width": width, "height": 400}).page
    if width < 1000:
        page.click("nav button:has-text('Tensors')")
    heads = "() => [...document.querySelectorAll('.heads span')].filter((one) => one.offsetParent !== null)"
    heads += ".map((one) => one.textContent)"
    every = ["Name", "Params", "Size", "Dtype", "Shape"]
    assert page.evaluate(heads) == (["Name", "Shape"] if width < 1000 else every[:4])
    page.check("aside >> text=All columns")
    page.evaluate(NEXT_FRAME)
    assert page.evaluate(heads) == every
    assert page.evaluate(CUT, ".heads span, .rows .row:not([hidden]) > span") == []
    # The last column is reached.
    page.evaluate("() => document.querySelector('.tree').scrollTo(1000, 0)")
    box = page.locator(".heads span").last.bounding_box()
    assert box["x"] + box["width"] <= width
    assert page.locator(".rows .row:not([hidden]) > :first-child").first.bounding_box()["x"] == 0


def test_keys_scroll_the_details(viewed: Opener) -> None:
    page = viewed(minilm(), viewport={"width": 1200, "height": 400}).page
    top = "() => [document.querySelector('main').scrollTop, document.documentElement.scrollTop]"
    for key, begins, ends in (("PageDown", 100, 500), ("End", 501, 5000), ("Home", 0, 0)):
        page.keyboard.press(key)
        main, document = page.evaluate(top)
        assert begins <= main <= ends, key
        assert document == 0
    page.keyboard.press("End")
    page.click("text=File map")
    assert page.evaluate(top) == [0, 0]


def test_open_screen_is_marked_until_it_is_left(viewed: Opener) -> None:
    page = viewed(minilm()).page
    marked = "() => [...document.querySelectorAll('nav [aria-current]')].map((one) => one.textContent)"
    for leave in ("Escape", "Overview", "o"):
        assert page.evaluate(marked) == ["Overview"]
        page.click("text=Open…")
        assert page.evaluate(marked) == ["Open…"]
        if leave == "Overview":
            page.click(f"nav button:text-is('{leave}')")
        else:
            page.keyboard.press(leave)
        page.wait_for_selector("main h2:has-text('model.safetensors')")


@pytest.mark.parametrize("size", [(360, 740), (640, 400)])
def test_keys_keep_their_distance_from_the_edge(viewed: Opener, size: tuple[int, int]) -> None:
    page = viewed(minilm(), viewport={"width": size[0], "height": size[1]}).page
    page.keyboard.press("?")
    box = page.get_by_role("dialog").bounding_box()
    inner = page.get_by_role("button", name="Close").bounding_box()
    assert (
        min(box["x"], box["y"], size[0] - box["x"] - box["width"], size[1] - box["y"] - box["height"]) >= 20
    )
    assert inner["x"] - box["x"] >= 16


def test_picture_names_its_axes_and_its_unit(viewed: Opener) -> None:
    look = viewed(minilm(), at="t=pooler.dense.weight&view=picture&w=10,20,0,384")
    texts = look.text("main figure").split("\n")
    assert [text for text in texts if text][:4] == ["column 0", "383", "row 10", "29"]
    assert texts[-2] == "value"


def test_picture_after_values_shows_all(viewed: Opener) -> None:
    look = viewed(minilm(), at="t=pooler.dense.weight&view=values&w=40,32,9,12")
    look.page.click("main button:text-is('Picture')")
    look.wait("Rows 0 to 383, columns 0 to 383.")
    look.settle()


def test_links_are_underlined_in_forced_colours(viewed: Opener) -> None:
    page = viewed(minilm(), forced_colors="active").page
    line = "(link) => getComputedStyle(link).textDecorationLine"
    assert page.locator("main .link").first.evaluate(line) == "underline"


def test_forced_colours_leave_selection_and_bars(viewed: Opener) -> None:
    look = viewed(minilm(), at="t=embeddings.position_ids", forced_colors="active")
    look.page.click("text=Overview")
    # Nothing is selected before a tensor is open.
    assert look.page.locator(".row[aria-selected=true]").count() == 0
    colour = "(selector) => getComputedStyle(document.querySelector(selector)).backgroundColor"
    current = look.page.evaluate(colour, "button[aria-current]")
    bar = look.page.evaluate(colour, ".bar > span")
    look.page.click(".row:has-text('position_ids')")
    look.settle()
    chosen = look.page.evaluate(colour, ".row[aria-selected=true]")
    assert chosen != look.page.evaluate(colour, ".row[aria-selected=false]")
    assert current == chosen
    paper = look.page.evaluate(colour, "body")
    assert bar not in (paper, "rgba(0, 0, 0, 0)")


def two_models(folder: Path) -> list[Path]:
    return [
        save(folder / f"{name}.safetensors", {"x": numpy.eye(8) * size})
        for name, size in (("a", 1), ("b", 2))
    ]


def drag(look: Look, kind: str, x: int, *paths: Path) -> None:
    session = look.page.context.new_cdp_session(look.page)
    data: dict[str, Any] = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": 300, "data": data})


def test_drag_shows_its_effect_over_the_whole_page(opened_by_hand: Look, tmp_path: Path) -> None:
    look = opened_by_hand
    first, second = two_models(tmp_path)
    drag(look, "dragEnter", 300, first)
    look.wait("Drop to open")
    box = look.page.locator(".dragging").bounding_box()
    assert (box["width"], box["height"]) == (1200, 800)
    drag(look, "drop", 300, first)
    look.wait("a.safetensors")
    assert not look.page.is_visible(".dragging")
    # The right half puts the file beside the open one.
    drag(look, "dragEnter", 900, second)
    assert look.page.inner_text(".aimed") == "Drop to compare with a.safetensors"
    drag(look, "drop", 900, second)
    look.wait("Comparison")


def test_drop_of_two_models_compares_them(opened_by_hand: Look, tmp_path: Path) -> None:
    look = opened_by_hand
    paths = two_models(tmp_path)
    drag(look, "dragEnter", 300, *paths)
    look.wait("Drop to compare the two")
    drag(look, "drop", 300, *paths)
    look.wait("Comparison")
    look.wait("b.safetensors")


def drop(look: Look, *paths: Path) -> None:
    for kind in ("dragEnter", "dragOver", "drop"):
        drag(look, kind, 300, *paths)


def test_drop_of_a_folder_without_files_shows_a_card(opened_by_hand: Look, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    drop(opened_by_hand, tmp_path / "empty")
    opened_by_hand.wait("the dropped folder `empty` has no files that the browser can read")


def test_drop_of_shards_is_named_after_their_index(opened_by_hand: Look, tmp_path: Path) -> None:
    files = [tmp_path / name for name in (*NAMES[:2], INDEX)]
    for name, data in checkpoint(names=NAMES[:2]).items():
        (tmp_path / name).write_bytes(data)
    drop(opened_by_hand, *files)
    opened_by_hand.wait("4 tensors")
    assert opened_by_hand.page.inner_text("main h2") == "model.safetensors.index.json"


def test_drop_remembers_only_files_that_open(opened_by_hand: Look, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    drop(opened_by_hand, tmp_path / "notes.txt")
    opened_by_hand.wait("too-short")
    assert "Opened before" not in opened_by_hand.text()
    drop(opened_by_hand, two_models(tmp_path)[0])
    opened_by_hand.wait("a.safetensors")
    opened_by_hand.page.get_by_role("button", name="Open…").click()
    opened_by_hand.wait("Opened before: a.safetensors")
