"""diffusers: components whole, sharded, in a pipeline and from a single file, and LoRA weights."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from flow import Note, main
from peft import LoraConfig


def autoencoder() -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=[8], norm_num_groups=4, layers_per_block=1).eval()


def unet() -> UNet2DModel:
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    sizes = {"sample_size": 8, "block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1}
    return UNet2DModel(**sizes, **blocks).eval()


def conditional_unet() -> UNet2DConditionModel:
    blocks = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
    sizes = {"block_out_channels": [8], "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
    return UNet2DConditionModel(cross_attention_dim=8, **sizes, **blocks).eval()


def save(folder: Path, note: Note) -> None:
    autoencoder().save_pretrained(folder / "whole")
    autoencoder().save_pretrained(folder / "variant", variant="fp16")
    unet().save_pretrained(folder / "sharded", max_shard_size="20KB")
    note("shards", sorted(path.name for path in (folder / "sharded").glob("*.safetensors")))
    DDPMPipeline(unet(), DDPMScheduler()).save_pretrained(folder / "pipeline")

    model = conditional_unet()
    model.save_pretrained(folder / "base")
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    model.save_lora_adapter(folder / "lora")


def load(folder: Path, note: Note) -> None:
    whole = AutoencoderKL.from_pretrained(folder / "whole")
    note("whole", whole)
    note("whole: result", whole(torch.ones(1, 3, 8, 8)).sample)
    half = {"variant": "fp16", "torch_dtype": torch.float16}
    note("variant", AutoencoderKL.from_pretrained(folder / "variant", **half))
    note("sharded", UNet2DModel.from_pretrained(folder / "sharded"))
    note("made first", UNet2DModel.from_pretrained(folder / "sharded", low_cpu_mem_usage=False))
    note("pipeline", DDPMPipeline.from_pretrained(folder / "pipeline").unet)
    file = folder / "whole" / "diffusion_pytorch_model.safetensors"
    note("single file", AutoencoderKL.from_single_file(file, config=str(folder / "whole")))

    model = UNet2DConditionModel.from_pretrained(folder / "base")
    model.load_lora_adapter(folder / "lora", prefix=None, use_safetensors=True)
    note("lora", model)
    note("lora: result", model(torch.ones(1, 4, 8, 8), 1, torch.ones(1, 2, 8)).sample)


if __name__ == "__main__":
    main("diffusers", save, load)
