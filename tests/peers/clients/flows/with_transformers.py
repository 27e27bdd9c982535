"""transformers: whole and sharded models, tied weights, other dtypes, the meta device, offloading to disk."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from flow import Note, main
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

TOKENS = torch.tensor([[1, 5, 9, 2]])


def llama(*, tied: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=tied, **sizes)).eval()


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes)).eval()


def save(folder: Path, note: Note) -> None:
    model = llama(tied=False)
    note("logits", model(TOKENS).logits)
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    note("shards", sorted(path.name for path in (folder / "sharded").glob("*.safetensors")))
    llama(tied=True).save_pretrained(folder / "tied")
    t5().save_pretrained(folder / "tied-thrice")
    llama(tied=False).to(torch.bfloat16).save_pretrained(folder / "bfloat16")


def load(folder: Path, note: Note) -> None:
    for name in ("whole", "sharded", "tied", "bfloat16"):
        model, info = LlamaForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        note(name, model.eval())
        note(f"{name}: info", {key: str(value) for key, value in info.items()})
        note(f"{name}: logits", model(TOKENS).logits)
        note(f"{name}: tied", model.lm_head.weight is model.model.embed_tokens.weight)

    thrice = T5ForConditionalGeneration.from_pretrained(folder / "tied-thrice")
    note("tied thrice", thrice)
    embeddings = [thrice.shared, thrice.encoder.embed_tokens, thrice.decoder.embed_tokens]
    note("tied thrice: memories", len({embedding.weight.data_ptr() for embedding in embeddings}))

    note("converted", LlamaForCausalLM.from_pretrained(folder / "whole", dtype=torch.float16))
    note("meta", LlamaForCausalLM.from_pretrained(folder / "sharded", device_map="meta"))
    note("on a device", LlamaForCausalLM.from_pretrained(folder / "sharded", device_map={"": "cpu"}))

    # Offloaded layers stay in the model's own file, which is opened when they are used.
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk", "model.layers.2": "disk"}
    with TemporaryDirectory() as disk:
        offloaded = LlamaForCausalLM.from_pretrained(
            folder / "sharded", device_map=places, offload_folder=disk
        )
        note("offloaded", offloaded)
        note("offloaded: logits", offloaded(TOKENS).logits)

    note("index", json.loads((folder / "sharded" / "model.safetensors.index.json").read_text()))


if __name__ == "__main__":
    main("transformers", save, load)
