"""Reading into tensors that are there already."""

from __future__ import annotations

from collections import defaultdict
from itertools import repeat
from math import prod
from operator import add, attrgetter, ge, mul
from typing import NamedTuple

import torch

from ._select import FLOATS, fill, misfit
from ._torch_alias import recorded
from ._torch_plain import PLAIN_CLASSES, in_transform, not_plain, undisturbed
from .errors import _escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from ._native import Archive
    from ._reads import Reads
    from ._select import Memory, Wanted

# Bytes that are read at once for a tensor that torch has to copy.
PIECE_NBYTES = 64 << 20


class Incompatible(NamedTuple):
    """The names that one side has and the other lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def into(
    target: torch.nn.Module | Mapping[str, torch.Tensor], archive: Archive, strict: bool, reads: Reads
) -> Incompatible:
    """Fill the tensors of `target`, and say which names did not fit."""
    where = "" if archive.path is None else f"{_escaped(archive.path)}: "
    views = recorded(archive)
    stored = {name: name for name in archive.offset_names()}
    stored |= {name: place["of"] for name, place in views.items() if "shape" not in place}
    own = _tensors(target)
    taken = {name: tensor for name, tensor in own.items() if name in stored}
    ties = _ties(own)
    filled = {ties[name] for name in taken}
    missing = [name for name in own if ties[name] not in filled]
    unexpected = [name for name in stored if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(_strict_message(where, target, missing, unexpected))
    for name, tensor in taken.items():
        refuse_destination(name, tensor)
        _refuse_shape(archive, stored[name], name, tensor)
    # The last of those that share one tensor, as where each is copied in turn.
    last = {ties[name]: name for name in taken}
    _read(archive, [(name, stored[name], taken[name]) for name in last.values()], reads)
    return Incompatible(missing, unexpected)


def _tensors(target: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(target, torch.nn.Module):
        # Extra state is whatever a module says it is; no file of tensors has it.
        state = target.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in target.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r}: expected a torch.Tensor, found {type(value).__name__}")
    return dict(target)


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each name, equal for names of one tensor."""
    numbers: dict[Any, int] = defaultdict(lambda: len(numbers))
    ties = {}
    for name, tensor in tensors.items():
        plain = tensor.device.type != "meta" and not_plain(tensor) is None and tensor.numel()
        place = (
            (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else name
        )
        ties[name] = numbers[place]
    return ties


def refuse_destinations(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for the first that has no memory of its own to be written to."""
    if not _are_plain(list(tensors.values())):
        for name, tensor in tensors.items():
            refuse_destination(name, tensor)


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    """Whether all have memory of their own, as `not_plain` asks of each; False where it is to be asked.

    Written with `map`, so that no Python function runs for each of many.
    """
    from .torch import _CODES

    dtypes = set(map(attrgetter("dtype"), tensors))
    if not dtypes <= _CODES.keys() or any(dtype.is_complex for dtype in dtypes) or in_transform():
        return False
    if not set(map(type, tensors)) <= PLAIN_CLASSES or not all(map(attrgetter("is_cpu"), tensors)):
        return False
    if any(map(attrgetter("is_nested"), tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        return False
    layouts = set(map(attrgetter("layout"), tensors))
    if not layouts <= {torch.strided} or not all(map(torch.Tensor.is_contiguous, tensors)):
        return False
    # Efficient zero tensors have no address, and nor have empty ones.
    if not all(map(torch.Tensor.data_ptr, tensors)):
        return False
    offsets = map(mul, map(torch.Tensor.storage_offset, tensors), map(attrgetter("itemsize"), tensors))
    needed = map(add, offsets, map(attrgetter("nbytes"), tensors))
    return all(map(ge, map(len, map(torch.Tensor.untyped_storage, tensors)), needed))


def refuse_destination(name: str, tensor: torch.Tensor) -> None:
    """Raise for what has no memory of its own to be written to."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r}: expected a torch.Tensor, found {type(tensor).__name__}")
    reason = not_plain(tensor)
    if reason is not None:
        raise misfit(name, reason)
    if tensor.is_conj() or tensor.is_neg():
        raise misfit(name, "the destination is a lazy view of other values: resolve it first")


def _refuse_shape(archive: Archive, source: str, name: str, tensor: torch.Tensor) -> None:
    info = archive.info(source)
    shape = [*info.shape]
    if info.dtype == "F4" and shape:
        shape[-1] //= 2
    if shape != list(tensor.shape):
        raise misfit(
            name,
            f"the destination has another shape: expected {shape}, found {list(tensor.shape)}",
            "destination-shape",
        )


def _read(archive: Archive, wanted: list[tuple[str, str, torch.Tensor]], reads: Reads) -> None:
    """Read each tensor, given with its name and that in the file, straight or in pieces."""
    from .torch import _CODES

    straight, pieces = {}, []
    for name, source, tensor in wanted:
        code = _CODES.get(tensor.dtype)
        stored = archive.info(source).dtype
        converts = stored == code or (stored in (*FLOATS, "F8_E8M0") and code in FLOATS)
        if tensor.is_cpu and converts:
            straight[name] = (source, tensor, code)
        else:
            pieces.append((source, tensor, code if converts else None))
    requests: list[Wanted] = [(source, None, code) for source, _, code in straight.values()]
    memories = _memories({name: tensor for name, (_, tensor, _) in straight.items()})
    first, *others = reads.shares(
        lambda: archive.parts_nbytes(requests), *(_size(tensor) for _, tensor, _ in pieces)
    )
    fill(archive, requests, memories, first)
    for (source, tensor, code), share in zip(pieces, others, strict=True):
        copy_pieces(archive, (source, None, code), tensor, share)


def _size(tensor: torch.Tensor) -> Callable[[], int]:
    return lambda: tensor.nbytes


def copy_pieces(archive: Archive, wanted: Wanted, tensor: torch.Tensor, reads: Reads) -> None:
    """Have torch copy what is wanted to `tensor`, a piece at a time. Only of whole tensors are there many."""
    from .torch import wrap

    source, index, code = wanted
    with torch.no_grad():
        indices = [index] if index is not None else _pieces(tuple(tensor.shape), tensor.itemsize)
        done = 0
        for piece in indices:
            place = tensor if index is not None else tensor[piece]
            place.copy_(archive.parts([(source, piece, code)], wrap, threads=reads.threads)[0])
            done += place.nbytes
            if reads.tell is not None:
                reads.tell(done, tensor.nbytes)


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Indices that cut a shape into pieces of bounded size that lie together."""
    if not shape or itemsize * prod(shape) <= PIECE_NBYTES:
        yield ()
        return
    row = itemsize * prod(shape[1:])
    if row > PIECE_NBYTES:
        for at in range(shape[0]):
            for rest in _pieces(shape[1:], itemsize):
                yield (at, *rest)
        return
    step = PIECE_NBYTES // row
    for begin in range(0, shape[0], step):
        yield (slice(begin, begin + step),)


def fill_tensors(
    archive: Archive, wanted: list[Wanted], tensors: Mapping[str, torch.Tensor], reads: Reads
) -> None:
    """Read what is wanted into `tensors`, those of the CPU straight."""
    if all(map(attrgetter("is_cpu"), tensors.values())):
        fill(archive, wanted, _memories(tensors), reads)
        return
    pairs = list(zip(wanted, tensors.items(), strict=True))
    straight = [pair for pair in pairs if pair[1][1].is_cpu]
    requests = [one for one, _ in straight]
    memories = _memories({name: tensor for _, (name, tensor) in straight})
    elsewhere = [(one, tensor) for one, (_, tensor) in pairs if not tensor.is_cpu]
    first, *others = reads.shares(
        lambda: archive.parts_nbytes(requests), *(_size(tensor) for _, tensor in elsewhere)
    )
    fill(archive, requests, memories, first)
    for (one, tensor), share in zip(elsewhere, others, strict=True):
        copy_pieces(archive, one, tensor, share)


def _memories(tensors: Mapping[str, torch.Tensor]) -> list[Memory]:
    """The code of each tensor's dtype, and its memory as a capsule."""
    from .torch import _CODES, _crosses_by_dlpack, _to_dlpack

    dtypes = list(map(attrgetter("dtype"), tensors.values()))
    codes = list(map(_CODES.get, dtypes))
    if None in codes:
        name, dtype = next(
            pair for pair, code in zip(zip(tensors, dtypes, strict=True), codes, strict=True) if code is None
        )
        raise misfit(name, f"no file has tensors of the destination's dtype, {dtype}", "destination-dtype")
    plain: Iterable[torch.Tensor] = tensors.values()
    with undisturbed():
        if not all(map(_crosses_by_dlpack, set(dtypes))):
            # The elements of dtypes that DLPack of this torch lacks are of one byte.
            plain = [
                tensor if _crosses_by_dlpack(tensor.dtype) else tensor.detach().view(torch.uint8)
                for tensor in plain
            ]
        return list(zip(filter(None, codes), map(_to_dlpack, plain), repeat(False)))


def _strict_message(where: str, target: object, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"{where}the file and the {type(target).__name__} do not have the same tensors:"]
    for what, names in (("missing in the file", missing), ("unexpected in the file", unexpected)):
        if names:
            listed = ", ".join(f'"{_escaped(name)}"' for name in names)
            lines.append(f"    {what}: {listed}")
    return "\n".join(lines)
