"""Faults in the viewer are cards with a message, and never a broken page."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy

import ingot
import ingot.numpy
from support.models import save
from support.servers import good, serving
from vectors.case import indexes, vectors
from view.conftest import Look, Opener
from view.made_models import write_raw


def choose(look: Look, name: str, data: bytes) -> None:
    """Open a file by hand, and wait until the page reports the result."""
    if not look.page.is_visible("input[type=file] >> nth=0"):
        look.page.click("text=Open…")
    chosen = {"name": name, "mimeType": "application/octet-stream", "buffer": data}
    look.page.set_input_files("input[type=file] >> nth=0", chosen)
    look.page.wait_for_function(
        "(name) => document.querySelector('main h2 ~ dl, .fault') && "
        "document.querySelector('main').textContent.includes(name)",
        arg=name,
    )


def choose_by_path(look: Look, path: Path) -> None:
    if not look.page.is_visible("input[type=file] >> nth=0"):
        look.page.click("text=Open…")
    look.page.set_input_files("input[type=file] >> nth=0", path)
    look.page.wait_for_selector("main h2 ~ dl")
    look.settle()


def test_viewer_shows_a_card_for_every_bad_file(opened_by_hand: Look) -> None:
    """Open every rejected vector: a card has its code, and the page can open the next file."""
    look = opened_by_hand
    refused = [vector for vector in vectors() if not vector.accepted and vector.limit is None]
    assert len(refused) > 200
    for number, vector in enumerate(refused):
        choose(look, f"{number}.safetensors", vector.file())
        assert look.page.inner_text(".fault code") == vector.code, vector.name
        assert look.page.locator("main .fault").count() == 1, vector.name


def test_viewer_shows_every_good_file(opened_by_hand: Look) -> None:
    look = opened_by_hand
    accepted = [vector for vector in vectors() if vector.accepted and vector.limit is None]
    assert len(accepted) > 50
    for number, vector in enumerate(accepted):
        choose(look, f"{number}.safetensors", vector.file())
        assert look.page.locator(".fault").count() == 0, vector.name
        assert look.facts()["Format"] == vector.format


def test_viewer_shows_a_card_for_every_bad_index(opened_by_hand: Look) -> None:
    look = opened_by_hand
    refused = [case for case in indexes() if case["expect"] == "reject"]
    assert len(refused) > 30
    for number, case in enumerate(refused):
        choose(look, f"{number}.safetensors.index.json", case["bytes"])
        assert look.page.inner_text(".fault code") == case["code"], case["name"]


def test_viewer_shows_a_card_for_a_bad_served_file(viewed: Opener, tmp_path: Path) -> None:
    """The page, not the server, validates a served file. Each code has a card, as for a chosen file."""
    by_code = {v.code: v for v in vectors() if not v.accepted and v.limit is None}
    assert len(by_code) > 15
    for code, vector in by_code.items():
        path = tmp_path / "bad.safetensors"
        path.write_bytes(vector.file())
        look = viewed(path)
        assert look.page.inner_text(".fault code") == code, vector.name
        # The page still works: another model can be opened.
        assert look.page.is_visible("input[type=file]")
        look.page.context.close()


def test_viewer_shows_a_card_for_a_folder_without_an_index(viewed: Opener, tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save(tmp_path / name)
    assert "ambiguous-checkpoint" in viewed(tmp_path).text(".fault")


def test_viewer_warns_of_a_bad_configuration(viewed: Opener, tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors")
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        look = viewed(tmp_path)
        assert "invalid-config" in look.text(".card")
        assert look.facts()["Format"] == "safetensors"


def test_viewer_shows_a_card_for_a_missing_shard(viewed: Opener, tmp_path: Path) -> None:
    ingot.split(save(tmp_path / "model.safetensors"), tmp_path / "shards", "100kB")
    next((tmp_path / "shards").glob("*-00002-of-*")).unlink()
    assert "missing-shards" in viewed(tmp_path / "shards").text(".fault")


def test_viewer_reports_a_changed_file(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.ones((1000, 1000), numpy.float32)
    path = save(tmp_path / "model.safetensors", {"x": array, "y": array})
    look = viewed(path)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(1, 1))
    look.page.evaluate("() => { location.hash = 't=x'; }")
    look.wait("the file changed while it was read")


def test_viewer_reports_a_changed_remote_file(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.ones((1000, 1000), numpy.float32)
    data = save(tmp_path / "model.safetensors", {"x": array, "y": array}).read_bytes()
    with serving(good(data)) as store:
        url = store.url("/model.safetensors")
        look = viewed(url)
        look.expected = "409"
        store.replace(good(data[:-4] + b"abcd", ETag='"v2"'))
        look.page.evaluate("() => { location.hash = 't=x'; }")
        look.page.wait_for_selector(".fault")
        assert look.text(".fault code") == "changed"
        why = "the file was written to, replaced or removed since it was opened — open it again"
        assert f"{url}: {why}" in look.text(".fault p >> nth=0")


def test_viewer_reports_a_replaced_file(viewed: Opener, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)})
    look = viewed(path)
    os.replace(save(tmp_path / "other.safetensors", {"y": numpy.ones(9)}), path)
    look.page.reload()
    look.wait(f"{path}: the file was replaced — start the viewer again to see the new one")
    look.faults.clear()


def test_viewer_reports_a_changed_chosen_file(opened_by_hand: Look, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)})
    look = opened_by_hand
    look.page.set_input_files("input[type=file] >> nth=0", path)
    look.wait("1,000,000")
    path.write_bytes(path.read_bytes() + b"more")
    look.page.evaluate("() => { location.hash = 't=x'; }")
    look.page.wait_for_selector(".fault")
    assert look.page.inner_text(".fault code") == "read"


def test_viewer_reports_a_truncated_file(viewed: Opener, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)})
    look = viewed(path, at="t=x&view=values")
    os.truncate(path, 5000)
    look.page.click("text=Statistics")
    look.page.wait_for_selector(".fault")
    # Browsers log rejected ranges on the console.
    look.faults.clear()


def test_viewer_reports_a_server_without_ranges(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)}))
    look.page.context.route("**/f/*", lambda route: route.fulfill(status=200, body="x" * 10))
    look.page.evaluate("() => { location.hash = 't=x'; }")
    look.page.wait_for_selector(".fault")


def test_viewer_reports_a_dropped_connection(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)}))
    look.page.context.route("**/f/*", lambda route: route.abort("connectionreset"))
    look.page.evaluate("() => { location.hash = 't=x'; }")
    look.page.wait_for_selector(".fault")
    assert "network" in look.text(".fault")
    look.page.context.unroute_all()
    look.faults.clear()
    # It works again when the server does.
    look.page.click("text=Values")
    look.page.wait_for_selector("main tbody")


def test_viewer_reports_a_stopped_server(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(save(tmp_path / "model.safetensors", {"x": numpy.ones((1000, 1000), numpy.float32)}))
    # The connection fails within an answer, repeatedly.
    look.page.context.route(
        "**/f/*",
        lambda route: route.fulfill(
            status=206,
            headers={
                "Content-Range": f"bytes {route.request.headers['range'][6:]}/4000096",
                "ETag": '"other"',
            },
            body="x" * 10,
        ),
    )
    look.page.evaluate("() => { location.hash = 't=x'; }")
    look.page.wait_for_selector(".fault")
    assert look.page.inner_text(".fault code") in ("changed", "short-read", "wrong-range")


def test_viewer_shows_file_names_as_text(viewed: Opener, opened_by_hand: Look, tmp_path: Path) -> None:
    """Names of files with markup, control characters or right-to-left text, and long names."""
    for name in ("<img src=x onerror=alert(1)>", "a\u202eb\x1b[31m\nc", "x" * 240):
        path = save(tmp_path / f"{name}.safetensors", {"x": numpy.ones((4, 4), numpy.float32)})
        look = viewed(path)
        by_hand = opened_by_hand
        choose_by_path(by_hand, path)
        for page in (look, by_hand):
            for screen in (
                "go=overview",
                "go=map",
                "go=tensor&t=x&view=code",
                "go=tensor&t=x&view=statistics",
            ):
                page.page.evaluate("(hash) => { location.hash = hash; }", screen)
                page.settle()
                assert page.page.locator("main img, .fault").count() == 0
                assert not any(character in page.page.content() for character in "\u202e\x1b")
                assert page.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name


def test_viewer_shows_tensors_without_elements(viewed: Opener, tmp_path: Path) -> None:
    path = save(
        tmp_path / "model.safetensors",
        {
            "nan": numpy.full((4, 4), numpy.nan, numpy.float32),
            "none": numpy.zeros((0, 5), numpy.float32),
            "scalar": numpy.array(3.0),
        },
    )
    look = viewed(path, at="t=nan")
    assert "No value is finite." in look.text()
    look.page.click("text=Picture")
    look.wait("NaN in 16 cells")
    for view in ("statistics", "picture", "values", "code"):
        for name in ("none", "scalar"):
            look.page.evaluate("(hash) => { location.hash = hash; }", f"t={name}&view={view}&go=tensor")
            look.settle()
            look.page.wait_for_function(
                "(name) => document.querySelector('main h2').textContent === name", arg=name
            )
            assert look.page.locator(".fault").count() == 0
    look.page.evaluate("() => { location.hash = 't=none'; }")
    look.wait("The tensor has no elements.")


def test_viewer_shows_a_file_without_tensors(viewed: Opener, tmp_path: Path) -> None:
    look = viewed(write_raw(tmp_path / "empty.safetensors", {}, {"a": "b"}))
    assert look.facts()["Tensors"] == "0"
    for key in ("m", "c", "]", "o"):
        look.page.keyboard.press(key)
    assert look.page.locator(".fault").count() == 0


def test_viewer_ignores_invalid_fragments(viewed: Opener, tmp_path: Path) -> None:
    array = numpy.arange(24, dtype=numpy.int32).reshape(2, 3, 4)
    path = save(tmp_path / "model.safetensors", {"x": array})
    for fragment in (
        "t=x&view=values&s=9,9,9",
        "t=x&view=values&s=:,:,:",
        "t=x&view=values&s=0,:&w=a,b",
        "t=x&view=values&w=99999,1,99999,1",
        "t=x&view=picture&w=99999,1,99999,0",
        "t=x&view=picture&w=1e9,-1,5,1",
        "t=x&view=none&go=none&sort=__proto__&q=x",
        "t=__proto__&view=constructor",
        "go=map&find=%2F%28%2F",
    ):
        look = viewed(path, at=fragment)
        assert look.page.locator(".fault").count() == 0, fragment
        look.check()


def test_viewer_shows_a_part_of_a_large_tensor(viewed: Opener, tmp_path: Path) -> None:
    """A sparse file of 2 GiB. The viewer reads only the shown part."""
    header = {
        "tall": {"dtype": "F32", "shape": [2**28, 1], "data_offsets": [0, 2**30]},
        "wide": {"dtype": "U8", "shape": [1, 2**30], "data_offsets": [2**30, 2**31]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2**31)
    for name in ("tall", "wide"):
        look = viewed(path, at=f"t={name}&view=values&w=0,32,{2**30 - 5 if name == 'wide' else 0},12")
        assert "0" in look.text("main table")
        look.page.click("text=Picture")
        look.page.wait_for_selector(".heat")
        look.settle()
        look.page.click("text=Statistics")
        look.wait("A sample of 6.25 %")
        look.settle()
        sizes = [one.headers.get("range", "0-0") for one in look.requests if "/f/" in one.url]
        read = sum(
            int(end) - int(begin) + 1
            for begin, end in (size.removeprefix("bytes=").split("-") for size in sizes)
        )
        assert read < 200 << 20
