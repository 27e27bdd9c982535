"""Adapters of low rank: merge them into a base, describe them, and rename their tensors.

LoRA, rsLoRA, DoRA, LoCon, LoHa and LoKr, in the names of PEFT, kohya's sd-scripts (and LyCORIS) and
diffusers. Nothing is loaded whole: the base may be larger than the memory.

>>> ingot.lora.info("adapter.safetensors").kind
'LoRA'
>>> ingot.lora.merge("model.safetensors", "adapter.safetensors", "merged.safetensors").changed
('lm_head.weight',)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import isfinite, prod
from os import fsdecode
from typing import Any, Literal, Unpack

from ingot._base.checks import Existing, checked_source, is_path
from ingot._base.options import Loading, Saving, argument, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report
from ingot._base.text import brief
from ingot._read.door import open_source
from ingot._write.rearrange import KEPT
from ingot.errors import OptionError
from ingot.typing import CastOptions, Format, HeaderOptions, Keys, Path, Source

from ._adapter import Adapter as Opened
from ._adapter import opened
from ._convert import Renamed, beside, file_of
from ._merge import Output, Plan

__all__ = ["Adapter", "Merged", "convert", "info", "merge"]


@dataclass(frozen=True, slots=True, repr=False)
class Merged(Report):
    """A base with adapters merged into it. `merge` returns one.

    Attributes
    ----------
    destination : str
        The path of the file or the folder.
    changed : tuple of str
        The tensors that the adapters change, replace or add.
    unused : tuple of str
        The adapters' tensors that match nothing in the base. Empty unless `strict` is False.
    tensors : int
        The number of tensors in the destination.
    nbytes : int
        Bytes of their values.

    Examples
    --------
    >>> report = ingot.lora.merge("model.safetensors", "adapter.safetensors", "merged.safetensors")
    >>> report.changed, report.unused
    (('lm_head.weight',), ())
    """

    _path = "lora.Merged"

    destination: str
    changed: tuple[str, ...]
    unused: tuple[str, ...]
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Adapter(Report):
    """The description of an adapter. `info` returns one.

    Attributes
    ----------
    path : str
        The path or the URL of the file.
    kind : str
        ``"LoRA"``, ``"LoCon"``, ``"DoRA"``, ``"LoHa"``, ``"LoKr"`` or ``"full"``, which has differences of
        whole weights; several of them joined by ``" + "``.
    format : str
        Whose names the tensors have: ``"peft"``, ``"kohya"`` or ``"diffusers"``.
    ranks : tuple of int
        The different ranks, in ascending order.
    alphas : tuple of float
        The different values of alpha, in ascending order. Empty if no alpha is stored: the adapter is then
        added as it is.
    base : str or None
        The name of the model that the adapter was trained on, as the configuration or the metadata has it.
        Otherwise the architecture that names and shapes show, such as ``"Stable Diffusion XL"``.
    modules : tuple of str
        The names of the modules that the adapter changes.
    whole : tuple of str
        The tensors of the base that the adapter replaces.
    parameters : int
        The number of elements in all tensors, with the alphas.

    Examples
    --------
    >>> found = ingot.lora.info("adapter.safetensors")
    >>> found.kind, found.ranks, found.parameters
    ('LoRA', (2,), 25)
    """

    _path = "lora.Adapter"

    path: str
    kind: str
    format: str
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    base: str | None
    modules: tuple[str, ...]
    whole: tuple[str, ...]
    parameters: int


def _scaled(given: Any) -> list[tuple[Any, float]]:
    """Return the adapters, each with its weight."""
    if is_path(given) or not isinstance(given, (list, tuple)):
        return [(argument(merge, "adapter", given, checked_source), 1.0)]
    if not given:
        raise OptionError("adapter: expected at least one, found none", code="no-sources")
    found = []
    for one in given:
        if not isinstance(one, (list, tuple)) or len(one) != 2:
            found_type = type(one).__name__
            reason = f"expected pairs of a source and its weight, found {found_type} {brief(one)}"
            raise TypeError(f"adapter: {reason}")
        found.append((checked_source(one[0]), _number(one[1], "the weight of adapter")))
    return found


def _number(given: Any, option: str = "scale") -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{option} must be a number, found {type(given).__name__}")
    if not isfinite(given):
        raise OptionError(f"{option} must be finite, found {given}", code="invalid-scale", found=given)
    return float(given)


@takes(CastOptions)
def merge(
    base: Source,
    adapter: Source | Sequence[tuple[Source, float]],
    destination: Path,
    scale: float = 1.0,
    *,
    keys: Keys | None = None,
    drop: Keys | None = None,
    strict: bool = True,
    metadata: Mapping[str, str] | None = KEPT,
    format: Format | None = None,
    **options: Unpack[CastOptions],
) -> Merged:
    """Write a copy of a model with an adapter, or several, added to its weights.

    Parameters
    ----------
    base : ingot.typing.Source
        The model: a file, a sharded checkpoint, a URL, an open file or a buffer, as for `ingot.safe_open`.
        Its weights are floats: a quantised model must be dequantised first.
    adapter : ingot.typing.Source, or list of (ingot.typing.Source, float)
        The adapter: a file or a directory. An ``adapter_config.json`` beside the file is read. A list has
        several adapters, each with its weight, which are added to the same base.
    destination : str, bytes or os.PathLike
        Where to write: one file if it ends with ``.safetensors`` or ``.bt``. Otherwise a directory, with as
        many files as the base has, and an index.
    scale : float
        How much of the change is added: 1 is the adapter as it was trained, 0 the base. It is multiplied with
        the weights of a list.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors of the adapters are used, as for `load_file`: all by default. ``drop="lora_te*"``
        leaves out the text encoders of an adapter of kohya's.
    strict : bool
        If True, each tensor of the adapters must match a tensor of the base. If False, the others are listed
        in the result.
    metadata : dict of str to str or None, optional
        The text to store. By default the base's, without digests of values that change.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`.
    **options
        How the base is read and the file is written: `ingot.typing.CastOptions`.

    Returns
    -------
    Merged
        With ``changed``, the names of the tensors that changed.

    Raises
    ------
    AdapterError
        The adapter is incomplete or of an unknown kind, its alpha is unknown, or it does not fit the base:
        a tensor matches nothing (``code`` is ``"unused-tensors"``), a shape differs (``"shape-mismatch"``),
        the base is quantised (``"quantised-base"``), or a weight would have NaN or a number beyond its dtype
        where the base has a finite one (``"not-finite"``).
    FileExistsError
        The destination exists, and `overwrite` is False.
    TensorNotFoundError
        A name or a pattern of `keys` or `drop` matches no tensor of an adapter.
    OSError, HeaderError, CheckpointError, SaveError, StorageError
        As for `ingot.cast`.
    TypeError, OptionError
        An argument has a wrong type or value.

    Notes
    -----
    Weights are computed some rows at a time, in float32, or in float64 for float32 weights, and are rounded
    once to the base's dtype. Beside the factors of one module, less than 256 MiB of memory are taken.

    LoRA adds ``alpha / r * B @ A`` to a weight. With `scale` and DoRA, the difference between the adapted
    weight and the base is scaled. Tensors that were trained whole (``modules_to_save``) replace tensors of
    the base, or are added.

    The configuration of the model, ``config.json``, is not copied.

    Examples
    --------
    >>> ingot.lora.merge("model.safetensors", "adapter.safetensors", "merged.safetensors", scale=0.5).changed
    ('lm_head.weight',)
    >>> both = [("adapter.safetensors", 0.7), ("adapter.safetensors", 0.3)]
    >>> ingot.lora.merge("model.safetensors", both, "both.safetensors").tensors
    2
    """
    given: Any = checked(merge, locals(), adapter=_scaled, scale=_number)
    how, path = Saving.among(merge, given), fsdecode(given["destination"])
    output = Output(path, format, how)
    with _planned(given) as plan:
        output.check(plan.base)
        with reporting_on(how.progress, "Merging", path) as tell:
            output.write(plan, metadata if metadata is KEPT else how.metadata, tell)
        return _merged(plan, path)


@contextmanager
def _planned(given: Mapping[str, Any]) -> Iterator[Plan]:
    """Open the base and the adapters of a merge for the block."""
    # The selection is of the adapters' tensors.
    reading = Loading.among(given)._replace(keys=None, drop=None)
    of_adapter = reading._replace(backend="auto")
    with ExitStack() as stack:
        checkpoint = stack.enter_context(closing(open_source(given["base"], reading)))
        adapters = [
            (
                stack.enter_context(opened(one, of_adapter, given["keys"], given["drop"])),
                weight * given["scale"],
            )
            for one, weight in given["adapter"]
        ]
        plan = Plan(checkpoint, adapters)
        if given["strict"]:
            plan.check_used()
        yield plan


def _merged(plan: Plan, path: str) -> Merged:
    names = [*plan.targets]
    return Merged(path, plan.changed, tuple(plan.unused), len(names), plan.nbytes(names))


def planned(
    base: Source,
    adapter: Sequence[tuple[Source, float]],
    destination: Path,
    existing: Existing,
    *,
    keys: Keys | None = None,
    drop: Keys | None = None,
) -> Merged:
    """Return the result of `merge`, without writing."""
    own = {"base": base, "adapter": adapter, "destination": destination, "keys": keys, "drop": drop}
    given: Any = checked(merge, {**own, "scale": 1.0, "strict": True}, adapter=_scaled)
    path = fsdecode(given["destination"])
    with _planned(given) as plan:
        Output(path, None, Saving(**existing._asdict())).check(plan.base)
        return _merged(plan, path)


@takes(HeaderOptions)
def info(source: Source, **options: Unpack[HeaderOptions]) -> Adapter:
    """Return the kind, the ranks, the alphas and the modules of an adapter.

    Parameters
    ----------
    source : ingot.typing.Source
        The adapter: a file or a directory. An ``adapter_config.json`` beside the file is read.
    **options
        How headers are read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    Adapter

    Raises
    ------
    AdapterError
        The file is no adapter (``code`` is ``"no-adapter"``), or is incomplete or of an unknown kind.
    OSError, HeaderError, CheckpointError, StorageError, TypeError, OptionError
        As for `ingot.safe_open`.

    Examples
    --------
    >>> found = ingot.lora.info("adapter.safetensors")
    >>> found.format, found.ranks, found.alphas, found.modules
    ('kohya', (2,), (4.0,), ('lm_head',))
    """
    given: Any = checked(info, locals())
    with opened(source, Loading.among(given)) as adapter:
        return _described(adapter)


def _described(adapter: Opened) -> Adapter:
    modules = [*adapter.modules.values()]
    parts = [one for module in modules for one in module.parts.values()]
    return Adapter(
        adapter.path,
        " + ".join(sorted({module.kind for module in modules})),
        adapter.format,
        tuple(sorted({module.rank for module in modules if module.rank is not None})),
        tuple(sorted({float(module.alpha) for module in modules if module.alpha is not None})),
        adapter.base,
        tuple(module.path for module in modules),
        tuple(adapter.whole),
        sum(prod(one.shape) for one in (*parts, *adapter.whole.values())),
    )


@takes(CastOptions)
def convert(
    source: Source,
    destination: Path,
    to: Literal["peft", "kohya", "diffusers"],
    *,
    keys: Keys | None = None,
    drop: Keys | None = None,
    metadata: Mapping[str, str] | None = KEPT,
    format: Format | None = None,
    **options: Unpack[CastOptions],
) -> Adapter:
    """Write an adapter under the names that another library reads.

    Parameters
    ----------
    source : ingot.typing.Source
        The adapter: a file or a directory. An ``adapter_config.json`` beside the file is read.
    destination : str, bytes or os.PathLike
        The new file. For PEFT a directory, which gets ``adapter_model.safetensors`` and
        ``adapter_config.json``; or a ``.safetensors`` file, beside which the configuration is written.
    to : {"peft", "kohya", "diffusers"}
        The library whose names the new file has.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors of the adapter are written, as for `load_file`: all by default.
    metadata : dict of str to str or None, optional
        The text to store. By default the source's, without digests.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`.
    **options
        How the adapter is read and the file is written: `ingot.typing.CastOptions`.

    Returns
    -------
    Adapter
        The description of the new file.

    Raises
    ------
    AdapterError
        The adapter is incomplete or of an unknown kind, the name of a module is in no table (``code`` is
        ``"unknown-module"``), or the library has no name for a tensor (``"no-name"``).
    FileExistsError
        The destination exists, and `overwrite` is False.
    TensorNotFoundError, OSError, HeaderError, CheckpointError, SaveError, StorageError
        As for `merge`.
    TypeError, OptionError
        An argument has a wrong type or value.

    Notes
    -----
    diffusers has no place for an alpha: the second factor is multiplied with ``alpha / r`` and rounded once.
    PEFT's configuration has the ranks and alphas, kohya's names a tensor for each alpha.

    kohya's names have ``_`` for ``.``, so a table of names separates the parts. It has the U-Nets and text
    encoders of Stable Diffusion 1, 2 and XL and the transformers of diffusers. The original names of U-Net
    blocks become diffusers'. The middle factor of LoCon is multiplied with the first one for PEFT and
    diffusers.

    Examples
    --------
    >>> name = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    >>> factors = {f"{name}.lora_A.weight": numpy.ones((2, 4)), f"{name}.lora_B.weight": numpy.ones((8, 2))}
    >>> ingot.numpy.save_file(factors, "diffusers.safetensors")
    >>> ingot.lora.convert("diffusers.safetensors", "kohya.safetensors", "kohya").modules
    ('text_model_encoder_layers_0_mlp_fc1',)
    """
    given: Any = checked(convert, locals())
    how, reading = Saving.among(convert, given), Loading.among(given)
    path = file_of(fsdecode(given["destination"]), to)
    with opened(source, reading._replace(keys=None, drop=None), given["keys"], given["drop"]) as adapter:
        renamed = Renamed(adapter, to)
        how.existing.check(path)
        if to == "peft":
            how.existing.check(beside(path))
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with reporting_on(how.progress, "Converting", path):
            renamed.write(path, renamed.metadata() if metadata is KEPT else how.metadata, how)
    return info(path)


def renamed(
    source: Source,
    destination: Path,
    to: Literal["peft", "kohya", "diffusers"],
    existing: Existing,
    *,
    keys: Keys | None = None,
    drop: Keys | None = None,
) -> Adapter:
    """Return the description of the source of `convert`, if it can be converted, without writing."""
    own = {"source": source, "destination": destination, "to": to, "keys": keys, "drop": drop}
    given: Any = checked(convert, own)
    path = file_of(fsdecode(given["destination"]), to)
    existing.check(path)
    with opened(source, Loading(), given["keys"], given["drop"]) as adapter:
        Renamed(adapter, to)
        return replace(_described(adapter), path=path, format=to)


def __dir__() -> list[str]:
    return __all__
