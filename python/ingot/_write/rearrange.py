"""Files made of the tensors of other files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain
from typing import Any, Literal, NamedTuple, Unpack
from warnings import warn

from ingot._base.checks import Leniency, format_for
from ingot._base.keys import NamedTensors, not_found, select
from ingot._base.layouts import Rule, Rules
from ingot._base.options import Loading, Saving, checked, takes
from ingot._base.progress import Several, reporting_on
from ingot._base.text import _escaped, _quoted, located
from ingot._native import (
    MODEL_SPEC_KEY,
    STALE_KEYS,
    STATE_KEY,
    Sources,
    check_upload,
    is_url,
    replace_object,
)
from ingot._native import destination as destination_of
from ingot._read.config import CONFIG, Config, plain
from ingot._read.door import config_of, open_checkpoint
from ingot.errors import AdapterError, OptionError, SaveError
from ingot.typing import Dtype, Format, Keys, Path, RewriteOptions, Source, Tell

from .shards import of_index
from .states import Pick, follow

# New names for the tensors of a file.


def known_renaming(rename: Any) -> Any:
    """Return `rename`, which must be a dict, a callable or None."""
    if rename is not None and not callable(rename) and not hasattr(rename, "keys"):
        raise TypeError(f"rename must be a dict, a callable or None, found {type(rename).__name__}")
    wrong = [] if rename is None or callable(rename) else [key for key in rename if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"rename must be a dict of str to str, found the key {wrong[0]!r}")
    return rename


def renaming(
    names: list[str], rename: Mapping[str, str] | Callable[[str], str] | None, path: str
) -> Callable[[str], str]:
    """Return the function that maps an old name to the new one."""
    if rename is None:
        return str
    table = {} if callable(rename) else dict(rename)
    for name in table.keys() - set(names):
        raise not_found(names, name, path)

    def checked(name: str) -> str:
        new: object = rename(name) if callable(rename) else table.get(name, name)
        if not isinstance(new, str):
            found = type(new).__name__
            raise TypeError(f"tensor {_quoted(name)}: expected a str for its new name, found {found}")
        return new

    return checked


class Writing(NamedTuple):
    """How a file that is made of other files' tensors is written."""

    saving: Saving
    # Whether the metadata of the sources is kept, and their digests unless others are computed.
    is_inherited: bool

    def write(
        self,
        opened: Sources,
        path: str | bytes,
        picks: list[Pick],
        metadata: dict[str, str] | None,
        tell: Tell | None,
    ) -> None:
        how, kind = self.saving, format_for(path, self.saving.format)
        inherit = self.is_inherited and how.checksums is None
        options = {"inherit": inherit, **how.layout(), **how.of_named_file()}
        options["storage_options"] = how.storage_options
        opened.write(path, picks, metadata, kind, progress=tell, **options)

    def check(self, path: str | bytes) -> None:
        """Raise if `path` is a URL to which an option does not apply, or whose object must stay."""
        how = self.saving
        if isinstance(path, str) and is_url(path):
            how.check_url(path)
            if not how.overwrite:
                # The condition of the last request decides, but most conflicts exist before the first one.
                check_upload(path, 0, how.storage_options)


def opened(sources: Iterable[Source], how: Loading, leniency: Leniency = "accept") -> Sources:
    """Open all files of `sources`, for their tensors to be copied."""
    how = how._replace(backend="pread")
    checkpoints = [open_checkpoint(source, how, leniency, lent=True) for source in sources]
    return Sources(checkpoints, leniency)


def together(opened: Sources) -> dict[str, str] | None:
    """Return the metadata of all sources, without records that are made again. None if no source has any."""
    files = ((opened.path(at), opened.metadata(at), opened.index_metadata(at)) for at in range(len(opened)))
    return united(pair for file in files for pair in of_one(*file))


def united(metadata: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str] | None:
    """Return the metadata of these files, each with its path, as `together` does."""
    found: dict[str, tuple[str, str]] | None = None
    for path, pairs in metadata:
        found = {} if found is None else found
        for key, value in pairs.items():
            if key in STALE_KEYS and key != MODEL_SPEC_KEY:
                continue
            other, first = found.setdefault(key, (value, path))
            # The hash of one of several files is wrong for the new file, which omits it.
            if other != value and key != MODEL_SPEC_KEY:
                message = (
                    f"metadata key {_quoted(key)}: {_escaped(first)} and {_escaped(path)} differ "
                    "— say which by metadata="
                )
                raise SaveError(message, code="metadata-conflict", path=path, expected=other, found=value)
    return None if found is None else {key: value for key, (value, _) in found.items()}


def of_one(
    path: str, files: Mapping[str, dict[str, str] | None], index: Mapping[str, Any] | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metadata of each file of a checkpoint and of its index, each with its path.

    Values of an index that files cannot store, or that describe its tensors, are left out.
    """
    for file, pairs in files.items():
        if pairs is not None:
            yield file, pairs
    if index is not None:
        yield path, of_index({key: text for key, text in index.items() if isinstance(text, str)})


# The default of `metadata`: keep the sources' metadata.
KEPT: Any = ...


@takes(RewriteOptions)
def merge(
    sources: Iterable[Source],
    destination: Path,
    *,
    on_duplicate: Literal["error", "first", "last"] = "error",
    keys: Keys | None = None,
    drop: Keys | None = None,
    metadata: Mapping[str, str] | None = KEPT,
    format: Format | None = None,
    **options: Unpack[RewriteOptions],
) -> None:
    """Make one file of several. No tensor is decoded, and less than 64 MiB of memory are taken.

    Parameters
    ----------
    sources : iterable of ingot.typing.Source
        The files, in either format or in both, or sharded checkpoints, as for `ingot.open`. The tensors of a
        URL or an object are read while they are written, and no others.
    destination : str, bytes or os.PathLike
        Where to write: a path, or a URL of ``s3://`` or ``az://``. With `overwrite` it may be one of the
        sources, which stays until the new file is complete.
    on_duplicate : {"error", "first", "last"}
        What to do with a name that occurs in several sources: fail, or take the tensor of the first or the
        last source.
    metadata : dict of str to str or None, optional
        The metadata. By default that of all sources together, which must not contradict each other. Text
        values of an index's metadata are kept, except totals.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors of the sources the file has, as for `load_file`: all by default. The order of `keys`
        does not matter.
    **options
        How headers are read and the file is written: `ingot.typing.RewriteOptions`.

    Raises
    ------
    FileExistsError
        The destination exists, and `overwrite` is not set.
    OSError, HeaderError, CheckpointError
        A source cannot be opened, or breaks a rule of its format.
    AdapterError
        Some of the sources are adapters, and others are not (``code`` is ``"adapter"``).
    TensorNotFoundError
        A name or pattern of `keys` or `drop` matches nothing.
    SafetensorError
        The record of names that share a tensor is broken (``code`` is ``"invalid-alias"``).
    SaveError
        Two sources have a tensor of one name (``code`` is ``"duplicate-tensor"``; both are named); their
        metadata contradict each other (``"metadata-conflict"``); the format lacks a dtype.
    StorageError
        Writing failed, or a source was changed during the call (``"overtaken"``).
    TypeError, OptionError
        An argument has a wrong type or value, or `sources` is empty.

    Notes
    -----
    The file is byte for byte the one that `save_file` writes for the same tensors and metadata, with the
    sources' digests of the tensors, under their new names. A file has digests of one algorithm: if sources
    have several, the most frequent one is kept. ``modelspec.hash_sha256`` is kept if all data is the same.
    With `metadata` no digests are copied, and this hash only if it is correct.

    Aliases (``save_file(..., shared="alias")``) can be selected and renamed like stored names, and stay
    aliases in the new file. If the stored name is left out, the tensor is stored under one of its aliases.

    The training state of a source (`save_state`) stays, whatever `metadata` has. It is removed if the new
    file lacks one of its tensors, or if several sources have a state.

    Examples
    --------
    >>> ingot.rewrite("model.safetensors", "first.safetensors", keys="wte")
    []
    >>> ingot.rewrite("model.safetensors", "second.safetensors", drop="wte")
    []
    >>> ingot.merge(["first.safetensors", "second.safetensors"], "merged.safetensors")
    >>> len(ingot.open("merged.safetensors"))
    2
    """
    given = checked(merge, locals(), destination=destination_of)
    how, listed = _writing(merge, given), given["sources"]
    if not listed:
        raise OptionError("merge(): sources is empty: expected one source or more", code="no-sources")
    path: str | bytes = given["destination"]
    held = opened(listed, Loading.among(given))
    _refuse_adapter(held)
    picks = [(at, *pick) for at in range(len(held)) for pick in enumerate(held.names(at))]
    if keys is not None or drop is not None:
        infos = chain.from_iterable(map(held.infos, range(len(held))))
        tensors = NamedTensors(None, (name for *_, name in picks), lambda: infos)
        kept = {*select(tensors, given["keys"], given["drop"])}
        picks = [pick for pick in picks if pick[2] in kept]
    if on_duplicate != "error":
        by_name: dict[str, Pick] = {}
        for pick in reversed(picks) if on_duplicate == "first" else picks:
            by_name[pick[2]] = pick
        picks = list(by_name.values())
    picks, pairs, _ = follow(held, picks, together(held) if how.is_inherited else how.saving.metadata)
    how.check(path)
    with reporting_on(how.saving.progress, "Merging", path) as tell:
        how.write(held, path, picks, pairs, tell)


@takes(RewriteOptions)
def rewrite(
    source: Source,
    destination: Path,
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    keys: Keys | None = None,
    drop: Keys | None = None,
    dequantize: bool | Dtype = False,
    remap: Rules | Iterable[Rule] | None = None,
    metadata: Mapping[str, str] | None = KEPT,
    format: Format | None = None,
    **options: Unpack[RewriteOptions],
) -> list[str]:
    """Make a file from the tensors of another file or of a checkpoint: selected, renamed, in either format.

    Parameters
    ----------
    source : ingot.typing.Source
        The file, in either format, or a sharded checkpoint, as for `ingot.open`.
    destination : str, bytes or os.PathLike
        Where to write: a path, or a URL of ``s3://`` or ``az://``. It may be `source`. An existing file stays
        until the new file is complete.
    rename : dict of str to str, or callable, optional
        A new name for some tensors, or a callable that returns the new name of each selected tensor. Aliases
        are among them.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors the new file has, as for `load_file`: all by default. The order of `keys` does not
        matter.
    dequantize : bool or ingot.typing.Dtype
        Write quantised weights as floats, as for `load_file`. `rename`, `keys` and `drop` see the names of
        plain weights. If the model has a ``config.json``, and the folder of `destination` has none, a copy
        without the settings of the quantisation is written there.
    remap : list of rules of `ingot.remap`, or ingot.remap.Rules, optional
        The new layout of the tensors. `rename`, `keys` and `drop` see the new names.
    metadata : dict of str to str or None, optional
        The text to store. By default the source's.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`: by default the suffix of `destination` decides.
    **options
        How headers are read and the file is written: `ingot.typing.RewriteOptions`.

    Returns
    -------
    list of str
        The tensors that the new file lacks because they are parts of dequantised weights, such as scales.
        Empty without `dequantize`.

    Raises
    ------
    ConversionError
        A weight cannot be dequantised.
    RemapError
        The rules of `remap` do not fit the tensors.
    TensorNotFoundError
        A name or pattern of `keys` or `drop`, or a name in `rename`, matches nothing.
    SaveError
        Two tensors would have one name; the format lacks a dtype.
    OSError, HeaderError, CheckpointError, StorageError, SafetensorError, TypeError, OptionError
        As for `merge`.

    Warns
    -----
    UserWarning
        `rename`, `keys` or `drop` is passed without `metadata`, and changes nothing.

    Notes
    -----
    The file is byte for byte the one that `save_file` writes for the same tensors and metadata, with the
    source's digests of the tensors, under their new names. A file has digests of one algorithm: if sources
    have several, the most frequent one is kept. ``modelspec.hash_sha256`` is kept if all data is the same.
    With `metadata` no digests are copied, and this hash only if it is correct.

    Aliases (``save_file(..., shared="alias")``) can be selected and renamed like stored names, and stay
    aliases in the new file. If the stored name is left out, the tensor is stored under one of its aliases.

    A training state (`save_state`) stays with the new names of its tensors, whatever `metadata` has. It is
    removed if one of its tensors is left out.

    Examples
    --------
    >>> ingot.rewrite("model.safetensors", "renamed.safetensors", rename={"wte": "embed.weight"})
    []
    >>> ingot.open("renamed.safetensors").keys()
    ['embed.weight', 'lm_head.weight']
    """
    given = checked(rewrite, locals(), rename=known_renaming, destination=destination_of)
    how = _writing(rewrite, given)
    new: str | bytes = given["destination"]
    held = opened([source], Loading.among(given))
    names, path = held.names(0), held.path(0)
    kept = set(select(NamedTensors(path, names, lambda: held.infos(0)), given["keys"], given["drop"]))
    new_name = renaming(names, rename, path)
    picks = [(0, number, new_name(name)) for number, name in enumerate(names) if name in kept]
    is_chosen = rename is not None or keys is not None or drop is not None
    if is_chosen and metadata is KEPT and names == [name for *_, name in picks]:
        message = f"{_escaped(path)}: no tensor is renamed or left out: rename, keys and drop change nothing"
        warn(f"rewrite(): {message}", stacklevel=2)
    picks, pairs, _ = follow(held, picks, together(held) if how.is_inherited else how.saving.metadata)
    reading = Loading.among(given)
    removed = packed_parts(source, reading)
    how.check(new)
    with reporting_on(how.saving.progress, "Writing", new) as tell:
        how.write(held, new, picks, pairs, tell)
    if removed:
        _write_config(config_of(source, path, reading), os.fsdecode(new), how.saving)
    return removed


def _write_config(config: Config | None, destination: str, how: Saving) -> None:
    """Write the configuration of a dequantised model beside it. A file or an object that exists stays."""
    if config is None:
        return
    text = json.dumps(plain(config), indent=2) + "\n"
    with suppress(FileExistsError):
        if is_url(destination):
            url = f"{destination.rpartition('/')[0]}/{CONFIG}"
            replace_object(url, [text.encode()], storage_options=how.storage_options)
            return
        with open(os.path.join(os.path.dirname(destination), CONFIG), "x", encoding="utf-8") as file:
            file.write(text)


def packed_parts(source: Source, how: Loading) -> list[str]:
    """Return the names of stored tensors that are only parts of dequantised weights."""
    if how.dequantize is False:
        return []
    # The names before `remap` changes them.
    own = how._replace(backend="pread", remap=None)
    stored = open_checkpoint(source, own._replace(dequantize=False))
    with closing(stored), closing(open_checkpoint(source, own)) as weights:
        return sorted(set(stored.all_names()).difference(weights.all_names()))


@takes(RewriteOptions)
def split(
    source: Source,
    destination: Path,
    max_shard_size: int | str = "5GB",
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = KEPT,
    **options: Unpack[RewriteOptions],
) -> None:
    """Make several files and an index of a file or a checkpoint, as huggingface_hub does.

    Parameters
    ----------
    source : ingot.typing.Source
        The file, in either format, or a sharded checkpoint, as for `ingot.open`.
    destination : str, bytes or os.PathLike
        Where to write: a directory, which is created if it does not exist, or a folder of a store, as for
        `ingot.torch.save_sharded`.
    max_shard_size : int or str
        The most bytes of tensors in a file: a number, or a number with ``KB``, ``MB``, ``GB`` or ``TB``,
        which are powers of 1000. A larger tensor gets a file of its own.
    filename_pattern : str
        The names of the files, with ``{suffix}`` in place of ``-00001-of-00003``. A single file has no suffix
        and no index. A pattern that ends with ``.bt`` writes bintensors files.
    metadata : dict of str to str or None, optional
        The metadata. By default the source's. It is written to the index, and its ``format`` (``"pt"`` by
        default) to each file; a single file gets all of it.
    **options
        How headers are read and the files are written: `ingot.typing.RewriteOptions`. `overwrite` replaces
        the checkpoint at `destination`: its files that match `filename_pattern`, and no others, are removed
        when the new ones are in place.

    Raises
    ------
    FileExistsError
        A file of a checkpoint is at `destination`, and `overwrite` is not set.
    OSError, HeaderError, CheckpointError, SaveError, StorageError, TypeError
        As for `merge`.
    OptionError
        `max_shard_size` is not a valid size, or `filename_pattern` is not a name with one ``{suffix}``.

    Notes
    -----
    The source's digests of tensors are copied to the tensors' files, as for `merge`. Aliases are recorded in
    the file of their tensor. The index names only stored tensors. A training state (`save_state`) goes into
    the index, and `load_state` loads the directory.

    The index is written last: if writing fails, the directory holds the whole old checkpoint or the whole new
    one, on file systems with hard links. The next call removes leftovers of an interrupted one.

    Examples
    --------
    >>> ingot.split("model.safetensors", "shards", max_shard_size=128)
    >>> len(ingot.open("shards").shards)
    2
    """
    given = checked(split, locals(), destination=destination_of)
    from .shards import Place, index, write
    from .shards import split as planned
    from .stores import place_at, write_objects

    limit: int = given["max_shard_size"]
    how = _writing(split, given)
    place = place_at(given["destination"], filename_pattern)
    if isinstance(place, Place):
        place.check(how.saving.existing)
    else:
        how.saving.check_url(place.directory)
    held = opened([source], Loading.among(given))
    names, sizes = held.names(0), held.sizes(0)
    whole_file = [(0, number, name) for number, name in enumerate(names)]
    pairs = together(held) if how.is_inherited else how.saving.metadata
    pairs = follow(held, whole_file, pairs).metadata or {}
    of_file = {"format": pairs.get("format", "pt")}
    shards = planned(sizes, limit)
    files = place.names(len(shards))
    whole: dict[str, object] | None = None
    if len(shards) == 1 and isinstance(place, Place):
        of_file |= pairs
    else:
        pairs = {key: value for key, value in pairs.items() if key != "format"}
        names_of = {
            file: [names[number] for number in shard] for file, shard in zip(files, shards, strict=True)
        }
        whole = index(names_of, sum(sizes), pairs, {key: pairs[key] for key in pairs if key == STATE_KEY})
    # Aliases go to the file of their tensor.
    sharing: dict[int, list[int]] = {}
    for number, tensor in enumerate(held.shared(0), start=len(sizes)):
        sharing.setdefault(tensor, []).append(number)

    # Temporary names: `write` checks the files with the final names.
    new = how._replace(saving=how.saving._replace(overwrite=True))

    def save(shard_path: str, shard: list[int]) -> None:
        numbers = [other for number in shard for other in (number, *sharing.get(number, ()))]
        picks = [(0, number, names[number]) for number in numbers]
        size = sum(sizes[number] for number in shard)
        new.write(held, shard_path, picks, of_file, steps.step(size))

    with reporting_on(how.saving.progress, "Splitting", held.path(0)) as tell:
        steps = Several(tell, sum(sizes))
        inside = dict(zip(files, shards, strict=True))
        if isinstance(place, Place):
            write(place, inside, save, whole, how.saving)
        else:
            write_objects(
                place, files, lambda file: save(place.path(file), inside[file]), whole or {}, how.saving
            )


# The names of tensors by which LoRA, LoHa and LoKr are known.
_ADAPTED = re.compile(r"[._](lora_(A|B|down|up)|lora\.(down|up)|hada_w1_a|lokr_w[12](_a)?)(\.|$)")


def _refuse_adapter(held: Sources) -> None:
    """Raise if some sources are adapters of others, whose tensors would only be put beside each other."""
    adapters = [at for at in range(len(held)) if any(map(_ADAPTED.search, held.names(at)))]
    if 0 < len(adapters) < len(held):
        reason = "is an adapter, whose tensors would be copied beside the model's, unmerged"
        hint = "ingot.lora.merge, or `ingot lora merge`, adds it to the model"
        raise located(AdapterError, f"{reason} — {hint}", code="adapter", path=held.path(adapters[0]))


def _writing(function: Callable[..., Any], given: Mapping[str, Any]) -> Writing:
    """Return how `function` writes with these checked options."""
    return Writing(Saving.among(function, given), given["metadata"] is KEPT)
