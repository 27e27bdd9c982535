"""The screens of the viewer in a real browser: contents and accessibility."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import _native
from support import commands
from support.models import minilm, save, transformer
from support.servers import good, serving
from support.sparse_models import write_file
from view.conftest import Look, Opener
from view.made_models import HOSTILE_NAMES, awq, hostile, many, peft, write_raw

NAME = "embeddings.word_embeddings.weight"
PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c636060606000000005"
        "0001a5f645400000000049454e44ae426082"
    )
).decode()

PIXELS = """(places) => {
  const canvas = document.querySelector(".heat");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return places.map(([row, column]) => [...data.slice(4 * (row * canvas.width + column)).slice(0, 3)]);
}"""


def test_overview_counts_as_the_command_does(viewed: Opener) -> None:
    look = viewed(minilm())
    facts = look.facts()
    assert facts["Tensors"] == "104"
    assert facts["Parameters"] == "22.7M (22,713,728)"
    assert facts["Size"] == "90.9 MB (90,868,376 bytes)"
    assert "F32" in look.text()


def test_overview_counts_scalars(viewed: Opener, tmp_path: Path) -> None:
    scalar = numpy.array(3.25, numpy.float32)
    for arrays, shown in (
        ({"s": scalar}, "1"),
        ({"logit_scale": scalar, "w": numpy.ones((2, 2), numpy.float32)}, "5"),
    ):
        path = save(tmp_path / "model.safetensors", arrays)
        assert commands.good("summary", path, "--json").json()["parameters"] == int(shown)
        look = viewed(path)
        assert look.facts()["Parameters"] == shown
        assert look.text("main .lead").split(" · ")[1] == ("1 parameter" if shown == "1" else "5 parameters")


def test_overview_reads_the_header_only(viewed: Opener) -> None:
    look = viewed(minilm())
    asked = [one.url.removeprefix(look.allowed).partition("#")[0] for one in look.requests]
    # The page is one document. The list of files contains their headers if they are short.
    assert [path for path in asked if not path.startswith("data:")] == ["/", "/files"]
    answer = look.page.evaluate(
        "() => fetch('/files', { headers: { authorization: "
        "`Bearer ${sessionStorage.getItem('ingot-token')}` } }).then((answer) => answer.json())"
    )
    model, config = answer["models"][0]["files"]
    with minilm().open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        assert base64.b64decode(model["head"]) == file.read(length)
    assert base64.b64decode(config["head"]) == (minilm().parent / "config.json").read_bytes()


def test_overview_reads_a_long_header_exactly(viewed: Opener, tmp_path: Path) -> None:
    path = many(tmp_path / "many.safetensors", 2000)
    look = viewed(path)
    with path.open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
    assert length > 1 << 17
    ranges = [one.headers.get("range") for one in look.requests if "/f/" in one.url]
    assert ranges == [f"bytes=0-{length - 1}"]


def test_tree_equals_the_commands(viewed: Opener) -> None:
    rows = viewed(minilm()).rows()
    assert [row for row in rows if "×6" in row[0]] == [["▸ 0–5 ×6", "10.6M", "42.6 MB", "F32", "96 tensors"]]
    assert rows[0][:4] == ["▾ embeddings", "11.9M", "47.7 MB", "F32, I64"]


def test_tree_shows_a_sharded_checkpoint_as_one_model(viewed: Opener, tmp_path: Path) -> None:
    ingot.split(minilm(), tmp_path / "shards", "30MB")
    for path in (tmp_path / "shards", tmp_path / "shards" / "model.safetensors.index.json"):
        look = viewed(path, at=f"t={NAME}&view=values")
        assert look.facts()["File"] == "model-00001-of-00003.safetensors"
        assert "-0.019989014" in look.text()
        look.page.click("text=Overview")
        assert look.facts()["Files"] == "3"


def test_tree_shows_a_bt_file(viewed: Opener, tmp_path: Path) -> None:
    ingot.rewrite(minilm(), tmp_path / "model.bt")
    look = viewed(tmp_path / "model.bt")
    assert look.facts()["Format"] == "bintensors"


def test_tree_of_100_000_tensors_has_few_rows(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(many(tmp_path / "many.safetensors"))
    assert look.facts()["Tensors"] == "100,000"
    look.page.fill("aside input", "gate_proj")
    look.wait("33,400 of 100,000 tensors")
    for top in (0, 100_000, 400_000, 10**9):
        look.page.evaluate("(top) => document.querySelector('.tree').scrollTop = top", top)
        look.page.evaluate("() => new Promise(requestAnimationFrame)")
        look.page.evaluate("() => new Promise(requestAnimationFrame)")
        assert look.page.locator(".row").count() <= 200
        # Visible rows are not empty.
        assert len(look.rows()) > 20
    assert look.rows()[-1][0] == "model.layers.99.mlp.experts.333.gate_proj.999.weight"


FILTERS: dict[str, Callable[[ingot.TensorInfo], object]] = {
    "query": lambda info: "query" in info.name,
    "/^encoder.*bias$/": lambda info: re.search("^encoder.*bias$", info.name),
    "dtype:I64": lambda info: info.dtype == "I64",
    "size:>10MB": lambda info: info.nbytes > 10**7,
    "size:<2kB bias": lambda info: info.nbytes < 2000 and "bias" in info.name,
    "shape:384,384 query": lambda info: info.shape == (384, 384) and "query" in info.name,
    "encoder.*.query.*": lambda info: re.search(r"^encoder\..*\.query\.", info.name),
    "no such tensor": lambda info: False,
}


def test_filter_finds_tensors(viewed: Opener) -> None:
    with ingot.safe_open(minilm(), "np") as file:
        infos = [file.info(name) for name in file]
    look = viewed(minilm())
    for text, fits in FILTERS.items():
        look.page.fill("aside input", text)
        expected = [info.name for info in infos if fits(info)]
        look.wait(f"{len(expected)} of 104 tensors")
        assert {row[0] for row in look.rows()} <= set(expected)
    assert look.rows() == []


def test_filter_leaves_the_page_usable_while_it_searches(viewed: Opener, tmp_path: Path) -> None:
    names = ["a" * 60 + "!", "b"]
    path = save(tmp_path / "m.safetensors", {name: numpy.ones(4, numpy.float32) for name in names})
    # A filter in a link, and filters that are typed. Each new filter cancels the search before it.
    look = viewed(path, at=f"t=b&view=values&find={quote('/^(a+)+$/')}")
    assert look.text("aside [role=status]").startswith(("Searching…", "stopped"))
    assert look.page.locator("main tbody").count() == 1
    for text in ("/^(a|aa)+$/ b", "/^(b|bb)+$/"):
        look.page.fill("aside input", text)
    look.wait("1 of 2 tensors")
    assert [row[0] for row in look.rows()] == ["b"]


def test_filter_reports_an_invalid_expression(viewed: Opener) -> None:
    look = viewed(minilm())
    look.page.fill("aside input", "size:>much")
    look.wait("expected a size such as size:>10MB")
    look.page.fill("aside input", "/(/")
    look.wait("Invalid regular expression")


def test_tree_is_sorted_by_its_columns(viewed: Opener) -> None:
    look = viewed(minilm())
    look.page.click(".heads button:has-text('Size')")
    assert [row[0] for row in look.rows()][:2] == ["▾ embeddings", "▾ word_embeddings"]
    assert "sort=bytes" in look.page.url
    assert look.page.get_attribute("[role=columnheader]:nth-child(3)", "aria-sort") == "descending"


def test_screens_all_have_a_link(viewed: Opener) -> None:
    look = viewed(minilm(), at=f"t={NAME}&view=values&w=100,32,5,12")
    assert "token" not in look.page.url
    look.draw()
    first = look.text("main table")
    array = ingot.numpy.load_file(minilm())[NAME]
    assert float(look.text("main tbody").split("\n")[0].split("\t")[1]) == pytest.approx(
        float(array[100, 5]), rel=1e-6
    )
    link = look.page.url
    look.page.click("text=Overview")
    look.page.go_back()
    look.settle()
    look.draw()
    assert look.page.url == link
    assert look.text("main table") == first
    # The tab keeps the token, so that the link opens the same page again.
    look.page.reload()
    look.settle()
    look.draw()
    assert look.text("main table") == first


def test_token_is_stored_in_one_field_only(viewed: Opener) -> None:
    look = viewed(minilm(), at=f"t={NAME}&view=picture")
    token = look.page.evaluate("() => sessionStorage.getItem('ingot-token')")
    assert len(token) >= 32
    for request in look.requests:
        assert token not in request.url.partition("#")[0]
        said = {name: value for name, value in request.headers.items() if token in value}
        assert set(said) <= {"authorization"}


def test_page_requests_no_other_host(viewed: Opener) -> None:
    look = viewed(minilm())
    with serving(good(b"x")) as other:
        asked = "(url) => fetch(url, { mode: 'no-cors' }).then(() => 'asked', () => 'refused')"
        assert look.page.evaluate(asked, other.url("/x")) == "refused"
        assert other.requests == []
    look.expected = "Content Security Policy"
    look.requests = [one for one in look.requests if one.url.startswith(look.allowed)]


def test_tree_orders_names_as_the_command_does(viewed: Opener) -> None:
    names = [info.name for info in _native.Checkpoint.open(minilm()).infos()]
    names += [
        "a.10",
        "a.9",
        "a.09",
        "a.b",
        "a",
        "A",
        "",
        "10",
        "9",
        "0" * 30,
        "1" * 30,
        "2" * 29,
        "é",
        "\ue000",
        "🦀",
    ]
    look = viewed(minilm(), modules=True)
    order = "async (names) => names.sort((await import('/viewer/tree.js')).natural)"
    assert look.page.evaluate(order, names) == _native.in_natural_order(names)


def test_tree_merges_modules_that_are_alike_in_any_order(viewed: Opener, tmp_path: Path) -> None:
    weight: tuple[str, tuple[int, ...], bytes] = ("U8", (2, 3), bytes(6))
    wide: tuple[str, tuple[int, ...], bytes] = ("U8", (3, 2), bytes(6))
    path = write_raw(
        tmp_path / "model.safetensors",
        {
            "a.0.x": weight,
            "a.0.y.w": weight,
            "a.0.y": weight,
            "a.1.y": weight,
            "a.1.x": weight,
            "a.1.y.w": weight,
            "a.2.x": weight,
            "a.2.y.w": wide,
            "a.2.y": weight,
            "a.3.x": weight,
            "a.3.y.z": wide,
            "a.3.y": weight,
        },
    )
    names = [row[0].removeprefix("▾ ").removeprefix("▸ ") for row in viewed(path).rows()]
    # Modules that are merged stay closed; the others differ in a shape or in a name.
    assert names[:3] == ["a", "0–1 ×2", "2"]
    assert "3" in names


def test_image_axes_are_chosen(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.arange(2 * 3 * 4 * 5, dtype=numpy.int16).reshape(2, 3, 4, 5)
    path = save(tmp_path / "model.safetensors", {"x": array})
    for place, expected in {
        "1,:,2,:": array[1, :, 2, :],
        ":,:,0,4": array[:, :, 0, 4],
        "0,1,:1,:0": array[0, 1].T,
        ":1,2,3,:0": array[:, 2, 3, :].T,
    }.items():
        look = viewed(path, at=f"t=x&view=values&s={quote(place)}")
        lines = look.text("main tbody").split("\n")
        assert [[int(cell) for cell in line.split("\t")[1:]] for line in lines] == expected.tolist()
    look.page.select_option("main select >> nth=0", "1")
    assert "s=" in look.page.url


def test_image_shows_the_tensor(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.zeros((64, 64), numpy.float32)
    array[:32, :32] = 1
    array[:32, 32:] = -1
    array[40, 40], array[50, 50] = numpy.nan, numpy.inf
    path = save(tmp_path / "model.safetensors", {"x": array})
    for place in ("", "&s=:1,:0"):
        look = viewed(path, at=f"t=x&view=picture{place}")
        look.wait("NaN in 1 cell")
        look.wait("infinite in 1 cell")
        pixels = look.page.evaluate(PIXELS, [[5, 5], [5, 60], [60, 5], [60, 60], [40, 40]])
        one, minus, zero = [103, 0, 31], [5, 48, 97], [247, 247, 247]
        turned = [one, zero, minus, zero] if place else [one, minus, zero, zero]
        assert pixels == [*turned, [255, 0, 200]]


def test_image_part_is_dragged(viewed: Opener) -> None:
    look = viewed(minilm(), at=f"t={NAME}&view=picture")
    look.wait("Drag over a part")
    box = look.page.locator(".heat").bounding_box()
    look.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    look.page.mouse.down()
    look.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    look.page.mouse.up()
    look.wait("Show all")
    look.settle()
    row, rows, column, columns = map(
        int, look.page.evaluate("() => new URLSearchParams(location.hash.slice(1)).get('w')").split(",")
    )
    assert (abs(row - 30522 / 4), abs(rows - 30522 / 4)) < (200, 200)
    assert (abs(column - 96), abs(columns - 96)) <= (3, 3)


def test_code_card_reads_the_tensor(viewed: Opener) -> None:
    look = viewed(minilm(), at=f"t={NAME}&view=code")
    texts = look.page.locator("main pre").all_inner_texts()
    scope: dict[str, Any] = {}
    exec(texts[1], scope)
    assert numpy.array_equal(scope["array"], ingot.numpy.load_file(minilm())[NAME])
    names = look.page.locator("main h3").all_inner_texts()
    assert [name.removesuffix(" Copy") for name in names] == [
        "Python, torch",
        "Python, numpy",
        "Rust",
        "Command",
        "dd",
    ]


def test_map_leads_to_a_tensor(viewed: Opener) -> None:
    look = viewed(minilm(), at="go=map")
    strip = look.page.locator(".strip")
    strip.hover(position={"x": 10, "y": 50})
    assert "encoder" in look.text(".status >> nth=1") or "embeddings" in look.text(".status >> nth=1")
    strip.click(position={"x": 10, "y": 50})
    look.settle()
    assert "t=" in look.page.url
    assert look.facts()["Dtype"] == "F32"


def test_overview_reports_misalignment(viewed: Opener, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "odd.safetensors", {"a": ("U8", (3,), b"abc"), "b": ("F32", (1,), b"1234")})
    look = viewed(path)
    look.page.click("text=File map")
    assert "misaligned" in look.text("main .legend")
    look.page.click("text=Overview")
    assert "misaligned 1 tensor does not begin at a multiple of the element size" in look.text()


def test_overview_without_tensors_has_no_empty_parts(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(write_raw(tmp_path / "empty.safetensors", {}))
    assert look.page.locator("main table").count() == 0
    assert "Values" not in look.text()
    look.page.click("text=File map")
    assert "misaligned" not in look.text()


def test_overview_shows_metadata_cards(viewed: Opener, tmp_path: Path) -> None:
    metadata = {
        "modelspec.title": "A model",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.thumbnail": f"data:image/png;base64,{PNG}",
        "ss_base_model_version": "sd_v1",
        "ss_network_dim": "16",
        "ss_network_alpha": "8",
        "ss_tag_frequency": json.dumps({"10_cat": {"cat": 12, "sofa": 3}, "5_dog": {"cat": 1}}),
    }
    look = viewed(save(tmp_path / "model.safetensors", transformer(1), metadata))
    facts = look.facts()
    assert (facts["Rank"], facts["Alpha"], facts["Base model"]) == ("16", "8", "sd_v1")
    assert facts["Tags"] == "cat (13), sofa (3)"
    assert look.page.evaluate("() => document.querySelector('main img').naturalWidth") == 1
    assert facts["architecture"] == "stable-diffusion-v1/lora"


def test_overview_shows_all_tags_on_request(viewed: Opener, tmp_path: Path) -> None:
    tags = {f"tag{number}": 200 - number for number in range(130)}
    metadata = {"ss_output_name": "x", "ss_tag_frequency": json.dumps({"10_x": tags})}
    look = viewed(save(tmp_path / "model.safetensors", {"x": numpy.ones(1)}, metadata))
    assert look.facts()["Tags"].endswith("tag23 (177) … (24 of 130) Show all")
    look.page.click("text=Show all")
    assert look.facts()["Tags"].endswith("tag129 (71)")


@pytest.mark.parametrize("is_folder", [False, True])
def test_overview_reads_the_configuration_of_an_adapter(
    viewed: Opener, tmp_path: Path, is_folder: bool
) -> None:
    path = peft(tmp_path)
    said = commands.good("summary", path, "--json").json()["kind"]["text"]
    assert said == (
        "LoRA, rank 4, base model: base (adapter_config.json), alpha 8 (adapter_config.json), F32"
    )
    assert viewed(tmp_path if is_folder else path).facts()["Kind"] == said
    (tmp_path / "adapter_config.json").write_text("[")
    assert "alpha not stored" in viewed(path).facts()["Kind"]


def test_overview_replaces_a_thumbnail_that_is_no_image(viewed: Opener, tmp_path: Path) -> None:
    metadata = {"modelspec.title": "A model", "modelspec.thumbnail": f"data:image/png;base64,{PNG[:40]}"}
    look = viewed(save(tmp_path / "model.safetensors", transformer(1), metadata))
    look.wait("The thumbnail is not a whole image.")
    assert look.page.locator("main img").count() == 0


def test_overview_shows_hostile_names_as_text(viewed: Opener, tmp_path: Path) -> None:
    path = hostile(tmp_path / "hostile.safetensors")
    look = viewed(path)
    spoken: list[object] = []
    look.page.on("dialog", lambda dialog: spoken.append(dialog))
    assert look.page.locator("main img, main script, main b, main i").count() == 0
    for name in HOSTILE_NAMES:
        for view in ("statistics", "code"):
            look.page.evaluate(
                "(hash) => { location.hash = hash; }", f"t={quote(name)}&view={view}&go=tensor"
            )
            look.settle()
            assert look.facts()["Shape"] == "[1]", name[:50]
    assert look.page.locator("script").count() == 1
    assert not any(character in look.page.content() for character in "\u202e\x1b\x07")
    assert spoken == []


def test_keyboard_reaches_everything(viewed: Opener) -> None:
    look = viewed(minilm())
    keyboard = look.page.keyboard
    keyboard.press("m")
    look.wait("Closer")
    keyboard.press("c")
    look.wait("Open the model to compare with")
    keyboard.press("]")
    look.settle()
    first = look.page.url
    keyboard.press("]")
    keyboard.press("[")
    look.settle()
    assert look.page.url == first
    keyboard.press("o")
    assert look.facts()["Tensors"] == "104"
    keyboard.press("/")
    keyboard.type("pooler")
    look.wait("2 of 104 tensors")
    keyboard.press("ArrowDown")
    keyboard.press("End")
    keyboard.press("Enter")
    look.settle()
    assert look.page.text_content("main h2") == "pooler.dense.weight"
    keyboard.press("?")
    assert look.page.is_visible("dialog")


def test_keyboard_walks_the_tree(viewed: Opener) -> None:
    look = viewed(minilm())
    look.page.focus(".tree")
    keyboard = look.page.keyboard

    def active() -> str:
        row = look.page.get_attribute(".tree", "aria-activedescendant")
        return str(look.page.text_content(f"#{row} > span"))

    keyboard.press("ArrowDown")
    assert active() == "▾ LayerNorm"
    keyboard.press("ArrowLeft")
    assert active() == "▸ LayerNorm"
    keyboard.press("ArrowLeft")
    assert active() == "▾ embeddings"
    keyboard.press("End")
    assert active() == "weight"
    keyboard.press("Home")
    keyboard.type("pool")
    assert active() == "▾ pooler"


def test_page_opens_a_chosen_folder(opened_by_hand: Look, tmp_path: Path) -> None:
    ingot.split(minilm(), tmp_path / "shards", "30MB")
    look = opened_by_hand
    look.page.set_input_files("input[webkitdirectory]", tmp_path / "shards")
    look.wait("22,713,728")
    assert look.facts()["Files"] == "3"
    before = len(look.requests)
    look.page.evaluate("(name) => { location.hash = `t=${name}&view=statistics`; }", NAME)
    look.wait("Standard deviation")
    assert look.facts()["Maximum"] == "1.0494"
    # A chosen file causes no request.
    assert all(one.url.startswith("blob:") for one in look.requests[before:])


def test_page_opens_an_address(opened_by_hand: Look) -> None:
    look = opened_by_hand
    look.page.fill("input[type=text]", "ftp://example.org/model.safetensors")
    look.page.keyboard.press("Enter")
    look.wait("expected an https:// or hf:// address")


EVERY_WIDTH = pytest.mark.parametrize("width", [1280, 390])
# Only the contrast depends on the colour scheme.
AXE = """async (rules) => {
  const found = await axe.run({ resultTypes: ["violations"], ...rules });
  return [found.violations, found.passes.length];
}"""


def shuts_nobody_out(look: Look, what: str) -> None:
    """Check that axe finds no fault in both schemes, and that nothing is wider than the window."""
    from axe_playwright_python.base import AXE_SCRIPT

    if not look.page.evaluate("'axe' in window"):
        look.page.evaluate(AXE_SCRIPT)
    violations, passes = look.page.evaluate(AXE, {})
    assert violations == [], what
    assert passes > 10, what
    look.page.emulate_media(color_scheme="dark")
    violations, passes = look.page.evaluate(AXE, {"runOnly": ["color-contrast"]})
    assert violations == [], f"{what}, dark"
    look.page.emulate_media(color_scheme="light")
    for size in ("Width", "Height"):
        fits = f"() => document.documentElement.scroll{size} <= inner{size}"
        assert look.page.evaluate(fits), f"{what}, {size}"


def go(look: Look, fragment: str) -> None:
    look.page.evaluate("(hash) => { location.hash = hash; }", fragment)
    look.settle()


@EVERY_WIDTH
def test_screens_are_accessible(viewed: Opener, tmp_path: Path, width: int) -> None:
    # Every card of the overview, and tensors of all kinds.
    metadata = {"modelspec.title": "A model", "modelspec.thumbnail": f"data:image/png;base64,{PNG}"}
    metadata |= {"ss_output_name": "x", "ss_tag_frequency": '{"a": {"cat": 3}}'}
    arrays = {
        "plain": numpy.linspace(-1, 1, 4096, dtype=numpy.float32).reshape(64, 64),
        "nan": numpy.full((4, 4), numpy.nan, numpy.float32),
        "none": numpy.zeros((0, 5), numpy.float32),
        "deep": numpy.zeros((2, 3, 4, 5), numpy.int8),
    }
    path = save(tmp_path / "model.safetensors", arrays, metadata)
    look = viewed(path, path, viewport={"width": width, "height": 800})
    for screen in (
        "go=overview",
        "go=map",
        "go=compare",
        "go=compare&t=plain",
        "go=compare&t=nan",
        *(f"go=tensor&t=plain&view={view}" for view in ("statistics", "picture", "values", "code")),
        "go=tensor&t=plain&view=picture&w=5,5,5,5",
        "go=tensor&t=nan&view=statistics",
        "go=tensor&t=nan&view=picture",
        "go=tensor&t=none&view=picture",
        "go=tensor&t=deep&view=values",
        "go=tensor&t=no-such-tensor",
        "go=overview&find=nothing",
        "go=overview&find=dtype:F32",
        "go=overview&find=%2F(%2F",
    ):
        go(look, screen)
        shuts_nobody_out(look, screen)
    look.page.keyboard.press("?")
    shuts_nobody_out(look, "the keys")
    look.page.keyboard.press("Escape")
    look.page.click("text=Open…")
    shuts_nobody_out(look, "the open screen over a model")


@EVERY_WIDTH
def test_screens_without_data_are_accessible(
    viewed: Opener, opened_by_hand: Look, tmp_path: Path, width: int
) -> None:
    look = opened_by_hand
    look.page.set_viewport_size({"width": width, "height": 800})
    shuts_nobody_out(look, "the open screen")
    look.page.set_input_files("input[type=file] >> nth=0", Path(__file__))
    look.wait("This cannot be shown")
    shuts_nobody_out(look, "an error")
    settings = {"viewport": {"width": width, "height": 800}}
    empty = viewed(write_raw(tmp_path / "empty.safetensors", {}), **settings)
    for screen in ("go=overview", "go=map", "go=compare"):
        go(empty, screen)
        shuts_nobody_out(empty, f"without tensors, {screen}")
    awq(tmp_path)
    quantised = viewed(tmp_path / "model.safetensors", **settings)
    for screen in (
        "overview&view=",
        "tensor&view=statistics",
        "tensor&view=values",
        "tensor&view=picture&q=raw",
    ):
        go(quantised, f"t=layer.0.q.qweight&go={screen}")
        shuts_nobody_out(quantised, f"quantised, {screen}")
    write_file(tmp_path / "large.safetensors", {"large": ("U8", (1 << 29,))})
    large = viewed(tmp_path / "large.safetensors", at="t=large&view=statistics", **settings)
    assert "A sample of" in large.text()
    shuts_nobody_out(large, "a sample")
    odd = viewed(hostile(tmp_path / "hostile.safetensors"), **settings)
    odd.page.click("summary")
    for screen in ("overview", "map", f"tensor&t={quote(HOSTILE_NAMES[4])}"):
        go(odd, f"go={screen}")
        shuts_nobody_out(odd, f"hostile names, {screen[:20]}")
