"""Torch tensors of every layout and class: saved as what they are, or refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ingot
import ingot.torch

CUBE = torch.arange(24.0).reshape(1, 2, 3, 4)
COMPLEX = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))

STRIDED: dict[str, torch.Tensor] = {
    "transposed": CUBE.transpose(1, 3),
    "channels last": CUBE.to(memory_format=torch.channels_last),
    "channels last 3d": CUBE.reshape(1, 2, 2, 3, 2).to(memory_format=torch.channels_last_3d),
    "every other": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(3),
    "overlapping windows": torch.arange(6.0).unfold(0, 3, 1),
    "transposed halves": torch.arange(6.0).reshape(2, 3).t().bfloat16(),
    "transposed bytes": torch.arange(6, dtype=torch.uint8).reshape(2, 3).t().view(torch.float8_e4m3fn),
}
PLAIN: dict[str, torch.Tensor] = {
    "conjugate": COMPLEX.conj(),
    "negative": torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": torch.ones(2, dtype=torch.complex64).conj().imag[:1],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "requires grad": torch.ones(2, requires_grad=True) * 2,
    "row": torch.ones(100, 2)[4:5],
}
# From torch 2.5 on.
if hasattr(torch.nn, "Buffer"):
    PLAIN["buffer"] = torch.nn.Buffer(torch.ones(2))


@pytest.mark.parametrize("name", [*STRIDED, *PLAIN])
def test_what_is_saved_is_the_values(name: str, tmp_path: Path) -> None:
    tensor = (STRIDED | PLAIN)[name]
    ingot.torch.save_file({"t": tensor}, tmp_path / "t")
    for loaded in (ingot.torch.load_file(tmp_path / "t"), ingot.torch.load(ingot.torch.save({"t": tensor}))):
        assert loaded["t"].dtype == tensor.dtype
        wanted = tensor.detach().resolve_conj().resolve_neg()
        assert loaded["t"].tolist() == wanted.float().tolist() if wanted.itemsize < 2 else wanted.tolist()


@pytest.mark.parametrize("name", list(STRIDED))
def test_what_is_not_in_c_order_can_be_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ingot.SaveError, match=r"non contiguous tensor: `t`.*`\.contiguous\(\)`") as caught:
        ingot.torch.save({"t": STRIDED[name]}, contiguous="error")
    assert caught.value.code == "not-contiguous"
    with pytest.raises(ValueError, match="non contiguous"):
        ingot.torch.save_file({"t": STRIDED[name]}, tmp_path / "t", contiguous="error")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", list(PLAIN))
def test_what_is_in_c_order_is_not_refused(name: str) -> None:
    # A view of every other number in memory is strided, and a row of a bigger tensor is not.
    if PLAIN[name].is_contiguous():
        assert ingot.torch.save({"t": PLAIN[name]}, contiguous="error")


def test_an_unknown_choice_lists_the_choices() -> None:
    with pytest.raises(ingot.OptionError, match="contiguous 'auto' is unknown: expected one of copy, error"):
        ingot.torch.save({}, contiguous="auto")  # type: ignore[arg-type]


class Pair(torch.Tensor):
    """A tensor that is made of two, as those of torchao are."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)  # type: ignore[attr-defined]
        made.left, made.right = left, right
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return "Pair"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].left, args[0].right)
        raise NotImplementedError(func)


class Labelled(torch.Tensor):
    """A subclass with values like any other tensor's."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def distributed() -> torch.Tensor:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Replicate, distribute_tensor
    except ImportError:
        # Where torch 2.4 has them.
        from torch.distributed._tensor import Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor: torch.Tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    finally:
        # There is one for a process, and other tests make theirs.
        distributed.destroy_process_group()
    return tensor


def of_torchao() -> torch.Tensor:
    kind = type("AffineQuantizedTensor", (Pair,), {"__module__": "torchao.dtypes.affine_quantized_tensor"})
    tensor: torch.Tensor = kind(torch.ones(1), torch.ones(1))
    return tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), ["meta tensor", "no values"]),
        (fake, ["FakeTensor", "no values"]),
        (lambda: torch.eye(2).to_sparse(), ["sparse_coo", "`.to_dense()`"]),
        (lambda: torch.eye(2).to_sparse_csr(), ["sparse_csr", "`.to_dense()`"]),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), ["quantised", "int_repr"]),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), ["nested", "unbind"]),
        (torch.nn.UninitializedParameter, ["UninitializedParameter", "run the module once"]),
        (lambda: Pair(torch.ones(1), torch.ones(1)), ["Pair", "`.left`, `.right`"]),
        (lambda: torch.nn.Parameter(Pair(torch.ones(1), torch.ones(1))), ["Pair", "`.left`, `.right`"]),
        (of_torchao, ["AffineQuantizedTensor", "torchao", "flatten_tensor_state_dict", "`.dequantize()`"]),
        (distributed, ["DTensor", "`.full_tensor()`", "`.to_local()`"]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns of what it is about to drop.
@pytest.mark.parametrize("shared", ["error", "copy", "alias"])
@pytest.mark.parametrize("contiguous", ["error", "copy"])
def test_a_tensor_without_bytes_is_refused_by_class_and_way_out(
    make: Callable[[], torch.Tensor], words: list[str], shared: Any, contiguous: Any, tmp_path: Path
) -> None:
    tensors = {"plain": torch.ones(1), "t": make()}
    with pytest.raises(ingot.SaveError) as caught:
        ingot.torch.save_file(tensors, tmp_path / "t", shared=shared, contiguous=contiguous)
    assert caught.value.tensor == "t"
    assert all(word in str(caught.value) for word in ["`t`", *words]), str(caught.value)
    assert not (tmp_path / "t").exists()


def test_a_subclass_with_values_is_saved() -> None:
    tensor = torch.arange(3.0).as_subclass(Labelled)
    assert ingot.torch.load(ingot.torch.save({"t": tensor}))["t"].tolist() == [0, 1, 2]


def test_loading_to_meta_reads_no_data(tmp_path: Path) -> None:
    path = tmp_path / "t"
    ingot.torch.save_file({"t": torch.ones(3)}, path)
    loaded = ingot.torch.load_file(path, "meta")["t"]
    assert (loaded.device.type, loaded.shape) == ("meta", (3,))


class Watch(TorchDispatchMode):
    """Counts the bytes that the copies made under it take together, and the most that one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "clone" in str(func):
            self.copied.append(result.nbytes)
        return result


def test_torch_copies_no_tensor_that_lies_in_memory(tmp_path: Path) -> None:
    tensors = {"packed": torch.ones(1000), "turned": torch.ones(10, 20).t()}
    with Watch() as watch:
        ingot.torch.save_file(tensors, tmp_path / "t")
        assert watch.copied == []
        tensors["turned"].clone()
    assert watch.copied == [800], "the watch sees copies"
