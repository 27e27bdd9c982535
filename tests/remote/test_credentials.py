"""Credentials from every source: none may end a line of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Handler, Request, Server, good, serving

DATA = ingot.numpy.save({"a": np.arange(10)})
#: Values that would be headers of their own, and others that are rejected too.
EVIL = [
    "hunter2\r\nX-Evil: 1",
    "hunter2\nX-Evil: 1",
    "hunter2\rX-Evil: 1",
    "\r\nhunter2",
    "hunter2\n\n",
    "hunter2\x7f",
    "a\x0bb",
]
#: Values in files, as secrets are mounted.
ENDS = ["", "\n", "\r\n"]


class Way:
    """A source of credentials: where a test writes them, and a call that opens a file with them."""

    def __init__(self, server: Server, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.server, self.folder, self.patch = server, folder, patch
        self.options: dict[str, object] = {"endpoint": server.url(""), "retries": 0}
        self.url = "s3://b/k"

    def option(self, **options: object) -> None:
        self.options |= options

    def variable(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_bytes(text.encode())
        return str(path)

    def open(self) -> None:
        ingot.safe_open(self.url, "np", storage_options=self.options)


def keys(way: Way, **other: str) -> dict[str, str]:
    return {"access_key_id": "id", "secret_access_key": "s", "session_token": "t", **other}


def by_options(name: str) -> Callable[[Way, str], None]:
    return lambda way, text: way.option(**keys(way, **{name: text}))


def by_variables(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        way.variable(**{f"AWS_{key.upper()}": value for key, value in keys(way, **{name: text}).items()})

    return put


def by_profile(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        lines = [f"aws_{key}={value}" for key, value in keys(way, **{name: text}).items()]
        way.variable(AWS_SHARED_CREDENTIALS_FILE=way.file("credentials", "\n".join(["[default]", *lines])))

    return put


def by_container(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        issued = {"AccessKeyId": "id", "SecretAccessKey": "s", "Token": "t", name: text}
        way.server.replace(lambda handler, request: answer(handler, request, issued))
        way.variable(AWS_CONTAINER_CREDENTIALS_FULL_URI=way.server.url("/creds"))

    return put


def answer(handler: Handler, request: Request, issued: dict[str, str]) -> None:
    if not request.path.startswith(("/b/", "/c/")):
        request.path = "/creds"
        text = json.dumps(issued).encode()
        handler.head(200, Content_Length=len(text))
        handler.body(text)
    else:
        handler.part(DATA, request)


def container_token(way: Way, text: str) -> None:
    by_container("Token")(way, "t")
    way.variable(AWS_CONTAINER_AUTHORIZATION_TOKEN=text)


def container_token_file(way: Way, text: str) -> None:
    by_container("Token")(way, "t")
    way.variable(AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=way.file("token", text))


def of_google(variable: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        way.url = "gs://b/k"
        way.variable(**{variable: text})

    return put


def of_hub(way: Way, text: str) -> None:
    way.url = "hf://me/gpt/m.safetensors"
    way.variable(HF_TOKEN=text)


def of_hub_file(way: Way, text: str) -> None:
    way.url = "hf://me/gpt/m.safetensors"
    way.variable(HF_TOKEN_PATH=way.file("token", text))


def token(way: Way, text: str) -> None:
    way.url = way.server.url()
    del way.options["endpoint"]
    way.option(token=text)


def header(way: Way, text: str) -> None:
    token(way, "t")
    way.option(headers={"X-Key": text})


def of_azure(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        way.url = "az://c/b"
        way.option(account="me", **{name: text})

    return put


def by_process(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        printed = {"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "s", "SessionToken": "t", name: text}
        path = way.file("printed", json.dumps(printed))
        config = way.file("config", f"[default]\ncredential_process = /bin/cat {path}\n")
        way.variable(AWS_CONFIG_FILE=config)

    return put


def by_google_keys(name: str) -> Callable[[Way, str], None]:
    def put(way: Way, text: str) -> None:
        way.url = "gs://b/k"
        way.variable(**{"GS_ACCESS_KEY_ID": "id", "GS_SECRET_ACCESS_KEY": "s", name: text})

    return put


NAMES = ["access_key_id", "secret_access_key", "session_token"]
WAYS: dict[str, Callable[[Way, str], None]] = {
    **{f"option {name}": by_options(name) for name in NAMES},
    **{f"variable {name}": by_variables(name) for name in NAMES},
    **{f"profile {name}": by_profile(name) for name in NAMES},
    **{f"container {name}": by_container(name) for name in ("AccessKeyId", "SecretAccessKey", "Token")},
    **{f"process {name}": by_process(name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")},
    **{f"google {name}": by_google_keys(name) for name in ("GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY")},
    "container token": container_token,
    "container token file": container_token_file,
    **{name: of_google(name) for name in ("GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN")},
    "hub": of_hub,
    "hub file": of_hub_file,
    "token": token,
    "header": header,
    **{
        f"azure {name}": of_azure(name) for name in ("account_key", "sas_token", "token", "connection_string")
    },
}
#: Values that are encoded before they are sent, so that their text is not in the request.
SIGNED = [name for name in WAYS if "secret" in name.lower()] + ["azure account_key"]
#: Values whose content is in other values of the request.
SIGNED += ["azure connection_string"]


def can_hold(name: str, text: str) -> bool:
    """Return whether a source can hold a text: some files end a value at a line end, or strip white space."""
    if name.startswith("profile"):
        return "\n" not in text and "\r" not in text
    return text.strip() != "hunter2" or name not in ("hub", "hub file", "container token file")


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with serving(good(DATA)) as server:
        yield Way(server, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "evil"), [pair for pair in product(WAYS, EVIL) if can_hold(*pair)], ids=ascii
)
def test_credential_with_a_line_end_is_rejected(way: Way, name: str, evil: str) -> None:
    WAYS[name](way, evil)
    with pytest.raises(ingot.OptionError) as caught:
        way.open()
    assert caught.value.code == "storage-option"
    assert "control characters" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    # The container was asked for credentials, which are invalid; no file was requested.
    assert [request.path for request in way.server.requests if request.path != "/creds"] == []
    assert all("x-evil" not in request.headers for request in way.server.requests)


@pytest.mark.parametrize("end", ENDS, ids=ascii)
@pytest.mark.parametrize("name", WAYS)
def test_credential_file_loses_its_final_line_end(way: Way, name: str, end: str) -> None:
    WAYS[name](way, "c2VjcmV0" + end)
    way.open()
    sent = [text for request in way.server.requests for text in (*request.headers.values(), request.path)]
    assert name in SIGNED or any("c2VjcmV0" in text for text in sent)
