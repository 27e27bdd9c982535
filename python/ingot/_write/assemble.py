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
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from ingot._base.checks import Leniency
    from ingot._base.options import Loading, Saving
    from ingot.typing import Source, Tell

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


def opened(sources: Iterable[Source], how: Loading, leniency: Leniency = "accept") -> Sources:
    """Open all files of `sources`, for their tensors to be copied."""
    checkpoints = [
        open_checkpoint(
            source,
            "pread",
            leniency,
            how.max_header_size,
            storage_options=how.storage_options,
            lent=True,
        )
        for source in sources
    ]
    return Sources(checkpoints, leniency)


def together(opened: Sources) -> dict[str, str] | None:
    """Return the metadata of all sources, without records that are made anew. None if no source has any."""
    return united(
        pair
        for at in range(len(opened))
        for pair in of_one(opened.path(at), opened.metadata(at), opened.index_metadata(at))
    )


def united(metadata: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str] | None:
    """Return the metadata of these files, each with its path, as `together` does."""
    found: dict[str, tuple[str, str]] | None = None
    for path, pairs in metadata:
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


def of_one(
    path: str, files: Mapping[str, dict[str, str] | None], index: Mapping[str, Any] | None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metadata of each file of a checkpoint and of its index, each with its path.

    Entries of an index that no file can hold, or that describe its tensors, are left out.
    """
    for file, pairs in files.items():
        if pairs is not None:
            yield file, pairs
    if index is not None:
        yield path, of_index({key: text for key, text in index.items() if isinstance(text, str)})
