"""`ingot.lora` against diffusers: files of kohya and of diffusers merge to what diffusers' loader fuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin
from torch import nn

import ingot
import ingot.lora
import ingot.torch

RANK, ALPHA = 4, 3.0


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )


def of_kohya(modules: dict[str, nn.Module], name: Any, **more: bool) -> dict[str, torch.Tensor]:
    """Return an adapter for these modules in the form of sd-scripts."""
    torch.manual_seed(1)
    found = {}
    for path, module in modules.items():
        weight, key = module.weight, name(path)
        out, inputs, *kernel = weight.shape
        found[f"{key}.lora_down.weight"] = torch.randn(RANK, inputs, *kernel) * 0.1
        found[f"{key}.lora_up.weight"] = torch.randn(out, RANK, *(1 for _ in kernel)) * 0.1
        found[f"{key}.alpha"] = torch.tensor(ALPHA)
    return found


def adapted(unet: nn.Module) -> dict[str, nn.Module]:
    ends = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
    more = ("conv1", "conv2", "time_emb_proj", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv")
    return {path: module for path, module in unet.named_modules() if path.endswith((*ends, *more))}


def flat(path: str) -> str:
    return f"lora_unet_{path.replace('.', '_')}"


def loaded(path: Path, unet: UNet2DConditionModel) -> dict[str, torch.Tensor]:
    """Return the weights that diffusers computes."""
    own = copy.deepcopy(unet)
    state, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
        str(path), return_lora_metadata=True
    )
    StableDiffusionLoraLoaderMixin.load_lora_into_unet(state, alphas, own, metadata=metadata)
    own.fuse_lora()
    return {
        name.replace(".base_layer", ""): tensor.detach()
        for name, tensor in own.state_dict().items()
        if ".lora_" not in name
    }


def merged(base: Path, adapter: Path, folder: Path) -> dict[str, torch.Tensor]:
    ingot.lora.merge(base, adapter, folder / "merged.safetensors", overwrite=True)
    return ingot.torch.load_file(folder / "merged.safetensors")


def exact(
    base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], paths: Any
) -> dict[str, torch.Tensor]:
    found = {name: tensor.double() for name, tensor in base.items()}
    for path in paths:
        up, down = (adapter[f"{flat(path)}.lora_{part}.weight"].double() for part in ("up", "down"))
        delta = up.flatten(1) @ down.flatten(1) * (ALPHA / RANK)
        found[f"{path}.weight"] += delta.reshape(found[f"{path}.weight"].shape)
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name]).abs().max()) for name in other)


@pytest.fixture
def files(unet: UNet2DConditionModel, tmp_path: Path) -> tuple[Path, Path]:
    ingot.torch.save_file(unet.state_dict(), tmp_path / "unet.safetensors")
    ingot.torch.save_file(of_kohya(adapted(unet), flat), tmp_path / "kohya.safetensors")
    return tmp_path / "unet.safetensors", tmp_path / "kohya.safetensors"


def test_kohya_file_merges_as_diffusers_fuses(unet: UNet2DConditionModel, files: Any, tmp_path: Path) -> None:
    base, kohya = files
    ours, theirs = merged(base, kohya, tmp_path), loaded(kohya, unet)
    expected = exact(unet.state_dict(), ingot.torch.load_file(kohya), adapted(unet))
    assert ours.keys() == theirs.keys()
    assert distance(ours, expected) <= distance(theirs, expected)
    assert all(
        not torch.equal(ours[f"{path}.weight"], unet.state_dict()[f"{path}.weight"]) for path in adapted(unet)
    )


@pytest.mark.parametrize("to", ["diffusers", "kohya", "peft"])
def test_converted_file_merges_to_the_same(to: Any, unet: Any, files: Any, tmp_path: Path) -> None:
    base, kohya = files
    destination = tmp_path / ("peft" if to == "peft" else f"{to}-2.safetensors")
    ingot.lora.convert(kohya, destination, to)
    ours, theirs = merged(base, destination, tmp_path), merged(base, kohya, tmp_path)
    # The scaling that diffusers' factors contain is rounded.
    assert distance(ours, {name: tensor.double() for name, tensor in theirs.items()}) <= (
        2e-7 if to == "diffusers" else 0
    )


def test_diffusers_loads_converted_file(unet: UNet2DConditionModel, files: Any, tmp_path: Path) -> None:
    _, kohya = files
    ingot.lora.convert(kohya, tmp_path / "diffusers.safetensors", "diffusers")
    ours, theirs = loaded(tmp_path / "diffusers.safetensors", unet), loaded(kohya, unet)
    assert distance(ours, {name: tensor.double() for name, tensor in theirs.items()}) < 1e-6


def test_peft_loads_converted_file(unet: UNet2DConditionModel, files: Any, tmp_path: Path) -> None:
    _, kohya = files
    ingot.lora.convert(kohya, tmp_path / "peft", "peft")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(unet), str(tmp_path / "peft"))
    theirs = loaded(kohya, unet)
    ours = model.merge_and_unload().state_dict()
    assert distance(ours, {name: tensor.double() for name, tensor in theirs.items()}) < 1e-6


def test_saved_file_of_diffusers_merges(unet: UNet2DConditionModel, files: Any, tmp_path: Path) -> None:
    base, _ = files
    own = copy.deepcopy(unet)
    own.add_adapter(
        peft.LoraConfig(r=4, lora_alpha=7, target_modules=["to_q", "conv1"], rank_pattern={"conv1": 2})
    )
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    layers = peft.get_peft_model_state_dict(own)
    config = own.peft_config["default"].to_dict()
    config["target_modules"] = [*config["target_modules"]]
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        tmp_path / "saved", unet_lora_layers=layers, unet_lora_adapter_metadata=config
    )
    file = tmp_path / "saved" / "pytorch_lora_weights.safetensors"
    ours, theirs = merged(base, file, tmp_path), loaded(file, unet)
    assert distance(ours, {name: tensor.double() for name, tensor in theirs.items()}) < 1e-6
    own.fuse_lora()
    fused = {
        name.replace(".base_layer", ""): tensor.double()
        for name, tensor in own.state_dict().items()
        if ".lora_" not in name
    }
    assert distance(ours, fused) < 1e-6


SGM = [
    *(f"input_blocks_{block}_1_transformer_blocks_0_attn1_to_q" for block in (4, 5, 7, 8)),
    *(f"output_blocks_{block}_1_transformer_blocks_0_attn2_to_out_0" for block in range(6)),
    "middle_block_1_proj_in",
    "input_blocks_1_0_in_layers_2",
    "input_blocks_2_0_out_layers_3",
    "input_blocks_4_0_emb_layers_1",
    "input_blocks_4_0_skip_connection",
    "input_blocks_3_0_op",
    "output_blocks_2_2_conv",
    "output_blocks_5_2_conv",
]


def test_original_names_of_sdxl_become_those_of_diffusers(tmp_path: Path) -> None:
    file = {}
    for name in SGM:
        file[f"lora_unet_{name}.lora_down.weight"] = torch.ones(2, 4)
        file[f"lora_unet_{name}.lora_up.weight"] = torch.ones(4, 2)
    for te in ("lora_te1", "lora_te2"):
        for end in ("self_attn_q_proj", "mlp_fc1"):
            file[f"{te}_text_model_encoder_layers_0_{end}.lora_down.weight"] = torch.ones(2, 4)
            file[f"{te}_text_model_encoder_layers_0_{end}.lora_up.weight"] = torch.ones(4, 2)
    ingot.torch.save_file(file, tmp_path / "kohya.safetensors")
    ingot.lora.convert(tmp_path / "kohya.safetensors", tmp_path / "new.safetensors", "diffusers")
    with torch.device("meta"):
        config = UNet2DConditionModel(
            block_out_channels=(32, 64, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        ).config
    theirs, _ = StableDiffusionXLLoraLoaderMixin.lora_state_dict(
        str(tmp_path / "kohya.safetensors"), unet_config=config
    )
    modules = {_module(name) for name in theirs}
    assert {_module(name) for name in ingot.open(tmp_path / "new.safetensors")} == modules
    assert len(modules) == 2 * (len(SGM) + 4)


def _module(name: str) -> str:
    """Return a name of diffusers, old or new, in one form."""
    for old, new in (
        (".lora_linear_layer.", ".lora."),
        ("_lora.", ".lora."),
        (".processor.", "."),
        (".to_out.lora", ".to_out.0.lora"),
        (".lora_A.", ".lora.down."),
        (".lora_B.", ".lora.up."),
        ("self_attn.to_q.", "self_attn.q_proj."),
    ):
        name = name.replace(old, new)
    return name
