"""Behaviour that only mlx has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import ingot.mlx  # noqa: E402  # mlx is there, as the line above found.


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap], ids=["compile", "vmap"])
def test_save_rejects_traced_arrays(transform: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"old")

    def saving(array: Any) -> Any:
        with pytest.raises(ingot.SaveError, match="`odd`: mlx has no values for it, as inside") as caught:
            ingot.mlx.save_file({"odd": array}, path)
        assert (caught.value.code, caught.value.tensor) == ("no-values", "odd")
        return array

    transform(saving)(mx.ones((3, 2)))
    assert path.read_bytes() == b"old"
