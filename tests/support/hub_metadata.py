"""The result of `ingot.inspect` as the dataclasses of huggingface_hub have it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ingot


def of_tensor(info: ingot.TensorInfo) -> dict[str, Any]:
    return {
        "dtype": info.dtype,
        "shape": list(info.shape),
        "data_offsets": (info.begin, info.end),
        "parameter_count": info.parameter_count,
    }


def of_file(found: ingot.FileMetadata) -> dict[str, Any]:
    return asdict(found) | {"tensors": {name: of_tensor(info) for name, info in found.tensors.items()}}


def of_repo(found: ingot.RepoMetadata) -> dict[str, Any]:
    """Return what huggingface_hub has: no `parameter_total`, and no `metadata` of a single file."""
    files = {name: of_file(file) for name, file in found.files_metadata.items()}
    metadata = found.metadata if found.sharded else None
    fields = asdict(found) | {"files_metadata": files, "metadata": metadata}
    del fields["parameter_total"]
    return fields
