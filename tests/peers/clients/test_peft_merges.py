"""`ingot.lora` against PEFT: merged weights are as near to the exact ones as PEFT's own."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import ingot
import ingot.lora
import ingot.torch


class Tiny(nn.Module):
    """A layer of each kind that PEFT adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.q_proj = nn.Linear(24, 32)
        self.square = nn.Linear(24, 24, bias=False)
        self.c_attn = Conv1D(48, 24)
        self.c_proj = Conv1D(24, 24)
        self.conv = nn.Conv2d(8, 12, 3)
        self.point = nn.Conv2d(8, 6, 1)
        self.line = nn.Conv1d(8, 10, 3)
        self.head = nn.Linear(24, 5)


LINEAR = ["q_proj", "square"]
CONV = ["conv", "point"]
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=8, lora_alpha=20, target_modules=LINEAR),
    "rslora": lambda: peft.LoraConfig(r=8, lora_alpha=20, use_rslora=True, target_modules=[*LINEAR, "conv"]),
    "dora": lambda: peft.LoraConfig(
        r=4, lora_alpha=6, use_dora=True, target_modules=[*LINEAR, *CONV, "line", "embed"]
    ),
    "dora of Conv1D": lambda: peft.LoraConfig(
        r=4, use_dora=True, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"]
    ),
    "convolutions": lambda: peft.LoraConfig(r=4, lora_alpha=3, target_modules=[*CONV, "line"]),
    "embeddings": lambda: peft.LoraConfig(r=4, lora_alpha=3, target_modules=["embed"]),
    "modules_to_save": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["head"]),
    "patterns": lambda: peft.LoraConfig(
        r=4,
        lora_alpha=8,
        rank_pattern={"square": 2, "q_.*": 6},
        alpha_pattern={"q_proj": 5},
        target_modules=[*LINEAR, "conv"],
    ),
    "fan_in_fan_out": lambda: peft.LoraConfig(
        r=4, lora_alpha=7, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"]
    ),
    "lora_bias": lambda: peft.LoraConfig(r=4, lora_bias=True, target_modules=["q_proj"]),
    "bias": lambda: peft.LoraConfig(r=4, bias="all", target_modules=LINEAR),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=[*LINEAR, *CONV]),
    "effective loha": lambda: peft.LoHaConfig(
        r=4, alpha=6, use_effective_conv2d=True, target_modules=["conv"]
    ),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=3, target_modules=[*LINEAR, *CONV]),
    "decomposed lokr": lambda: peft.LoKrConfig(
        r=1, alpha=3, decompose_both=True, decompose_factor=4, target_modules=[*LINEAR, "conv"]
    ),
    "effective lokr": lambda: peft.LoKrConfig(
        r=2, alpha=3, use_effective_conv2d=True, target_modules=["conv"]
    ),
}


def adapted(config: Any, dtype: torch.dtype, folder: Path) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Save a base and a trained adapter, and return the base's tensors and the model with the adapter."""
    torch.manual_seed(0)
    base = Tiny().to(dtype)
    ingot.torch.save_file(base.state_dict(), folder / "base.safetensors")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with warnings.catch_warnings(), torch.no_grad():
        # PEFT warns of its own biases, and of fan_in_fan_out.
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * 0.2)
            elif parameter.requires_grad:
                parameter.mul_(1.1)
        model.save_pretrained(folder / "adapter")
    return before, model


def merged(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_merge_is_at_least_as_exact_as_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    before, model = adapted(CONFIGS[name](), dtype, tmp_path)
    exact = merged(copy.deepcopy(model).double())
    theirs = merged(model)
    report = ingot.lora.merge(
        tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "merged.safetensors"
    )
    ours = ingot.torch.load_file(tmp_path / "merged.safetensors")
    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }
    changed = {name for name in before if not torch.equal(before[name], ours[name])}
    assert (
        changed
        == set(report.changed)
        == {name for name in before if not torch.equal(before[name], theirs[name])}
    )
    assert distance(ours, exact) <= distance(theirs, exact)
    # The exact values, rounded once. Computing in float32 moves the last bit of a few halves of bits.
    rounded = {name: exact[name].to(dtype) for name in exact}
    assert sum(int((ours[name] != rounded[name]).sum()) for name in ours) <= (0 if dtype.itemsize == 4 else 4)
