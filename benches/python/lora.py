"""Merging an adapter into a base: `ingot.lora.merge` against PEFT, which loads, merges and saves.

    python -m benches.python.lora [GIB] [RANK]

The base has GIB gibibytes (1 by default) of BF16 in linear layers of 4096 × 4096, the adapter has this rank
(64). Each side runs in a process of its own, which reports its seconds and its peak of memory: of anonymous
pages for ingot, whose base is mapped, and the resident size too. The weights of both are compared with the
exact sum in float64. Needs PEFT (requirements/clients.txt) for the second side.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

WIDTH = 4096
SIDES = ("ingot", "peft")


def main(gib: float = 1.0, rank: int = 64) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layers = max(1, round(gib * 2**30 / (WIDTH * WIDTH * 2)))
        write(Path(folder), layers, rank)
        print(f"{layers} layers of {WIDTH} x {WIDTH} in BF16, rank {rank}")
        print("side    seconds  anonymous MiB  resident MiB  largest error")
        for side in SIDES:
            if side == "peft" and not find_spec("peft"):
                print("peft    is not installed")
                continue
            words = [sys.executable, "-m", "benches.python.lora", side, folder, str(layers)]
            found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
            error = largest_error(Path(folder), layers, Path(folder) / side)
            print(
                f"{side:7} {found['seconds']:7.2f} {found['anonymous']:14.0f} {found['resident']:13.0f} "
                f"{error:14.3g}",
                flush=True,
            )


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


def run(side: str, folder: str, layers: str) -> None:
    """Merge, and print the seconds and the peak of memory in MiB."""
    merge = {"ingot": ingot_side, "peft": peft_side}[side](Path(folder), int(layers))
    begin = time.perf_counter()
    merge()
    seconds = time.perf_counter() - begin
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "anonymous": data_peak(), "resident": resident}))


def data_peak() -> float:
    """Return the peak of the resident size without the mapped files that are resident now, in MiB."""
    values = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            values[name] = int(value.split()[0])
    return (values["VmHWM"] - values["RssFile"]) / 1024


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


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and given[0] in SIDES:
        run(*given)
    else:
        main(*(kind(word) for kind, word in zip((float, int), given, strict=False)))
