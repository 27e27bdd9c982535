"""Conversions of files behind URLs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Handler, Request, good, serving

TENSORS = {"a": np.arange(300_000), "b": np.arange(7, dtype=np.float32)}


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **TENSORS)
    return file.getvalue()


def pickled() -> bytes:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(array.copy()) for name, array in TENSORS.items()}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "name", "word"),
    [
        (lambda: ingot.numpy.save(TENSORS), "model", "safetensors"),
        (lambda: ingot.numpy.save(TENSORS, format="bintensors"), "model.bt", "bintensors"),
        (npz, "arrays.npz", "npz"),
        (pickled, "pytorch_model.bin", "torch"),
    ],
)
def test_a_url_is_converted_as_the_file_is(tmp_path: Path, make: object, name: str, word: str) -> None:
    data = make()
    with serving(good(data)) as server:
        done = ingot.convert(server.url(f"/{name}?sig=secret"), tmp_path / "out.safetensors")
        assert server.sent < len(data) + (1 << 20)
        with pytest.raises(FileExistsError):
            ingot.convert(server.url(f"/{name}"), tmp_path / "out.safetensors")
    assert done.source_format == word
    assert done.source == server.url(f"/{name}?…")
    assert done.verified
    found = ingot.numpy.load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(found[one], TENSORS[one]) for one in TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_a_pickle_from_a_url_runs_nothing(tmp_path: Path) -> None:
    import os
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    with serving(good(pickle.dumps({"a": Payload()}, protocol=2))) as server:
        with pytest.raises(ingot.ConversionError) as caught:
            ingot.convert(server.url("/model.pdparams"), tmp_path / "out.safetensors")
        assert server.url("/model.pdparams") in "".join(caught.value.__notes__)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(404, Content_Length=0)

    with serving(answer) as server, pytest.raises(FileNotFoundError) as caught:
        ingot.convert(server.url("/m.npz"), tmp_path / "out.safetensors")
    assert caught.value.filename == server.url("/m.npz")
    assert list(tmp_path.iterdir()) == []
