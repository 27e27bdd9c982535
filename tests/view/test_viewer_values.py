"""Values of a tensor: slices, odd values, copies and files."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy
import pytest

from support.models import Arrays, minilm, save
from view.conftest import Look, Opener


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A model with a NaN, infinities and zeros."""
    random = numpy.random.default_rng(0)
    arrays = {f"layers.{n}.weight": random.standard_normal((64, 48)).astype(numpy.float32) for n in range(4)}
    arrays["layers.2.weight"][41, 17] = numpy.nan
    arrays["layers.2.weight"][50, 3:5] = numpy.inf
    arrays["layers.3.weight"][:] = 0
    arrays["kernel"] = numpy.arange(4 * 5 * 6, dtype=numpy.float32).reshape(4, 5, 6)
    arrays["kernel"][2, 3, 4] = numpy.nan
    return save(tmp_path / "odd.safetensors", arrays)


def saved(look: Look, button: str) -> bytes:
    """Return the bytes that a button saves. A timeout shows which step failed: the job or the download."""
    look.settle()
    with look.page.expect_download() as waited:
        look.page.click(f"text={button}")
        look.wait("Saved.")
    return Path(waited.value.path()).read_bytes()


def test_overview_finds_odd_values(viewed: Opener, odd: Path) -> None:
    look = viewed(odd)
    look.page.click("text=Look for NaN and infinities")
    look.wait("2 tensors hold NaN or infinities.")
    look.settle()
    table = look.text("[aria-label='Tensors with NaN or infinities'] tbody")
    assert table.split("\n") == ["kernel\t1\t0", "layers.2.weight\t1\t2"]
    assert "1 tensor holds only zeros: layers.3.weight" in look.text()
    # The result stays with the model.
    look.page.click("text=File map")
    look.page.click("text=Overview")
    look.wait("2 tensors hold NaN or infinities.")


def test_overview_says_that_all_values_are_finite(viewed: Opener) -> None:
    look = viewed(minilm())
    look.page.click("text=Look for NaN and infinities")
    look.wait("All values are finite.")


@pytest.mark.parametrize(
    ("name", "kind"), [("layers.2.weight", "nan"), ("layers.2.weight", "infinite"), ("kernel", "nan")]
)
def test_statistics_lead_to_the_first_odd_value(viewed: Opener, odd: Path, name: str, kind: str) -> None:
    look = viewed(odd, at=f"t={name}")
    look.page.click(f"p:has(.{kind}) button")
    look.page.wait_for_selector("main tbody")
    look.settle()
    cells = look.page.evaluate(
        """(kind) => [...document.querySelectorAll(`td.${kind}`)].map((cell) => [
          cell.parentElement.firstChild.textContent,
          cell.closest("table").tHead.rows[0].cells[cell.cellIndex].textContent,
        ])""",
        kind,
    )
    expected = {"kernel": ["3", "4"], "nan": ["41", "17"], "infinite": ["50", "3"]}
    assert cells[0] == expected[name if name == "kernel" else kind]
    if name == "kernel":
        assert look.page.input_value("#slice-0") == "2"


def test_slider_chooses_the_slice(viewed: Opener, odd: Path) -> None:
    look = viewed(odd, at="t=kernel&view=values")
    look.page.focus("#slice-0")
    look.page.keyboard.press("ArrowRight")
    look.settle()
    # The focus stays, so that the next key moves on.
    look.page.keyboard.press("ArrowRight")
    look.settle()
    assert look.text("main tbody").split("\n")[1] == "1\t66\t67\t68\t69\t70\t71"
    assert look.page.input_value("#slice-0-number") == "2"
    look.page.fill("#slice-0-number", "3")
    look.page.keyboard.press("Enter")
    look.settle()
    assert look.text("main tbody").split("\n")[0].startswith("0\t90")


@pytest.mark.parametrize("width", [360, 640, 1280])
def test_values_fill_whole_columns(viewed: Opener, odd: Path, width: int) -> None:
    look = viewed(odd, at="t=layers.1.weight&view=values", viewport={"width": width, "height": 700})
    look.wait("columns 0 to ")
    seen: list[str] = []
    for _ in range(3):
        # No cell ends outside of its region, and the names of the rows keep their place.
        heads, cut = look.page.evaluate(
            """() => {
              const region = document.querySelector("[aria-label=Values]");
              const right = region.getBoundingClientRect().right + 1;
              const cells = [...region.querySelectorAll("tr :is(th, td):not([hidden])")];
              return [
                [...region.querySelectorAll("thead th:not([hidden])")].map((one) => one.textContent),
                cells.filter((one) => one.getBoundingClientRect().right > right).length,
              ];
            }"""
        )
        assert cut == 0
        seen += heads[1:]
        look.page.get_by_role("button", name="Columns after").click()
        look.wait(f"columns {len(seen)} to ")
    assert seen == [str(column) for column in range(len(seen))]


@pytest.mark.parametrize("wrong", ["4", "-1", "1.5"])
def test_index_out_of_range_is_refused(viewed: Opener, odd: Path, wrong: str) -> None:
    look = viewed(odd, at="t=kernel&view=values&s=1,:,:")
    look.page.fill("#slice-0-number", wrong)
    look.page.keyboard.press("Enter")
    look.wait(f"{wrong} is no index: expected 0 to 3.")
    assert look.text("main tbody").startswith("0\t30")
    look.page.fill("#slice-0-number", "3")
    look.page.keyboard.press("Enter")
    look.settle()
    assert look.text("main tbody").startswith("0\t90")
    assert "is no index" not in look.text()


def test_row_of_a_link_out_of_range_is_named(viewed: Opener, odd: Path) -> None:
    look = viewed(odd, at="t=kernel&view=values&w=99,32,0,12")
    look.wait("The address names row 99, column 0: the last ones are 4 and 5.")


def test_values_are_copied_and_saved(viewed: Opener, odd: Path) -> None:
    look = viewed(odd, at="t=kernel&view=values&s=1,:,:", permissions=["clipboard-read", "clipboard-write"])
    look.page.click("text=Copy these values")
    look.wait("Copied")
    copied = look.page.evaluate("() => navigator.clipboard.readText()")
    expected = numpy.arange(30, 60, dtype=float).reshape(5, 6)
    assert numpy.array_equal(numpy.loadtxt(io.StringIO(copied)), expected)
    csv = saved(look, "Save this slice as CSV")
    assert numpy.array_equal(numpy.loadtxt(io.BytesIO(csv), delimiter=","), expected)
    found = numpy.load(io.BytesIO(saved(look, "Save the tensor as .npy")))
    assert found.shape == (4, 5, 6)
    assert numpy.isnan(found[2, 3, 4])


DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
]
# Chromium drops each download of a page after the tenth in a second, and says nothing.
HALVES = pytest.mark.parametrize("dtypes", [DTYPES[:8], DTYPES[8:]])


@HALVES
def test_npy_holds_every_value(viewed: Opener, tmp_path: Path, dtypes: list[str]) -> None:
    random = numpy.random.default_rng(1)
    arrays: Arrays = {}
    for dtype in dtypes:
        kind = numpy.dtype(getattr(ml_dtypes, dtype, dtype))
        # An odd number of rows, and more bytes than are read at a time.
        data = random.integers(0, 2 if dtype == "bool" else 256, 70_003 * kind.itemsize, dtype=numpy.uint8)
        arrays[dtype] = data.view(kind).reshape(70_003, 1)
    arrays["scalar"], arrays["vector"] = numpy.array(2.5), numpy.arange(3, dtype=numpy.int16)
    path = save(tmp_path / "model.safetensors", arrays)
    look = viewed(path, at="t=scalar&view=values")
    for name, array in arrays.items():
        look.page.evaluate("(name) => { location.hash = `t=${name}&view=values`; }", name)
        look.page.wait_for_function(
            "(name) => document.querySelector('main h2').textContent === name", arg=name
        )
        found = numpy.load(io.BytesIO(saved(look, "Save the tensor as .npy")))
        is_stored = array.dtype.isbuiltin == 1
        own = array if is_stored else array.astype(numpy.float32)
        assert (found.dtype, found.shape) == (own.dtype, own.shape), name
        if is_stored:
            assert found.tobytes() == own.tobytes(), name
        else:
            numpy.testing.assert_array_equal(found, own, name)


@HALVES
def test_csv_holds_every_value(viewed: Opener, tmp_path: Path, dtypes: list[str]) -> None:
    random = numpy.random.default_rng(2)
    arrays: Arrays = {}
    for dtype in dtypes:
        kind = numpy.dtype(getattr(ml_dtypes, dtype, dtype))
        data = random.integers(0, 2 if dtype == "bool" else 256, 600 * kind.itemsize, dtype=numpy.uint8)
        arrays[dtype] = data.view(kind).reshape(60, 10)
    zeros = numpy.array([[0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan]])
    arrays["zeros"] = zeros
    both = numpy.stack([zeros, zeros[:, ::-1]], axis=-1).astype(numpy.float32)
    arrays["parts"] = both.view(numpy.complex64)[..., 0]
    look = viewed(save(tmp_path / "model.safetensors", arrays), at="t=zeros&view=values")
    for name, array in arrays.items():
        look.page.evaluate("(name) => { location.hash = `t=${name}&view=values`; }", name)
        look.page.wait_for_function(
            "(name) => document.querySelector('main h2').textContent === name", arg=name
        )
        kind = array.dtype if array.dtype.isbuiltin == 1 and array.dtype != bool else numpy.dtype("float32")
        csv = io.BytesIO(saved(look, "Save this slice as CSV"))
        found = numpy.loadtxt(csv, delimiter=",", dtype=kind, ndmin=2)
        with numpy.errstate(all="ignore"):
            numpy.testing.assert_array_equal(found, array.astype(kind), name)
        if kind.kind == "f":
            known = ~numpy.isnan(found)
            assert (numpy.signbit(found) == numpy.signbit(array.astype(kind)))[known].all(), name


def test_histogram_keeps_its_scale(viewed: Opener) -> None:
    look = viewed(minilm(), at="t=pooler.dense.weight")
    linear = look.page.locator("main figure canvas").screenshot()
    look.page.select_option("main select", "log")
    assert look.page.locator("main figure canvas").screenshot() != linear
    assert "scale=log" in look.page.url
    look.page.keyboard.press("[")
    look.settle()
    assert look.page.input_value("main select") == "log"


@pytest.mark.parametrize(
    ("down", "up", "stem"),
    [
        ("lora_down.weight", "lora_up.weight", "lora_unet_down_blocks_{}_attn1_to_k"),
        ("lora_A.weight", "lora_B.weight", "base_model.model.layers.{}.self_attn.q_proj"),
        ("lora.down.weight", "lora.up.weight", "unet.down_blocks.{}.attn1.to_k"),
    ],
)
def test_overview_shows_what_a_lora_changes(
    viewed: Opener, tmp_path: Path, down: str, up: str, stem: str
) -> None:
    arrays: Arrays = {}
    for layer in range(3):
        arrays[f"{stem.format(layer)}.{down}"] = numpy.ones((4 + layer, 32), numpy.float16)
        arrays[f"{stem.format(layer)}.{up}"] = numpy.ones((64, 4 + layer), numpy.float16)
        arrays[f"{stem.format(layer).replace('k', 'v').replace('q', 'o')}.{down}"] = numpy.ones((4, 8))
    look = viewed(save(tmp_path / "lora.safetensors", arrays))
    assert "Changes 6 weights of the base model" in look.text()
    table = look.text("[aria-label='Changed weights'] tbody")
    name = stem.format("[0-2]")
    assert f"{name}\t3\t4 to 6\t32" in table.split("\n")
    # The name leads to the tensors.
    look.page.get_by_role("button", name=name, exact=True).click()
    look.wait("6 of 9 tensors")
    found = {row[0].removesuffix(f".{down}").removesuffix(f".{up}") for row in look.rows()}
    assert found == {stem.format(layer) for layer in range(3)}


def test_overview_counts_weights_that_a_pattern_does_not_hold(viewed: Opener, tmp_path: Path) -> None:
    places = [(block, depth) for block in (4, 5, 7, 8) for depth in range(3)][:11]
    name = "lora_unet_input_blocks_{}_1_transformer_blocks_{}_attn1_to_k.lora_down.weight"
    arrays: Arrays = {name.format(*place): numpy.ones((4, 32), numpy.float16) for place in places}
    look = viewed(save(tmp_path / "lora.safetensors", arrays))
    assert "attn1_to_k\t11 of 12\t4\t32" in look.text("[aria-label='Changed weights'] tbody")


def test_values_of_a_scalar_have_no_fields(viewed: Opener, tmp_path: Path) -> None:
    path = save(tmp_path / "scalar.safetensors", {"s": numpy.array(3.25, numpy.float32)})
    look = viewed(path, at="t=s")
    assert "highest bar: 1 value" in look.text().split("\n")
    look.page.click("main button:text-is('Values')")
    look.settle()
    assert "3.25" in look.text("main tbody")
    assert "0 to 0" not in look.text()
    assert look.page.locator("main input").count() == 0


def test_overview_lists_missing_numbers_of_layers(viewed: Opener, tmp_path: Path) -> None:
    name = "lora_unet_input_blocks_{}_1_attn1_to_k.lora_down.weight"
    arrays: Arrays = {name.format(block): numpy.ones((4, 32), numpy.float16) for block in (4, 5, 7, 8)}
    look = viewed(save(tmp_path / "lora.safetensors", arrays), viewport={"width": 360, "height": 740})
    look.page.click("text=lora_unet_input_blocks_[4,5,7,8]_1_attn1_to_k")
    assert look.page.input_value("aside input") == "lora_unet_input_blocks_*_*_attn1_to_k.*"
    # A narrow window shows the tree in place of the overview.
    look.wait("4 of 4 tensors")
    assert look.page.is_visible(".tree")
