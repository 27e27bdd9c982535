"""What the tests here share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from remote.servers import good, serving

if TYPE_CHECKING:
    import torch


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    # Imported here: some of the tests run where the other frameworks are.
    import torch

    torch.manual_seed(0)
    return {
        "large": torch.randn(900_000),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "bytes": torch.arange(250, dtype=torch.uint8),
        'nämé " \\ \n': torch.randn(7, 3).to(torch.bfloat16),
    }


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts what `writers` downloads behind the URL that the environment names."""
    from writers import SERVED

    with serving(good(SERVED)) as server:
        monkeypatch.setenv("URL", server.url("/model.safetensors"))
        yield
