"""Reading less into torch: conversion as `.to` does it, `out=`, and modules that are filled in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
import ingot.torch
from ingot._adapters import pieces
from ingot.torch import _filling, load_file, load_into, save_file
from ingot.torch._into import tensors_of
from support.progress import Progress, Stopped, stop

NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
NARROW += [torch.float8_e5m2fnuz]
# Whether this torch saturates values that are too large, as ingot does. torch 2.4 returns NaN.
SATURATES = not torch.isnan(torch.tensor(1e5).to(torch.float8_e4m3fn).to(torch.float32))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that two tensors have equal bytes, including those of NaN."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(bits(ours), bits(theirs))


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns of a narrow dtype. Of a wide one, return the special and many random ones."""
    if dtype.itemsize <= 2:
        every = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int64)
        return every.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    integers = torch.int32 if dtype.itemsize == 4 else torch.int64
    generator = torch.Generator().manual_seed(1)
    limits = torch.iinfo(integers)
    random = torch.randint(limits.min, limits.max, (2_000_000,), dtype=integers, generator=generator)
    if dtype is torch.float64:
        # Most doubles overflow in 32 bits. These do not.
        random[::2] = (random[::2].to(torch.float64) / 2**60).exp().view(torch.int64)
        return random.view(dtype)
    # Every exponent, with the mantissas at which narrow floats round, and their neighbours.
    exponents = torch.arange(256, dtype=torch.int64).reshape(-1, 1) << 23
    steps = torch.cat(
        [torch.tensor([0, 1, 0x7FFFFF]), *((torch.arange(256) << cut) for cut in (12, 15, 19, 20))]
    )
    near = (steps.reshape(-1, 1) + torch.tensor([-1, 0, 1])).clamp(0, 0x7FFFFF).reshape(1, -1)
    special = torch.cat([(exponents | near).reshape(-1), (exponents | near).reshape(-1) - 2**31])
    return torch.cat([special.to(torch.int32), random]).view(dtype)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, *NARROW], ids=str)
def test_load_file_converts_as_torch_does(tmp_path: Path, stored: torch.dtype) -> None:
    values = patterns(stored)
    path = tmp_path / "patterns.safetensors"
    save_file({"values": values}, path)
    for wanted in (torch.float64, torch.float32, *NARROW):
        found = load_file(path, dtype=wanted)["values"]
        expected = values.to(wanted)
        nan = torch.isnan(values.to(torch.float32))
        assert (found.dtype, found.shape) == (wanted, values.shape)
        known = ~nan
        if wanted is torch.float8_e4m3fn and not SATURATES:
            known &= ~torch.isnan(expected.to(torch.float32))
            assert (found.to(torch.float32)[~nan & ~known].abs() == torch.finfo(wanted).max).all()
        ours, theirs = (bits(tensor).view(-1, wanted.itemsize) for tensor in (found, expected))
        assert torch.equal(ours[known], theirs[known])
        assert torch.isnan(found.to(torch.float32)[nan]).all()
        # torch converts the bits of a NaN differently in its vector code, in its scalar code and on other
        # machines. The


# tests of crates/io/src/convert.rs define ingot's result.


def test_load_file_keeps_integers_bools_and_complex(tmp_path: Path, backend: str) -> None:
    tensors = {
        "i": torch.arange(5),
        "b": torch.tensor([True, False]),
        "c": torch.tensor([1 + 2j]),
        "f": torch.tensor([1.5]),
    }
    path = tmp_path / "mixed.safetensors"
    save_file(tensors, path)
    found = load_file(path, backend=backend, dtype="bfloat16")
    for name, tensor in tensors.items():
        same(found[name], tensor.to(torch.bfloat16) if name == "f" else tensor)


def test_load_file_names_a_tensor_that_cannot_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "f4.safetensors"
    ingot.serialize_file({"packed": {"dtype": "F4", "shape": [8], "data": bytes(4)}}, path)
    with pytest.raises(ingot.DtypeError, match="tensor `packed`: F4 is not converted to F32") as caught:
        load_file(path, dtype=torch.float32)
    assert caught.value.code == "no-conversion"


@pytest.mark.parametrize("others", [[], [torch.int64], [torch.float32]])
def test_load_into_converts_scales_first_whatever_the_other_tensors(
    others: list[torch.dtype], tmp_path: Path
) -> None:
    path = tmp_path / "scales.safetensors"
    # Beyond F16, which makes it infinite, and NaN in F8_E8M0.
    tensors = {"s": torch.tensor([2.0**100, 2.0]).to(torch.float8_e8m0fnu)}
    tensors |= {str(dtype): torch.ones(3, dtype=dtype) for dtype in others}
    save_file(tensors, path)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_into(target, path, dtype="F16")
    expected = tensors["s"].to(torch.float16).to(torch.float8_e8m0fnu)
    assert torch.equal(target["s"].view(torch.uint8), expected.view(torch.uint8))


def test_load_into_names_a_packed_tensor_that_dtype_would_convert(tmp_path: Path) -> None:
    path = tmp_path / "f4.safetensors"
    packed = torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"packed": packed}, path)
    target = {"packed": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    with pytest.raises(ingot.DtypeError, match="tensor `packed`: F4 is not converted to F32"):
        load_into(target, path, dtype="F32")
    load_into(target, path)
    assert torch.equal(target["packed"].view(torch.uint8), packed.view(torch.uint8))


def test_load_file_returns_the_objects_of_out(tmp_path: Path, backend: str) -> None:
    values = torch.randn(4, 3, 8, 8)
    path = tmp_path / "image.safetensors"
    save_file({"image": values, "other": torch.ones(2)}, path)
    place = torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last)
    found = load_file(path, backend=backend, out={"image": place})
    assert found["image"] is place
    assert place.is_contiguous(memory_format=torch.channels_last)
    same(place, values)
    with pytest.raises(ingot.DestinationError, match="shares memory with that of"):
        load_file(
            path,
            out={
                "image": place,
                "other": place.view(-1)[:2] if place.is_contiguous() else place[0, 0, 0, :2],
            },
        )


def test_load_file_selects_slices_and_converts_aliases(tmp_path: Path, backend: str) -> None:
    base = torch.randn(6, 4)
    path = tmp_path / "tied.safetensors"
    save_file({"embed": base, "head": base, "row": base[1]}, path, shared="alias")
    found = load_file(path, backend=backend, keys=["head", "row"])
    assert list(found) == ["head", "row"]
    same(found["head"], base)
    assert found["row"].data_ptr() == found["head"][1].data_ptr()
    halves = load_file(path, backend=backend, slices={"head": (slice(None), slice(0, 2))}, dtype="F16")
    same(halves["head"], base[:, :2].half())
    same(halves["embed"], base.half())
    same(halves["row"], base[1].half())
    parts = load_file(path, backend=backend, slices={"row": slice(1, 3)})
    same(parts["row"], base[1, 1:3])
    same(parts["embed"], base)


class Tied(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4, dtype=dtype)
        self.head = torch.nn.Linear(4, 10, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_into_fills_a_module_in_place(tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    source, target = Tied(), Tied(dtype)
    path = tmp_path / "model.safetensors"
    ingot.torch.save_model(source, path)
    parameters = dict(target.named_parameters())
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    assert load_into(target, path, backend=backend) == ([], [])
    assert target.head.weight is target.embed.weight
    for name, parameter in target.named_parameters():
        assert parameter is parameters[name]
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        assert parameter.data_ptr() == places[name]
    for name, tensor in source.state_dict().items():
        same(target.state_dict()[name], tensor.to(target.state_dict()[name].dtype))


class Renaming(torch.nn.Linear):
    """A module whose state dict has the weight under another name."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")


def renaming_by_hook() -> torch.nn.Module:
    def rename(module, state, prefix, metadata):
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    layer = torch.nn.Linear(3, 2)
    layer.register_state_dict_post_hook(rename)
    return layer


def with_buffers() -> torch.nn.Module:
    module = torch.nn.BatchNorm1d(4)
    module.register_buffer("passing", torch.ones(2), persistent=False)
    module.register_buffer("none", None)
    module.register_parameter("nothing", None)
    return module


def of_one_layer() -> torch.nn.Module:
    layer = torch.nn.Linear(3, 2)
    layer.again = layer.weight
    return torch.nn.ModuleDict({"a": torch.nn.Sequential(layer, torch.nn.ReLU()), "b": layer})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Renaming(3, 2),
        renaming_by_hook,
        with_buffers,
        of_one_layer,
        lambda: torch.jit.script(torch.nn.Linear(3, 2)),
        lambda: torch.nn.Sequential(),
    ],
    ids=["method", "hook", "buffers", "shared", "scripted", "empty"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_load_into_fills_the_state_dict(tmp_path: Path, make: Callable[[], torch.nn.Module]) -> None:
    path = tmp_path / "state.safetensors"
    module = torch.nn.Sequential(make())
    state = module.state_dict()
    assert list(tensors_of(module)) == list(state)
    values = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    save_file(values, path)
    assert load_into(module, path) == ([], [])
    for name, tensor in module.state_dict().items():
        same(tensor, values[name])


def test_load_into_of_a_module_takes_a_method_of_the_instance(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"other": torch.ones(2)}, path)
    module = torch.nn.Linear(3, 2)
    module.state_dict = lambda **options: {"other": module.bias}
    assert load_into(module, path) == ([], [])
    same(module.bias.detach(), torch.ones(2))


def test_load_into_fills_many_dtypes_at_once(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "many.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2).half(), "c": torch.ones(2).int()}, path)
    target = {"c": torch.zeros(2).int(), "b": torch.zeros(2).double(), "a": torch.zeros(4)[::2].bfloat16()}
    before = [tensor._version for tensor in target.values()]
    assert load_into(target, path, backend=backend) == ([], [])
    assert [tensor._version for tensor in target.values()] == [version + 1 for version in before]
    assert all(tensor.tolist() == [1, 1] for tensor in target.values())


def test_load_into_fills_a_tensor_of_two_names_with_the_last(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "two.safetensors"
    save_file({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(0), "d": torch.ones(0)}, path)
    for names in (["a", "b"], ["b", "a"]):
        tensor = torch.full((2,), 7.0)
        target = dict.fromkeys(names, tensor) | {"c": torch.ones(0), "d": torch.ones(0)}
        assert load_into(target, path, backend=backend) == ([], [])
        assert (tensor.tolist(), tensor._version) == ([float(names[-1] == "b")] * 2, 1)


def test_load_into_leaves_a_module_that_lacks_attributes_to_torch(tmp_path: Path) -> None:
    path = tmp_path / "linear.safetensors"
    module = torch.nn.Linear(2, 1)
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, path)
    # Like a module that was pickled by torch 1.
    del module._state_dict_pre_hooks
    with pytest.raises(AttributeError, match="_state_dict_pre_hooks"):
        load_into(module, path)


def test_load_into_ends_for_a_module_inside_itself(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    layer.add_module("inner", layer)
    with pytest.raises(RecursionError):
        load_into(layer, tmp_path / "layer.safetensors")


def test_load_into_fills_modules_deeply_inside_each_other(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    for _ in range(150):
        module = torch.nn.Sequential(module)
    name = "0." * 151 + "weight"
    save_file({name: torch.full((1, 1), 7.0)}, tmp_path / "deep.safetensors")
    load_into(module, tmp_path / "deep.safetensors", strict=False)
    assert module.state_dict()[name].item() == 7.0


def test_load_into_strict_raises_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    save_file({"weight": torch.ones(2, 3), "extra": torch.ones(1)}, path)
    layer = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(
        RuntimeError, match=r'(?s)missing in the file: "bias".*unexpected in the file: "extra"'
    ):
        load_into(layer, path)
    for name, tensor in layer.state_dict().items():
        same(tensor, before[name])
    found = load_into(layer, path, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["extra"])
    same(layer.weight.detach(), torch.ones(2, 3))


@pytest.mark.parametrize("load", [load_into, ingot.torch.load_model])
def test_load_names_the_first_mismatches(tmp_path: Path, load: Callable[..., object]) -> None:
    path = tmp_path / "other.safetensors"
    save_file({f"other.{number}.weight": torch.ones(1) for number in range(2000)}, path)
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    with pytest.raises(
        RuntimeError, match=r'(?s): "0\.(?:bias|weight)", .* and \d+ more\n.*and 1,9\d\d more'
    ) as raised:
        load(module, path)
    assert len(str(raised.value)) < 2000
    assert "begins with" not in str(raised.value)


@pytest.mark.parametrize("load", [load_into, ingot.torch.load_model])
@pytest.mark.parametrize("prefix", ["state_dict.", "module.", "_orig_mod.", "model."])
def test_load_names_a_common_prefix(tmp_path: Path, load: Callable[..., object], prefix: str) -> None:
    layer = torch.nn.Linear(2, 1)
    names = dict(layer.state_dict())
    save_file(names, tmp_path / "plain.safetensors")
    save_file({prefix + name: tensor for name, tensor in names.items()}, tmp_path / "wrapped.safetensors")
    with pytest.raises(RuntimeError, match=rf"every name of the file begins with `{prefix}`: remove it"):
        load(layer, tmp_path / "wrapped.safetensors")
    if prefix == "state_dict.":
        # No module can have this name.
        return
    wrapped = torch.nn.Module()
    wrapped.add_module(prefix[:-1], layer)
    with pytest.raises(RuntimeError, match=rf"every name to fill begins with `{prefix}`: load into"):
        load(wrapped, tmp_path / "plain.safetensors")


def test_load_into_rejects_a_shape_mismatch_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "shapes.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, path)
    target = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(ingot.DestinationError, match=r"tensor `b`: .*expected \[3\], found \[4\]"):
        load_into(target, path)
    assert not target["a"].any()


def test_load_into_copies_other_dtypes_as_load_state_dict_does(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "ids.safetensors"
    save_file({"ids": torch.arange(6).reshape(2, 3), "empty": torch.zeros(0, 2)}, path)
    target = {"ids": torch.zeros(2, 3, dtype=torch.float16), "empty": torch.zeros(0, 2)}
    load_into(target, path, backend=backend)
    same(target["ids"], torch.arange(6).reshape(2, 3).half())


def test_load_into_copies_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 24)
    path = tmp_path / "ids.safetensors"
    values = torch.arange(2 * 5 * 7).reshape(2, 5, 7)
    save_file({"ids": values}, path)
    target = {"ids": torch.zeros(2, 5, 7)}
    load_into(target, path)
    same(target["ids"], values.float())
    assert len(list(pieces.pieces(0, None, (2, 5, 7), 64))) > 10


def test_load_into_rejects_a_tensor_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ingot.DestinationError, match="tensor `a`"):
        load_into({"a": torch.ones(2, device="meta")}, path)
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        load_into({"a": [1, 2]}, path)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Lazy modules are a new feature"
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"w": torch.nn.LazyLinear(2).weight}, "UninitializedParameter .*run the module"),
        (
            lambda: {"w": torch.nn.LazyBatchNorm1d().running_mean},
            "UninitializedBuffer .*run the module",
        ),
        (lambda: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, r"nested .*unbind"),
        (
            lambda: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            r"nested .*unbind",
        ),
    ],
    ids=["lazy", "lazy buffer", "nested", "jagged"],
)
def test_load_into_rejects_unshaped_tensors(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(5)}, path)
    for call in (lambda: load_into(make(), path), lambda: load_file(path, out=make())):
        with pytest.raises(ingot.DestinationError, match=f"`w`: .*{message}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_load_into_fills_views_made_without_grad(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2, dtype=dtype)}, path)
    for base in (torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True) * 1):
        with torch.no_grad():
            views = [base[:2], base.split(2)[1]]
        for view in views:
            load_into({"w": view}, path)
        assert base.tolist() == [1.0] * 4


def test_load_into_reports_progress_of_all_copies(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(pieces, "PIECE_NBYTES", 24)
    path = tmp_path / "mixed.safetensors"
    save_file({"floats": torch.ones(100), "ids": torch.arange(70).reshape(10, 7)}, path)
    told = Progress()
    target = {"floats": torch.zeros(100, dtype=torch.float16), "ids": torch.zeros(10, 7)}
    load_into(target, path, backend=backend, threads=2, progress=told)
    told.assert_complete(200 + 280)
    assert len(told) > 10
    with pytest.raises(ingot.OptionError, match="threads 0"):
        load_into(target, path, threads=0)


def test_load_into_ends_when_progress_raises(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"ids": torch.arange(6)}, path)

    target = {"ids": torch.zeros(6)}
    with pytest.raises(Stopped):
        load_into(target, path, progress=stop)


def test_load_file_reports_progress_of_aliases(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "tied.safetensors"
    base = torch.arange(12.0).reshape(3, 4)
    save_file({"base": base, "row": base[1], "other": torch.ones(5)}, path, shared="alias")
    told = Progress()
    found = load_file(path, backend=backend, keys=["row", "other"], progress=told)
    same(found["row"], base[1])
    told.assert_complete(48 + 20)


def test_load_file_to_meta_reports_progress(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.ones(6), "b": torch.ones(10)}, path)
    told = Progress()
    load_file(path, "meta", backend="mmap", progress=told)
    assert told == [(24, 64), (64, 64)] or told == [(40, 64), (64, 64)]


def test_load_file_checks_plain_destinations_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {f"{number}": torch.full((3, number % 4), number, dtype=torch.bfloat16) for number in range(600)}
    ingot.torch.save_file(stored, tmp_path / "m.safetensors")
    out = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    looked: list[str] = []
    look = _filling._memory
    monkeypatch.setattr(_filling, "_memory", lambda *one: looked.append(one[0]) or look(*one))
    found = ingot.torch.load_file(tmp_path / "m.safetensors", out=out)
    assert found.keys() == stored.keys()
    assert all(found[name] is out[name] and torch.equal(out[name], stored[name]) for name in stored)
    assert not looked


def test_load_file_fills_destinations_of_all_kinds(tmp_path: Path) -> None:
    stored = {f"{number}": torch.full((4, 6), float(number)) for number in range(300)}
    ingot.torch.save_file(stored, tmp_path / "m.safetensors")
    out = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    # Only the elements of the tensor are filled, and no other bytes of its storage.
    wide = torch.zeros(8, 12)
    original = torch.zeros(4, 6)
    out |= {
        "7": torch.zeros(6, 4).T,
        "8": wide[2:6, 3:9],
        "9": torch.nn.Parameter(torch.zeros(4, 6)),
        "299": torch._lazy_clone(original),
    }
    ingot.torch.load_file(tmp_path / "m.safetensors", out=out)
    assert all(torch.equal(out[name], stored[name]) for name in stored)
    assert wide.sum() == stored["8"].sum()
    assert not original.any()


def test_load_file_rejects_a_destination_without_memory(tmp_path: Path) -> None:
    stored = {f"{number}": torch.full((64,), float(number)) for number in range(300)}
    ingot.torch.save_file(stored, tmp_path / "m.safetensors")
    out = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    for nbytes in (0, 4, 252):
        out["298"] = torch.zeros(64)
        out["298"].untyped_storage().resize_(nbytes)
        with pytest.raises(ingot.DestinationError, match="tensor `298`: its memory is gone"):
            ingot.torch.load_file(tmp_path / "m.safetensors", out=out)
    assert not any(out[name].any() for name in out if name != "298")


def test_load_file_rejects_a_destination_that_is_no_tensor(tmp_path: Path) -> None:
    ingot.torch.save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match=r"`a`: expected a torch.Tensor, found str"):
        ingot.torch.load_file(tmp_path / "m.safetensors", out={"a": "text"})  # type: ignore[dict-item]


def test_load_into_fills_selected_tensors(tmp_path: Path, backend: str) -> None:
    tensors = {name: torch.full((2, 3), 1.0) for name in ("a.x", "a.y", "b.x")}
    save_file(tensors, tmp_path / "file")

    def filled(**options: object) -> dict[str, float]:
        own = {name: torch.zeros(2, 3) for name in tensors}
        assert load_into(own, tmp_path / "file", backend=backend, **options) == ([], [])
        return {name: float(tensor[0, 0]) for name, tensor in own.items()}

    assert filled(keys="a.*") == {"a.x": 1, "a.y": 1, "b.x": 0}
    assert filled(keys=["b.x", "a.x"]) == {"a.x": 1, "a.y": 0, "b.x": 1}
    assert filled(keys="*.x", drop="a.*") == {"a.x": 0, "a.y": 0, "b.x": 1}
    assert filled(drop=lambda info: info.name == "b.x") == {"a.x": 1, "a.y": 1, "b.x": 0}
    with pytest.raises(ingot.TensorNotFoundError):
        filled(keys="c.*")
    # Only selected tensors are unexpected, and only tensors that the file lacks are missing.
    own = {"a.x": torch.zeros(2, 3), "other": torch.zeros(1)}
    assert load_into(own, tmp_path / "file", strict=False, keys="a.*") == (["other"], ["a.y"])
    assert load_into({"a.x": torch.zeros(2, 3)}, tmp_path / "file", keys=["a.x"]) == ([], [])
    module = torch.nn.Linear(2, 2, bias=False)
    save_file({"weight": torch.ones(2, 2), "more": torch.ones(1)}, tmp_path / "file")
    load_into(module, tmp_path / "file", drop=["more"])
    assert torch.equal(module.weight, torch.ones(2, 2))


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_load_into_converts_to_dtype_first(tmp_path: Path, own: torch.dtype, dtype: torch.dtype) -> None:
    tensor, count = torch.linspace(-300, 300, 77).reshape(7, 11), torch.arange(5)
    save_file({"a": tensor, "count": count}, tmp_path / "file")
    found = {"a": torch.zeros(7, 11, dtype=own), "count": torch.zeros(5, dtype=torch.int64)}
    load_into(found, tmp_path / "file", dtype=dtype)
    assert torch.equal(found["a"], tensor.to(dtype).to(own))
    assert torch.equal(found["count"], count)


class CopyingModule(torch.nn.Module):
    """A module whose `state_dict` returns a copy of its parameter."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w, self.copy = torch.nn.Parameter(torch.zeros(2, 3)), copy

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "w"] = self.copy(self.w.detach())


@pytest.mark.parametrize("copy", [torch.clone, torch.Tensor.half, lambda w: w.t().contiguous().t()])
def test_load_into_rejects_a_module_that_returns_copies(copy: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ingot.torch.save_file({"w": torch.ones(2, 3)}, path)
    with pytest.raises(ingot.DestinationError, match=r"`w`.*returns a copy.*load_model"):
        ingot.torch.load_into(CopyingModule(copy), path)
    view = CopyingModule(lambda w: w.view(2, 3))
    ingot.torch.load_into(view, path)
    assert bool((view.w == 1).all())


def test_load_into_leaves_extra_state_alone(tmp_path: Path) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(3)

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("not by load_into")

    path, model = tmp_path / "model.safetensors", Extra(2, 2)
    ingot.torch.save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    assert ingot.torch.load_into(model, path) == ([], [])
    ingot.torch.save_file(
        {"weight": torch.ones(2, 2), "bias": torch.ones(2), "_extra_state": torch.ones(3)}, path
    )
    with pytest.raises(RuntimeError, match="_extra_state"):
        ingot.torch.load_into(model, path)
