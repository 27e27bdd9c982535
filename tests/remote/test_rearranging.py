"""Files made from tensors behind URLs: only the copied tensors are fetched."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.ctrl_c import interrupted, stalling
from support.servers import Handler, Request, good, serving

ONE = {"big": np.arange(5_000_000), "b": np.arange(7, dtype=np.float32), "c": np.arange(50_000)}
OTHER = {"d": np.arange(100_000, dtype=np.int16)}
DATA = ingot.numpy.save(ONE, {"who": "one"})


def test_merge_of_urls_equals_save_file(tmp_path: Path) -> None:
    near, out, expected = (
        tmp_path / "near.bt",
        tmp_path / "out.safetensors",
        tmp_path / "expected.safetensors",
    )
    ingot.numpy.save_file(OTHER, near)
    ingot.numpy.save_file({**ONE, **OTHER}, expected, {"who": "one"})
    with serving(good(DATA)) as server:
        ingot.merge([server.url(), near], out)
        assert server.sent < len(DATA) + (1 << 20)
    assert out.read_bytes() == expected.read_bytes()


def test_rewrite_of_a_url_fetches_only_kept_tensors(tmp_path: Path) -> None:
    out = tmp_path / "out.bt"
    with serving(good(DATA)) as server:
        ingot.rewrite(server.url(), out, drop="big", rename={"b": "bias"})
        assert server.sent < 1 << 20
    found = ingot.numpy.load_file(out)
    assert np.array_equal(found["bias"], ONE["b"])
    assert np.array_equal(found["c"], ONE["c"])
    assert ingot.inspect(out).metadata == {"who": "one"}


def test_rewrite_names_a_url_that_changes_and_keeps_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")

    def answer(handler: Handler, request: Request) -> None:
        if request.range[0] == 0:
            handler.part(DATA, request, ETag='"v1"')
        else:
            handler.head(412, Content_Length=0)

    with serving(answer) as server:
        with pytest.raises(ingot.StorageError) as caught:
            ingot.merge([server.url()], out, overwrite=True)
        assert caught.value.code == "changed"
        assert caught.value.path == server.url()
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]


def shared(path: Path, checksums: str | None = None) -> bytes:
    """Return a file with an alias: the first halves of the rows of another tensor, which are not adjacent."""
    torch = pytest.importorskip("torch")
    import ingot.torch

    big = torch.arange(6_000_000).reshape(1000, 6000)
    tensors = {"big": big, "half": big[:, :3000]}
    ingot.torch.save_file(tensors, path, shared="alias", checksums=checksums)
    data = path.read_bytes()
    path.unlink()
    return data


def test_rewrite_gathers_a_strided_part_from_a_url(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with serving(good(shared(out))) as server:
        ingot.rewrite(server.url(), out, drop="big")
    half = ingot.numpy.load_file(out)["half"]
    assert np.array_equal(half, np.arange(6_000_000).reshape(1000, 6000)[:, :3000])


@pytest.mark.parametrize("checksums", [None, "blake3"], ids=["bytes", "digest"])
def test_rewrite_ends_after_ctrl_c_with_a_stalled_server(tmp_path: Path, checksums: str | None) -> None:
    out = tmp_path / "out.safetensors"
    with stalling(shared(out, checksums)) as server, interrupted():
        ingot.rewrite(server.url(), out, drop="big")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_merge_into_a_pipe_ends_after_ctrl_c_with_a_stalled_server(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    reader = threading.Thread(target=pipe.read_bytes)
    reader.start()
    with stalling(DATA) as server, interrupted():
        ingot.merge([server.url()], pipe)
    reader.join()


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
def test_convert_of_a_url_equals_the_files(tmp_path: Path, make: object, name: str, word: str) -> None:
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


def test_convert_of_a_url_runs_no_pickle(tmp_path: Path) -> None:
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


def test_convert_of_a_failing_server_leaves_nothing(tmp_path: Path) -> None:
    def answer(handler: Handler, request: Request) -> None:
        handler.head(404, Content_Length=0)

    with serving(answer) as server, pytest.raises(FileNotFoundError) as caught:
        ingot.convert(server.url("/m.npz"), tmp_path / "out.safetensors")
    assert caught.value.filename == server.url("/m.npz")
    assert list(tmp_path.iterdir()) == []
