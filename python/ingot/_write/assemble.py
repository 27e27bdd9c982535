"""How a file of other files' tensors is written."""

from __future__ import annotations

from typing import NamedTuple

from ingot._base.checks import format_for
from ingot._base.text import _escaped, _quoted
from ingot._native import MODEL_SPEC_KEY, RECORD_KEYS, Sources
from ingot._read.door import open_checkpoint
from ingot.errors import SaveError

from .shards import of_index

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ingot._base.checks import Leniency
    from ingot._base.options import Saving
    from ingot.typing import Source, StorageOptions, Tell

    Pick = tuple[int, int, str]


class Writing(NamedTuple):
    """How a file of other files' tensors is written."""

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
        opened.write(
            path,
            picks,
            metadata,
            format_for(path, self.saving.format),
            inherit=self.is_inherited and self.saving.checksums is None,
            progress=tell,
            **self.saving.layout(),
            **self.saving.of_named_file(),
        )


def opened(
    sources: Iterable[Source], storage_options: StorageOptions | None, leniency: Leniency = "accept"
) -> Sources:
    """Open all files of `sources`, for their tensors to be copied."""
    checkpoints = [
        open_checkpoint(source, "pread", leniency, storage_options=storage_options, lent=True)
        for source in sources
    ]
    return Sources(checkpoints, leniency)


def together(opened: Sources) -> dict[str, str] | None:
    """The metadata of all sources, without what is made anew of theirs; None where none has any."""
    found: dict[str, tuple[str, str]] | None = None
    for path, pairs in _metadata(opened):
        found = {} if found is None else found
        for key, value in pairs.items():
            if key in RECORD_KEYS and key != MODEL_SPEC_KEY:
                continue
            other, first = found.setdefault(key, (value, path))
            # A hash of one of several files is not true of the new one, which leaves it out.
            if other != value and key != MODEL_SPEC_KEY:
                raise SaveError(
                    f"metadata key {_quoted(key)}: {_escaped(first)} and {_escaped(path)} differ "
                    "— say which by metadata=",
                    code="metadata-conflict",
                    path=path,
                    expected=other,
                    found=value,
                )
    return None if found is None else {key: value for key, (value, _) in found.items()}


def _metadata(opened: Sources) -> Iterator[tuple[str, dict[str, str]]]:
    """The metadata of each file and each index that has some, with its path.

    Of an index that is what a file can hold and what speaks of no tensor.
    """
    for at in range(len(opened)):
        for path, pairs in opened.metadata(at).items():
            if pairs is not None:
                yield path, pairs
        pairs_of_index = opened.index_metadata(at)
        if pairs_of_index is not None:
            texts_in_it = {key: text for key, text in pairs_of_index.items() if isinstance(text, str)}
            yield opened.path(at), of_index(texts_in_it)
