"""Two models side by side."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import ml_dtypes
import numpy
import pytest

import ingot
import ingot.numpy
from support.models import Arrays, minilm, save
from view.conftest import Opener
from view.made_models import HOSTILE_NAMES, hostile

NAME = "encoder.layer.3.attention.self.query.weight"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The real model with five changes: other values, dtype, shape, a renamed tensor, a new tensor."""
    arrays = ingot.numpy.load_file(minilm())
    arrays[NAME] = arrays[NAME] + numpy.float32(0.5)
    arrays["pooler.dense.bias"] = arrays["pooler.dense.bias"].astype(ml_dtypes.bfloat16)
    arrays["embeddings.position_ids"] = arrays["embeddings.position_ids"].reshape(2, 256)
    arrays["renamed.weight"] = arrays.pop("embeddings.position_embeddings.weight")
    arrays["=new"] = numpy.zeros(3, numpy.int8)
    return save(tmp_path / "other.safetensors", arrays)


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in text.split("\n")}


def test_comparison_lists_differences_of_headers(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    look.wait("2 added, 1 removed, 1 of another shape, 1 of another dtype, 101 with equal headers.")
    look.settle()
    rows = rows_of(look.text("main tbody"))
    assert [row[0] for row in rows.values()][:5] == [
        "only in the first, perhaps renamed: renamed.weight",
        "only in the second",
        "only in the second, perhaps renamed: embeddings.position_embeddings.weight",
        "shape",
        "dtype",
    ]


def test_comparison_reads_all_values(viewed: Opener, other: Path, tmp_path: Path) -> None:
    look = viewed(minilm(), other)
    look.page.click("text=Compare all values")
    look.wait("102 tensors compared in")
    look.wait("1 differs in values.")
    look.page.click("main th button:has-text('Largest')")
    rows = rows_of(look.text("main tbody"))
    first = next(iter(rows))
    assert first == NAME
    assert rows[NAME][2:4] == ["0 %", "0.5"]
    expected = ingot.numpy.load_file(minilm())
    with look.page.expect_download() as waited:
        look.page.click("text=Save JSON")
    found = json.loads(Path(waited.value.path()).read_text())
    by_name = {row["name"]: row for row in found["tensors"]}
    assert len(by_name) == len(expected) + 2
    query = expected[NAME].astype(numpy.float64)
    changed = (expected[NAME] + numpy.float32(0.5)).astype(numpy.float64)
    assert by_name[NAME]["relative_l2"] == pytest.approx(
        float(numpy.linalg.norm(query - changed) / numpy.linalg.norm(query)), rel=1e-9
    )
    assert by_name[NAME]["different"] == query.size
    with look.page.expect_download() as waited:
        look.page.click("text=Save CSV")
    with open(waited.value.path(), newline="") as file:
        table = list(csv.DictReader(file))
    # A spreadsheet must not read a name as a formula.
    assert {row["name"] for row in table} == {*by_name, "'=new"} - {"=new"}
    with look.page.expect_download() as waited:
        look.page.click("text=Save Markdown")
    lines = Path(waited.value.path()).read_text().splitlines()
    assert len(lines) == len(by_name) + 2


def test_comparison_shows_both_histograms_and_an_image(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other, at=f"go=compare&t={NAME}")
    look.wait("147,456 of 147,456 values differ: largest |Δ| 0.5")
    look.settle()
    assert look.page.locator("main canvas").count() == 3
    drawn = look.page.get_attribute("main .heat + canvas", "aria-label")
    low, high = (float(text) for text in str(drawn).removeprefix("Colours from ").split(" to "))
    # No difference is in the middle of the colours.
    assert (low, high) == pytest.approx((-0.5, 0.5), abs=1e-6)


def test_comparison_shows_one_value_that_differs(viewed: Opener, tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    array = random.normal(0, 0.02, (512, 64)).astype(numpy.float32)
    kernel = numpy.zeros((3, 16, 64), numpy.float32)
    one = save(tmp_path / "one.safetensors", {"head": array, "kernel": kernel})
    array[7, 9] = 3
    kernel[2, 3, 4] = 1
    two = save(tmp_path / "two.safetensors", {"head": array, "kernel": kernel})
    look = viewed(one, two, at="go=compare&t=head")
    look.wait("1 of 32,768 values differs: largest |Δ| ")
    look.wait("The largest difference is at [7, 9]: ")
    look.settle()
    assert {row[2] for row in rows_of(look.text("main tbody")).values()} == {"> 99.99 %", "99.96 %"}
    # A cell has another colour than the cells of equal values.
    counted = "(heat) => new Set(new Uint32Array(heat.getContext('2d').getImageData(0, 0, heat.width, "
    counted += "heat.height).data.buffer)).size"
    assert look.page.eval_on_selector("main .heat", counted) == 2
    # Both histograms have one axis.
    bins = look.page.get_attribute("main canvas:not(.heat, .ramp)", "aria-label")
    assert str(bins).startswith("Histogram from -0.0")
    assert " to 3;" in str(bins)
    look.page.click("main button:text-is('kernel')")
    look.wait("The largest difference is at [2, 3, 4]: 0 in the first, 1 in the second.")
    look.settle()
    assert look.page.eval_on_selector("main .heat", counted) == 2


def test_comparison_says_that_all_values_are_equal(viewed: Opener) -> None:
    look = viewed(minilm(), minilm(), at=f"go=compare&t={NAME}")
    look.wait("All 147,456 values are equal.")
    look.settle()
    assert look.text("main .legend").endswith("both")
    look.wait("104 tensors compared in")
    look.page.check("text=Only what differs")
    assert "No tensor differs." in look.text()
    assert look.text("aside [role=status]") == "0 of 104 tensors"
    assert "The largest difference" not in look.text()


def test_comparison_of_a_nan_has_no_colours(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.ones((8, 8), numpy.float32)
    one = save(tmp_path / "one.safetensors", {"x": array})
    array[2, 3] = numpy.nan
    two = save(tmp_path / "two.safetensors", {"x": array})
    look = viewed(one, two, at="go=compare&t=x", color_scheme="dark")
    look.wait("NaN in 1 cell")
    look.settle()
    assert look.page.locator("main canvas.ramp").count() == 0
    assert "highest bar: 64 values" in look.text()
    # Equal values are dark on a dark page.
    first = "(heat) => heat.getContext('2d').getImageData(0, 0, 1, 1).data[0]"
    assert look.page.eval_on_selector("main .heat", first) < 50


def test_comparison_names_an_adapter(viewed: Opener, tmp_path: Path) -> None:
    arrays: Arrays = {
        f"base_model.model.encoder.layer.{n}.attention.self.query.lora_{factor}.weight": numpy.ones(
            shape, "f4"
        )
        for n in range(3)
        for factor, shape in (("A", (4, 384)), ("B", (384, 4)))
    }
    path = save(tmp_path / "lora.safetensors", arrays)
    assert "The second model is an adapter (LoRA, rank 4, " in viewed(minilm(), path).text()
    assert "is an adapter" not in viewed(path, path).text()
    assert "is an adapter" not in viewed(minilm(), minilm()).text()


def test_comparison_marks_the_sorted_column(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    look.wait("102 tensors compared in")
    sorted_by = "() => [...document.querySelectorAll('main th[aria-sort]')].map((one) => "
    sorted_by += "[one.textContent, one.ariaSort])"
    assert look.page.evaluate(sorted_by) == [["Difference", "descending"]]
    look.page.click("main th button:has-text('Name')")
    assert look.page.evaluate(sorted_by) == [["Name", "ascending"]]


def test_comparison_shows_all_columns_of_a_narrow_window(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other, viewport={"width": 360, "height": 740})
    look.wait("102 tensors compared in")
    assert not look.page.is_visible("main th:has-text('Cosine')")
    # The differences are sorted by a column that is shown.
    assert look.page.is_visible("main th:has-text('Relative')")
    look.page.check("main >> text=All columns")
    assert look.page.is_visible("main th:has-text('Cosine')")
    look.page.locator("main .compared .scroll").evaluate("(region) => region.scrollTo(1000, 0)")
    boxes = [look.page.locator("main th").nth(at).bounding_box() for at in (0, 6)]
    # The last column is reached, and the names stay.
    assert boxes[0]["x"] == 12
    assert boxes[1]["x"] + boxes[1]["width"] <= 360


def test_comparison_is_cancelled(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    # The page has compared the values once.
    look.wait("102 tensors compared in")
    # The time from the key press to the message, by the clock of the page: without the time of the test's
    # driver.
    took = look.page.evaluate(
        """() => new Promise((done) => {
          const buttons = [...document.querySelectorAll("main button")];
          buttons.find((one) => one.textContent === "Compare all values").click();
          setTimeout(() => {
            const begin = performance.now();
            document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
            const said = () => document.querySelector("main [role=status]").textContent;
            const look = () => said().startsWith("Cancelled")
              ? done(performance.now() - begin) : setTimeout(look, 1);
            look();
          }, 60);
        })"""
    )
    assert took < 5000
    assert "Cancelled after" in look.text()
    # The cancelled comparison does not delay later work.
    look.page.click("text=Compare all values")
    look.wait("102 tensors compared in")


def test_comparison_goes_on_when_its_button_is_pressed_again(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    look.wait("102 tensors compared in")
    requests = []
    for presses in (1, 2):
        before = len(look.requests)
        look.page.evaluate(
            """(presses) => new Promise((done) => {
              const status = document.querySelector("main [role=status]");
              status.replaceChildren();
              const buttons = [...document.querySelectorAll("main button")];
              const button = buttons.find((one) => one.textContent === "Compare all values");
              new MutationObserver(() => done()).observe(status, { childList: true });
              for (let n = 0; n < presses; n++) button.click();
            })""",
            presses,
        )
        requests.append(len(look.requests) - before)
    assert requests[0] == requests[1]
    assert "102 tensors compared in" in look.text()


def test_comparison_opens_a_second_model_by_hand(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), at="go=compare")
    look.page.set_input_files("input[type=file] >> nth=0", other)
    look.wait("101 with equal headers.")
    look.page.click("text=Compare all values")
    look.wait("1 differs in values.")


def test_comparison_takes_a_folder_and_a_file(viewed: Opener, tmp_path: Path) -> None:
    ingot.split(minilm(), tmp_path / "shards", "30MB")
    look = viewed(minilm(), tmp_path / "shards")
    look.page.click("text=Compare all values")
    look.wait("104 tensors compared in")
    look.wait("0 differ in values.")


def test_comparison_shows_hostile_names_as_text(viewed: Opener, tmp_path: Path) -> None:
    one, two = (hostile(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    look = viewed(one, two)
    look.page.click("text=Compare all values")
    look.wait("0 differ in values.")
    assert look.page.locator("main img, main script, main b b, main i").count() == 0
    assert not any(character in look.page.content() for character in "\u202e\x1b\x07")
    for kind in ("JSON", "Markdown", "CSV"):
        with look.page.expect_download() as waited:
            look.page.click(f"text=Save {kind}")
        text = Path(waited.value.path()).read_bytes().decode()
        if kind == "JSON":
            assert {row["name"] for row in json.loads(text)["tensors"]} == set(HOSTILE_NAMES)
        if kind == "CSV":
            assert len(list(csv.DictReader(io.StringIO(text, newline="")))) == len(HOSTILE_NAMES)
        if kind == "Markdown":
            assert len(text.splitlines()) == len(HOSTILE_NAMES) + 2
            # A backslash precedes characters that would begin an element.
            assert "<img" not in text.replace("\\<", "")


def test_comparison_begins_with_the_differences(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    # Files of this machine are compared without a request.
    look.wait("102 tensors compared in")
    assert look.text("main .lead").startswith("6 of 106 tensors differ")
    assert look.page.locator(".row[aria-selected=true]").count() == 0
    rows = rows_of(look.text("main tbody"))
    assert [row[0].partition(",")[0] for row in rows.values()][:7] == [
        "only in the first",
        "only in the second",
        "only in the second",
        "shape",
        "dtype",
        "values",
        "equal",
    ]
    assert len(rows) == 106
    look.page.check("text=Only what differs")
    assert len(rows_of(look.text("main tbody"))) == 6
    # The tree lists the tensors of both models that differ.
    shown = {row[0]: row[1] for row in look.rows()}
    assert len(shown) == 6
    assert (shown["=new"], shown["renamed.weight"], shown["pooler.dense.bias"]) == (
        "second",
        "second",
        "dtype",
    )
    assert shown[NAME] == "values"


def test_comparison_tree_holds_both_models(viewed: Opener, other: Path) -> None:
    look = viewed(minilm(), other)
    look.wait("102 tensors compared in")
    shown = {row[0].strip("▾▸ "): row[1] for row in look.rows()}
    assert shown["embeddings"] == "2 differ"
    assert shown["renamed"] == "1 differ"
    look.page.click(".row:has-text('=new')")
    look.settle()
    assert look.facts()["First"] == "has no such tensor"
    assert look.facts()["Second"] == "I8 [3]"
