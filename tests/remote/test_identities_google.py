"""Identities for Google's store: the identity that google-auth finds, and never another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ingot
from support import clouds
from support.clouds import SECRET, Cloud, running
from support.processes import python
from support.servers import Request, unused_port

READ = "devstorage.read_only"


class Setup(clouds.Setup):
    """The configuration of a test: variables and files."""

    url = "gs://b/k"

    def service_account(self) -> dict[str, object]:
        return {
            "type": "service_account",
            "client_email": "me@x.iam",
            "private_key_id": "k1",
            "private_key": self.cloud.private.decode(),
            "token_uri": self.cloud.url("/google/token"),
        }

    def person(self) -> dict[str, object]:
        return {
            "type": "authorized_user",
            "client_id": "c",
            "client_secret": "of-the-client",
            "refresh_token": "1r",
            "token_uri": self.cloud.url("/google/token"),
        }

    def external(self, source: dict[str, object], **more: object) -> dict[str, object]:
        return {
            "type": "external_account",
            "audience": "//iam/pool",
            "subject_token_type": "urn:of:jwt",
            "token_url": self.cloud.url("/google/sts"),
            "credential_source": source,
            **more,
        }

    def file(self, content: object, name: str = "file.json") -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def variable(self, content: object) -> None:
        self.patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(self.file(content)))

    def default(self, content: object) -> None:
        self.file(content, ".config/gcloud/application_default_credentials.json")

    def machine(self) -> None:
        self.patch.delenv("NO_GCE_CHECK", raising=False)
        host = f"{self.cloud.server.host}:{self.cloud.server.port}"
        # google-auth reads the variable when it is imported.
        self.patch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            self.patch.setenv(name, host)


def lead(patch: pytest.MonkeyPatch, cloud: Cloud) -> None:
    """Direct the address that is built into google-auth to the server."""
    from google.auth.transport.requests import Request

    send, there = Request.__call__, cloud.url("/google")

    def led(self: Request, url: str, *arguments: object, **options: object) -> object:
        return send(self, url.replace("https://oauth2.googleapis.com", there), *arguments, **options)

    patch.setattr(Request, "__call__", led)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[bytes, bytes]) -> Iterator[Setup]:
    with running() as cloud:
        monkeypatch.setenv("CLOUD", cloud.url(""))
        cloud.private, cloud.public = pair
        lead(monkeypatch, cloud)
        yield Setup(cloud, tmp_path, monkeypatch)


#: Prints the identity of google-auth, which reads variables at import, and has built-in addresses.
SCRIPT = f"""
import os, warnings
warnings.simplefilter("ignore")
import google.auth
from google.auth.transport.requests import Request
class Led(Request):
    def __call__(self, url, *arguments, **options):
        url = url.replace("https://oauth2.googleapis.com", os.environ["CLOUD"] + "/google")
        return super().__call__(url, *arguments, **options)
found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/{READ}"])
found.refresh(Led())
print(found.token)
"""


def of_google() -> str:
    ended = python("-c", SCRIPT)
    assert ended.code == 0, ended.err
    return ended.out.strip()


# Sources of configuration, with their identities. ----------------------------------------------------

SETUPS: dict[str, tuple[Callable[[Setup], object], str]] = {
    "service account": (lambda setup: setup.variable(setup.service_account()), f"account-me@x.iam-{READ}"),
    "person": (lambda setup: setup.variable(setup.person()), "person-1r"),
    "default file": (lambda setup: setup.default(setup.person()), "person-1r"),
    "machine": (lambda setup: setup.machine(), "google-machine"),
    "url of a token": (
        lambda setup: setup.variable(
            setup.external(
                {
                    "url": setup.cloud.url("/subject"),
                    "headers": {"X-Ask": "please"},
                    "format": {"type": "json", "subject_token_field_name": "value"},
                }
            )
        ),
        f"federated-of-the-url-{READ}",
    ),
    "variable before default file and machine": (
        lambda setup: (
            setup.variable(setup.service_account()),
            setup.default(setup.person()),
            setup.machine(),
        ),
        f"account-me@x.iam-{READ}",
    ),
    "default file before machine": (
        lambda setup: (setup.default(setup.person()), setup.machine()),
        "person-1r",
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_gcs_sources_authenticate_as_google_auth(setup: Setup, name: str) -> None:
    configure, reader = SETUPS[name]
    configure(setup)
    assert setup.open() == reader
    asked = len(setup.cloud.server.requests)
    assert setup.open() == reader
    assert len(setup.cloud.server.requests) == asked + 1, "the token is good for a while"
    assert of_google() == reader


def test_gcs_options_override_all_sources(setup: Setup) -> None:
    pytest.importorskip("botocore", reason="botocore verifies the signatures, and is not installed")
    setup.cloud.known("HMAC", "VARIABLES")
    setup.cloud.tokens |= {"given", "variable"}
    setup.variable(setup.person())
    account = setup.file(setup.service_account(), "account.json")
    assert setup.open(token="given") == "given"
    assert setup.open(credentials_file=account) == f"account-me@x.iam-{READ}"
    assert setup.open(token=str(account)) == f"account-me@x.iam-{READ}"
    assert setup.open(access_key_id="HMAC", secret_access_key=SECRET) == "HMAC"
    assert setup.open(token=False) == setup.open(anonymous=True) == setup.open(token="anon") == "nobody"
    assert setup.open(token="google_default") == "person-1r"
    setup.patch.setenv("GS_ACCESS_KEY_ID", "VARIABLES")
    setup.patch.setenv("GS_SECRET_ACCESS_KEY", SECRET)
    assert setup.open() == "VARIABLES"
    setup.patch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "variable")
    assert setup.open() == "variable"


# Failures. ---------------------------------------------------------------------------------------------

ASKED = {
    "service account": "/google/token",
    "person": "/google/token",
    "machine": "/computeMetadata",
    "url of a token": "/subject",
}


@pytest.mark.parametrize("status", [200, 400, 403, 404, 500])
@pytest.mark.parametrize("name", ASKED)
def test_gcs_source_that_fails_is_an_error(setup: Setup, name: str, status: int) -> None:
    if name != "machine":
        # A later source, which must not be used.
        setup.machine()
    SETUPS[name][0](setup)

    setup.fail(ASKED[name], "invalid_grant", status)
    with pytest.raises((ingot.SafetensorError, OSError)) as caught:
        setup.open()
    assert setup.cloud.readers == []
    assert "no credentials from " in str(caught.value)
    assert all(secret not in str(caught.value) for secret in ("of-the-client", "of-the-url", "please"))
    if status == 403 and name not in ("url of a token", "machine"):
        assert isinstance(caught.value, PermissionError)
        assert "invalid_grant" in str(caught.value)
    assert not isinstance(caught.value, FileNotFoundError)


def test_gcs_silent_metadata_service_is_an_error(setup: Setup) -> None:
    setup.machine()
    host = f"127.0.0.1:{unused_port()}"
    setup.patch.setenv("GCE_METADATA_HOST", host)
    setup.patch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
    with pytest.raises(ingot.StorageError, match="NO_GCE_CHECK=true"):
        setup.open()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"credential_source": {"executable": {"command": "x"}}}, "ALLOW_EXECUTABLES"),
        ({"credential_source": {"file": "/none/token"}}, "RefreshError"),
        (
            {"credential_source": {"url": "https://h/x", "headers": {"X": "s3cret\r\nY: z"}}},
            "TransportError: InvalidHeader",
        ),
        ({"type": "s3cret_type\r\n"}, "does not have a valid type"),
        ({"type": "service_account", "client_email": "x", "private_key": "s3cret"}, "account"),
        ("{", "is not a valid json file"),
    ],
    ids=str,
)
def test_gcs_unusable_file_is_an_error(setup: Setup, content: object, why: str) -> None:
    setup.machine()
    setup.variable({**setup.external({}), **content} if isinstance(content, dict) else content)
    with pytest.raises(ingot.SafetensorError, match=why) as caught:
        setup.open()
    assert "s3cret" not in str(caught.value).replace("s3cret_type", "")
    assert "\r" not in str(caught.value)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value)
    assert setup.cloud.server.requests == []


@pytest.mark.parametrize("token", ["cache", "cloud", "browser"])
def test_gcs_words_of_gcsfs_are_rejected(setup: Setup, token: str) -> None:
    with pytest.raises(ingot.OptionError, match="token: cannot be this str"):
        setup.open(token=token)
