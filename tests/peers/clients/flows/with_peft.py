"""peft: a LoRA adapter on a transformers model, saved, loaded, switched, merged."""

from __future__ import annotations

from pathlib import Path

import torch
from flow import Note, main
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.tensor([[1, 5, 9, 2]])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).eval()


def save(folder: Path, note: Note) -> None:
    projections = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), projections)
    # This layer is saved whole, beside the adapter.
    more = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model.add_adapter("more", more)
    model.save_pretrained(folder)
    note("logits", model.eval()(TOKENS).logits)


def load(folder: Path, note: Note) -> None:
    note("weights", load_peft_weights(str(folder)))
    model = PeftModel.from_pretrained(llama(), folder).eval()
    note("default", model)
    note("default: logits", model(TOKENS).logits)
    model.load_adapter(folder / "more", "more")
    model.set_adapter("more")
    note("more", model)
    note("more: logits", model(TOKENS).logits)
    note("low memory", PeftModel.from_pretrained(llama(), folder, low_cpu_mem_usage=True))
    note("merged", PeftModel.from_pretrained(llama(), folder).merge_and_unload())


if __name__ == "__main__":
    main("peft", save, load)
