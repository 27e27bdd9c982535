"""Common parts of the servers that imitate the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from .servers import Handler, Server

TOKEN = "hf_right"
#: All hosts of each look-alike are on loopback, which redirects do not lead to otherwise.
NEAR = {"allow_private_redirects": True, "retries": 1}


def take_the_place(hub: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `hub` the Hub, for a user with a token and the home directory `home`."""
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url(""))
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def find_nothing(handler: Handler) -> None:
    """Answer as the Hub does where it has no such file."""
    handler.head(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", Content_Length=0)
