"""Five tasks of a new user at every size and colour scheme: the answer is visible, whole and uncovered.

1. Find the shape of a tensor.
2. Find the tensors that differ between two models.
3. Find a NaN.
4. Read one value of a tensor with three dimensions.
5. Find what a LoRA changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from support.models import Arrays, minilm, save, transformer
from view.conftest import Look, Opener

LOOKS: dict[str, dict[str, Any]] = {
    "360": {"viewport": {"width": 360, "height": 740}},
    "1280": {"viewport": {"width": 1280, "height": 800}},
    "1920": {"viewport": {"width": 1920, "height": 1080}},
    "200 %": {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "forced colours": {"viewport": {"width": 1280, "height": 800}, "forced_colors": "active"},
}
# Visible texts that are wider than their elements, and visible controls that another element covers.
FAULTS = """() => {
  const { top: under } = document.querySelector("main").getBoundingClientRect();
  const isSeen = (box) => box.width > 0 && box.top >= under && box.bottom <= innerHeight;
  const all = [...document.querySelectorAll("header *, main *, .heads *")]
    .filter((one) => one.offsetParent !== null);
  // The title and captions are for readers of screens; tables of values scroll.
  const free = "h1, canvas, select, input, progress, caption, .value, [aria-label=Values]";
  const isFree = (one) => one.matches(free);
  const cut = all.filter((one) => !isFree(one) && getComputedStyle(one).display !== "inline")
    .filter((one) => one.scrollWidth > one.clientWidth + 1);
  const covered = all.filter((one) => one.matches("button, input, select, a"))
    .filter((one) => isSeen(one.getBoundingClientRect())).filter((one) => {
      const box = one.getBoundingClientRect();
      const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
      return top !== null && !one.contains(top) && !top.contains(one);
    });
  const texts = (list) => list.map((one) => `${one.tagName}.${one.className}: ${one.textContent}`);
  return [texts(cut), texts(covered)];
}"""
# Whether the document has no part below the window, to which keys and wheels would scroll.
ENDS = "() => document.documentElement.scrollHeight <= innerHeight"
# Whether the middle of an element is what a user sees there.
SEEN = """(element) => {
  const box = element.getBoundingClientRect();
  const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return box.left >= 0 && box.right <= innerWidth + 1 && (element.contains(top) || top.contains(element));
}"""

Task = Callable[[Opener, Path, dict[str, Any]], tuple[Look, str]]


def shape(viewed: Opener, folder: Path, settings: dict[str, Any]) -> tuple[Look, str]:
    look = viewed(minilm(), **settings)
    if look.page.is_visible(".toggle"):
        look.page.click(".toggle")
    look.page.fill("aside input", "layer.3 query weight")
    look.wait("1 of 104 tensors")
    look.page.click(".rows .row >> nth=0")
    return look, "dd:text-is('[384, 384]')"


def differences(viewed: Opener, folder: Path, settings: dict[str, Any]) -> tuple[Look, str]:
    arrays = transformer(4)
    one = save(folder / "one.safetensors", arrays)
    arrays["model.layers.2.mlp.up_proj.weight"] = arrays["model.layers.2.mlp.up_proj.weight"] * 2
    look = viewed(one, save(folder / "two.safetensors", arrays), **settings)
    look.wait("1 of 21 tensors differs.")
    # The first row.
    return look, "main tbody tr:first-child button:has-text('model.layers.2.mlp.up_proj.weight')"


def nan(viewed: Opener, folder: Path, settings: dict[str, Any]) -> tuple[Look, str]:
    arrays = transformer(4)
    arrays["model.embed_tokens.weight"][123, 45] = numpy.nan
    look = viewed(save(folder / "nan.safetensors", arrays), **settings)
    look.page.click("text=Look for NaN and infinities")
    look.page.click("[aria-label='Tensors with NaN or infinities'] .link")
    look.settle()
    look.page.click("text=Show the first")
    look.wait("First NaN at [123, 45].")
    return look, "td.nan:text-is('NaN')"


def value(viewed: Opener, folder: Path, settings: dict[str, Any]) -> tuple[Look, str]:
    array = numpy.arange(4 * 5 * 6, dtype=numpy.int32).reshape(4, 5, 6)
    look = viewed(save(folder / "kernel.safetensors", {"kernel": array}), **settings)
    look.page.click("main .link:has-text('kernel')")
    look.page.click("main button:text-is('Values')")
    look.page.fill("#slice-0-number", "2")
    look.page.keyboard.press("Enter")
    look.settle()
    # The value at 2, 3, 4.
    return look, "tbody tr:nth-child(4) td:nth-child(6):text-is('82')"


def lora(viewed: Opener, folder: Path, settings: dict[str, Any]) -> tuple[Look, str]:
    arrays: Arrays = {}
    for layer in range(3):
        stem = f"lora_unet_down_blocks_{layer}_attentions_0_transformer_blocks_0_attn1_to_k"
        arrays[f"{stem}.lora_down.weight"] = numpy.ones((16, 320), numpy.float16)
        arrays[f"{stem}.lora_up.weight"] = numpy.ones((320, 16), numpy.float16)
        arrays[f"{stem}.alpha"] = numpy.array(8, numpy.float16)
    look = viewed(save(folder / "lora.safetensors", arrays), **settings)
    return look, "[aria-label='Changed weights'] td:has-text('attn1_to_k')"


TASKS: dict[str, Task] = {
    "shape": shape,
    "differences": differences,
    "nan": nan,
    "value": value,
    "lora": lora,
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("task", TASKS)
def test_task_ends_at_a_visible_answer(viewed: Opener, tmp_path: Path, task: str, name: str) -> None:
    look, answer = TASKS[task](viewed, tmp_path, LOOKS[name])
    look.settle()
    found = look.page.wait_for_selector(answer)
    if task == "differences":
        # Rows that differ come before what few users read.
        assert found.bounding_box()["y"] < 0.75 * LOOKS[name]["viewport"]["height"]
    elif task != "nan":
        # The page itself scrolls to a NaN.
        found.evaluate("(element) => element.scrollIntoView({ block: 'center' })")
    assert found.evaluate(SEEN)
    assert look.page.evaluate(ENDS)
    assert look.page.evaluate(FAULTS) == [[], []]
