"""Fixtures of the tests of remote files: an environment without credentials and without a proxy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.clouds import key_pair

#: Variables with credentials of a caller, or with addresses of services.
NAMES = ("AWS_", "GOOGLE_", "AZURE_", "GS_", "GCE_", "CLOUDSDK_", "IDENTITY_", "NO_GCE", "STORAGE_EMULATOR")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith(NAMES) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="session")
def pair() -> tuple[bytes, bytes]:
    """Return a private key and the public one."""
    pytest.importorskip("google.auth", reason="google-auth verifies what is signed, and is not installed")
    return key_pair()
