"""`storage_options={"credentials": provider}`: valid results, the times of calls, and failures."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import ingot
import ingot.numpy
from support.clouds import SECRET, Cloud, running
from support.commands import run
from support.ctrl_c import interrupted
from support.servers import serving

from .test_identity_rules import Store

pytest.importorskip("botocore", reason="botocore verifies the signatures, and is not installed")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with running() as cloud:
        cloud.known("KEY")
        cloud.tokens |= {"T1", "T2"}
        yield cloud


def opened(cloud: Cloud, url: str, provider: object, **more: object) -> str:
    options = {"endpoint": cloud.url(), "account": "me", "retries": 0, "credentials": provider, **more}
    ingot.safe_open(url, "np", storage_options=options)
    return cloud.readers[-1]


KEYS = {"access_key_id": "KEY", "secret_access_key": SECRET}


@dataclass
class Object:
    token: str = "T1"


@pytest.mark.parametrize(
    ("url", "answer", "reader"),
    [
        ("s3://b/k", KEYS, "KEY"),
        ("s3://b/k", {**KEYS, "session_token": None, "token": None, "expires_at": None}, "KEY"),
        ("s3://b/k", {**KEYS, "expires_at": datetime(2100, 1, 1, tzinfo=UTC)}, "KEY"),
        ("gs://b/k", {"token": "T1", "expires_at": 4e9}, "T1"),
        ("az://c/b", {"token": "T1"}, "T1"),
        ("az://c/b", Object(), "T1"),
        ("hf://me/model/model.safetensors", {"token": "T1"}, "T1"),
    ],
    ids=str,
)
def test_provider_authenticates_with_its_answer(cloud: Cloud, url: str, answer: object, reader: str) -> None:
    assert opened(cloud, url, lambda: answer) == reader


def test_provider_authenticates_a_plain_url(cloud: Cloud) -> None:
    options = {"credentials": lambda: {"token": "T1"}}
    ingot.safe_open(cloud.url("/model.safetensors"), "np", storage_options=options)
    assert cloud.readers == ["T1"]


def test_provider_sets_session_region_and_endpoint(cloud: Cloud) -> None:
    cloud.keys["KEY"] = (SECRET, "session")
    answer = {**KEYS, "token": "session", "region": "eu-west-9", "endpoint": cloud.url()}
    ingot.safe_open("s3://b/k", "np", storage_options={"credentials": lambda: answer})
    assert cloud.readers == ["KEY"]
    assert "/eu-west-9/s3/" in cloud.server.requests[-1].headers["authorization"]
    # Options of the call override the provider's.
    assert (
        opened(cloud, "s3://b/k", lambda: {**answer, "endpoint": "http://127.0.0.1:9"}, region="r-1") == "KEY"
    )
    assert "/r-1/s3/" in cloud.server.requests[-1].headers["authorization"]


def test_provider_is_called_once_for_a_handle_and_again_after_a_refusal() -> None:
    store = Store((401, "Refused"))
    with serving(store.file) as server:
        options = {"endpoint": server.url(""), "credentials": lambda: {"token": store.identity()}}
        file = ingot.safe_open("gs://b/k", "np", storage_options=options)
        assert (file["t1"] == 1).all()
        assert store.issued == 1
        store.valid.clear()
        assert (file["t2"] == 2).all()
        assert store.issued == 2


def test_provider_is_called_again_before_its_answer_expires() -> None:
    store = Store((401, "Refused"))

    def provider() -> dict[str, Any]:
        return {"token": store.identity(), "expires_at": datetime.now(UTC) + timedelta(minutes=1)}

    with serving(store.file) as server:
        options = {"endpoint": server.url(""), "credentials": provider}
        file = ingot.safe_open("gs://b/k", "np", storage_options=options)
        assert store.issued == 1
        assert (file["t2"] == 2).all()
        assert store.issued == 2


@pytest.mark.parametrize(
    ("url", "answer", "why"),
    [
        ("gs://b/k", {}, "expected access_key_id and secret_access_key, or token"),
        ("gs://b/k", None, "found NoneType without them"),
        ("gs://b/k", {"secret": "s3cret"}, "unknown field 'secret': expected access_key_id, "),
        ("gs://b/k", {"token": b"s3cret"}, "token: expected str, found bytes"),
        ("gs://b/k", {"token": "s3cret\r\nX: y"}, "has control characters"),
        ("gs://b/k", {"token": "s3cret", "expires_at": datetime(2099, 1, 1)}, "without a time zone"),
        ("gs://b/k", {"token": "s3cret", "expires_at": "later"}, "expires_at: .*, found str"),
        ("s3://b/k", {"access_key_id": "s3cret"}, "found half a pair of keys"),
        ("s3://b/k", {"token": "s3cret"}, "expected keys, found a token"),
        ("az://c/b", {**KEYS, "token": "s3cret"}, "expected a token, found keys"),
    ],
    ids=str,
)
def test_provider_with_a_bad_answer_is_an_error(cloud: Cloud, url: str, answer: object, why: str) -> None:
    with pytest.raises(ingot.OptionError, match=why) as caught:
        opened(cloud, url, lambda: answer)
    assert "no credentials from the provider in `credentials`" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.code == "storage-option"
    assert cloud.readers == []


def test_provider_that_raises_is_the_cause(cloud: Cloud) -> None:
    def provider() -> dict[str, str]:
        raise LookupError("with a s3cret")

    with pytest.raises(ingot.StorageError, match="the object raised LookupError") as caught:
        opened(cloud, "gs://b/k", provider)
    assert "s3cret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.code == "no-credentials"


@pytest.mark.parametrize(
    "other", [{"token": "t"}, {"anonymous": True}, {"profile": "p"}, {"key": "a", "secret": "b"}], ids=str
)
def test_provider_beside_another_identity_is_an_error(cloud: Cloud, other: dict[str, object]) -> None:
    with pytest.raises(ingot.OptionError, match="are two identities"):
        opened(cloud, "gs://b/k", lambda: {"token": "T1"}, **other)


def test_provider_that_is_not_callable_is_a_type_error(cloud: Cloud) -> None:
    with pytest.raises(TypeError, match="credentials: cannot be this dict: expected a callable"):
        opened(cloud, "gs://b/k", {"token": "T1"})


def test_provider_that_waits_is_abandoned_at_ctrl_c_and_deadline(cloud: Cloud) -> None:
    over = threading.Event()

    def provider() -> dict[str, str]:
        over.wait(60)
        return {"token": "T1"}

    try:
        with interrupted():
            opened(cloud, "gs://b/k", provider)
        with pytest.raises(ingot.StorageError, match="the provider did not answer"):
            opened(cloud, "gs://b/k", provider, timeout=0.2)
    finally:
        over.set()


def test_provider_that_waits_does_not_keep_the_program(cloud: Cloud) -> None:
    script = (
        "import ingot, time\n"
        "try: ingot.safe_open('gs://b/k', 'np', storage_options=dict(\n"
        "    timeout=0.2, credentials=lambda: time.sleep(1)))\n"
        "except ingot.StorageError as error: print(error.code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "no-credentials\n", "")


def of_module() -> dict[str, str]:
    return {"token": "T1"}


def test_handle_is_pickled_if_its_provider_can_be(cloud: Cloud) -> None:
    options: dict[str, Any] = {"endpoint": cloud.url(), "credentials": of_module}
    file = ingot.safe_open("gs://b/k", "np", storage_options=options)
    again = pickle.loads(pickle.dumps(file))
    assert again.keys() == file.keys()
    options["credentials"] = lambda: {"token": "T1"}
    file = ingot.safe_open("gs://b/k", "np", storage_options=options)
    for one in (file, file.get_slice(file.keys()[0])):
        with pytest.raises(TypeError, match=r"the `credentials` of its storage_options .*<lambda>"):
            pickle.dumps(one)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_provider_is_called_again_in_a_child_of_a_fork(cloud: Cloud) -> None:
    processes: list[int] = []

    def provider() -> dict[str, str]:
        processes.append(os.getpid())
        return {"token": "T1"}

    options = {"endpoint": cloud.url(), "credentials": provider}
    url = "gs://b/k"
    ingot.safe_open(url, "np", storage_options=options)
    child = os.fork()
    if child == 0:
        try:
            ingot.safe_open(url, "np", storage_options=options)
            os._exit(0 if processes[-1] == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# SDKs that are not installed. ------------------------------------------------------------------------------

MISSING = {
    "s3://b/k": ({"AWS_PROFILE": "work"}, "botocore", "s3"),
    "gs://b/k": ({"GOOGLE_APPLICATION_CREDENTIALS": "/none"}, "google", "gcs"),
    "az://c/b": ({"AZURE_CLIENT_SECRET": "s3cret"}, "azure", "azure"),
}


@pytest.mark.parametrize("url", MISSING)
def test_missing_sdk_names_the_extra(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    variables, package, extra = MISSING[url]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ingot.OptionError, match=rf"ingot-tensors\[{extra}\]") as caught:
        ingot.safe_open(url, "np", storage_options={"endpoint": cloud.url(), "account": "me"})
    assert caught.value.code == "missing-sdk"
    assert "`credentials`" in str(caught.value)
    assert "`anonymous`" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert cloud.server.requests == []


# The command. ----------------------------------------------------------------------------------------------


def test_credentials_command_prints_no_secret(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE123456789")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    shown = run("credentials", "s3://b/k").out
    assert shown == "source: AWS_ACCESS_KEY_ID\nkind: keys\naccess key: …6789\n"
    form = json.loads(run("credentials", "s3://b/k", "--process").out)
    assert form == {"Version": 1, "AccessKeyId": "AKIDEXAMPLE123456789", "SecretAccessKey": SECRET}
    assert cloud.server.requests == []


def test_credentials_command_says_that_nothing_is_sent(cloud: Cloud) -> None:
    assert run("credentials", "s3://b/k").out == "kind: anonymous\n"
    assert run("credentials", "gs://b/k", "--process").code != 0


def test_credentials_command_prints_a_credential_process(cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    command = f"{sys.executable} -m ingot credentials s3://b/k --profile base --process"
    (tmp_path / ".aws" / "config").write_text(
        f"[profile base]\naws_access_key_id = KEY\naws_secret_access_key = {SECRET}\n"
        f"[profile tool]\ncredential_process = {command}\n"
    )
    options = {"endpoint": cloud.url(), "profile": "tool"}
    ingot.safe_open("s3://b/k", "np", storage_options=options)
    assert cloud.readers == ["KEY"]
