"""Merging an adapter into a base: `ingot.lora.merge` against PEFT, which loads, merges and saves.

`python benches/python/lora.py --gib 4 --rank 64` is the size of the record: BF16 in linear layers of
4096 × 4096. Each side runs in turns, in processes of their own that have just touched and freed twice the
memory, with the base in the page cache. A process reports its seconds and its peaks of memory: of anonymous
pages, since ingot maps the base, and the resident size too. The weights of both are compared with the exact
sum in float64. Needs PEFT (requirements/clients.txt) for the second side.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import fresh
import pages

WIDTH = 4096
Run = dict[str, float]


def write(folder: Path, layers: int, rank: int) -> None:
    """Write a base and an adapter of PEFT, layer by layer."""
    import torch

    from ingot import Writer
    from ingot.torch import save_file

    torch.manual_seed(0)
    specs = {f"{layer}.weight": ("BF16", (WIDTH, WIDTH)) for layer in range(layers)}
    with Writer(folder / "base.safetensors", specs) as writer:
        for name in specs:
            writer.write(name, torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        writer.commit()
    factors = {}
    for layer in range(layers):
        factors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, WIDTH) * 0.05
        factors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(WIDTH, rank) * 0.05
    (folder / "adapter").mkdir()
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    names = [str(layer) for layer in range(layers)]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def ingot_side(folder: Path, layers: int) -> Callable[[], None]:
    """Return the merge with ingot, after its imports."""
    import ingot.lora

    def merge() -> None:
        ingot.lora.merge(folder / "base.safetensors", folder / "adapter", folder / "ingot")

    return merge


def peft_side(folder: Path, layers: int) -> Callable[[], None]:
    """Return load, merge and save with PEFT, after its imports."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    def merge() -> None:
        with torch.device("meta"):
            linear = (torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers))
            base = torch.nn.Sequential(*linear)
        base.load_state_dict(load_file(folder / "base.safetensors"), assign=True)
        model = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
        (folder / "peft").mkdir()
        save_file(model.state_dict(), folder / "peft" / "model.safetensors")

    return merge


SIDES = {"ingot": ingot_side, "peft": peft_side}


def measure(side: str, folder: Path, layers: int) -> Run:
    """Merge once in this process, which has nothing else in memory."""
    merge = SIDES[side](folder, layers)
    base = folder / "base.safetensors"
    pages.warm(base, 2 * base.stat().st_size)
    # The peak of the resident size contains the memory that was just touched.
    Path("/proc/self/clear_refs").write_text("5")
    _, found = fresh.watched(merge)
    return found | {"resident": fresh.resident("VmHWM")}


def largest_error(folder: Path, layers: int, merged: Path) -> float:
    """Return the largest distance of the first and the last merged layer from the exact sum."""
    import torch

    import ingot
    from ingot.torch import load_file

    found = 0.0
    factors = load_file(folder / "adapter" / "adapter_model.safetensors")
    for layer in {0, layers - 1}:
        name = f"{layer}.weight"
        start = f"base_model.model.{layer}"
        a, b = (factors[f"{start}.lora_{part}.weight"].double() for part in "AB")
        exact = load_file(folder / "base.safetensors", keys=[name])[name].double() + 2 * (b @ a)
        with ingot.safe_open(merged / "model.safetensors", "pt") as file:
            found = max(found, float((file.get_tensor(name).to(torch.float64) - exact).abs().max()))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", choices=SIDES)
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    layers = max(1, round(given.gib * 2**30 / (WIDTH * WIDTH * 2)))
    if given.worker:
        print(json.dumps(measure(given.worker, given.path, layers)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write(Path(folder), layers, given.rank)
        print(f"{layers} layers of {WIDTH} x {WIDTH} in BF16, rank {given.rank}")
        report(*compared(Path(folder), given.gib, layers, given.rounds))


def compared(folder: Path, gib: float, layers: int, rounds: int) -> tuple[dict[str, list[Run]], Run]:
    """Run all sides in turns. Return the runs, and the largest error of each side."""
    sides = [side for side in SIDES if side != "peft" or find_spec("peft")]
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    errors = {}
    for number in range(rounds):
        for side in sides:
            command = [sys.executable, __file__, "--worker", side, "--path", str(folder), "--gib", str(gib)]
            runs[side].append(json.loads(subprocess.check_output(command)))
            if not number:
                errors[side] = largest_error(folder, layers, folder / side)
            shutil.rmtree(folder / side)
    return runs, errors


def report(runs: dict[str, list[Run]], errors: Run) -> None:
    """Print the median of each side, its memory and its error, and the ratio."""
    seconds = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
    for side, found in runs.items():
        spread = [run["seconds"] for run in found]
        peaks = {kind: max(run[kind] for run in found) / (1 << 20) for kind in ("anonymous", "resident")}
        print(
            f"{side:5} median {seconds[side]:.2f} s ({min(spread):.2f} to {max(spread):.2f}), "
            f"{peaks['anonymous']:.0f} MiB anonymous, {peaks['resident']:.0f} MiB resident, "
            f"largest error {errors[side]:.3g}"
        )
    if "peft" not in runs:
        print("peft is not installed")
        return
    most = {side: max(run["anonymous"] for run in found) for side, found in runs.items()}
    print(
        f"peft: {seconds['peft'] / seconds['ingot']:.2f} x the time of ingot, "
        f"{most['peft'] / max(1, most['ingot']):.1f} x its anonymous memory"
    )


if __name__ == "__main__":
    main()
