"""Keys that are issued for a while, by services on loopback that answer as Amazon's do."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Handler, Request, good, serving, unused_port

DATA = ingot.numpy.save({"a": np.arange(10)})
VARIABLES = [
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_EC2_METADATA_SERVICE_ENDPOINT"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    # A machine of Amazon that runs these tests has keys of its own.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def keys(name: str, seconds: float = 3600) -> dict[str, str]:
    return {
        "Code": "Success",
        "AccessKeyId": name,
        "SecretAccessKey": "hunter2",
        "Token": f"session-{name}",
        "Expiration": after(seconds),
    }


def answered(handler: Handler, text: str, status: int = 200) -> None:
    handler.head(status, Content_Length=len(text))
    handler.body(text.encode())


def who_asked(opened: int = 1) -> tuple[list[str], list[str]]:
    """Open a file of a bucket; gives the key and the session of each request."""
    with serving(good(DATA)) as bucket:
        for _ in range(opened):
            ingot.safe_open("s3://b/k", "np", storage_options={"endpoint": bucket.url("")})
        headers = [request.headers.get("authorization", "") for request in bucket.requests]
        sessions = [request.headers.get("x-amz-security-token", "") for request in bucket.requests]
    return [text.partition("Credential=")[2].partition("/")[0] for text in headers], sessions


def test_a_container_shows_its_token_and_gets_keys_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("from-the-file\n")

    def answer(handler: Handler, request: Request) -> None:
        answered(handler, json.dumps(keys("CONTAINER")))

    with serving(answer) as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds/1"))
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        assert who_asked(opened=3) == (["CONTAINER"] * 3, ["session-CONTAINER"] * 3)
        assert [(r.path, r.headers["authorization"]) for r in service.requests] == [
            ("/creds/1", "from-the-file")
        ]


def test_keys_that_are_nearly_over_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def answer(handler: Handler, request: Request) -> None:
        given.append(f"KEY{len(given)}")
        answered(handler, json.dumps(keys(given[-1], seconds=60)))

    with serving(answer) as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds/2"))
        assert who_asked(opened=2)[0] == given
        assert len(given) == 2


def test_a_container_that_is_refused_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler, request: answered(handler, "no", 403)) as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds/3"))
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "hunter2")
        with pytest.raises(PermissionError) as caught:
            ingot.safe_open("s3://b/k", "np")
        assert service.url("/creds/3") in str(caught.value)
        assert "hunter2" not in str(caught.value)


STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <AssumeRoleWithWebIdentityResult><Credentials>
    <AccessKeyId>WEB</AccessKeyId><SecretAccessKey>s/e+c=</SecretAccessKey>
    <SessionToken>session-WEB</SessionToken><Expiration>{}</Expiration>
  </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def test_a_pod_shows_its_identity_in_the_body_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "identity").write_text("eyJ.identity.x")
    bodies: list[str] = []

    def answer(handler: Handler, request: Request) -> None:
        bodies.append(handler.rfile.read(int(request.headers["content-length"])).decode())
        answered(handler, STS.format(after(3600)))

    with serving(answer) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.url(""))
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/reader")
        assert who_asked(opened=2) == (["WEB"] * 2, ["session-WEB"] * 2)
        assert len(service.requests) == 1
        assert service.requests[0].path == "/"
    asked = parse_qs(bodies[0])
    assert asked["Action"] == ["AssumeRoleWithWebIdentity"]
    assert asked["RoleArn"] == ["arn:aws:iam::1:role/reader"]
    assert asked["WebIdentityToken"] == ["eyJ.identity.x"]


def instance(handler: Handler, request: Request) -> None:
    """The metadata of a machine, version 2."""
    if handler.command == "PUT" and request.path == "/latest/api/token":
        assert request.headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        answered(handler, "the-token")
    elif request.headers.get("x-aws-ec2-metadata-token") != "the-token":
        answered(handler, "", 401)
    elif request.path == "/latest/meta-data/iam/security-credentials/":
        answered(handler, "my-role\n")
    elif request.path == "/latest/meta-data/iam/security-credentials/my-role":
        answered(handler, json.dumps(keys("INSTANCE")))
    else:
        answered(handler, "", 404)


def test_a_machine_is_asked_by_version_2_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(instance) as service:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url(""))
        # No proxy sees what is said on the machine.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert who_asked(opened=2) == (["INSTANCE"] * 2, ["session-INSTANCE"] * 2)
        assert len(service.requests) == 3


def test_n18_a_machine_without_a_role_reads_as_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with serving(lambda handler, request: answered(handler, "", 404)) as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url(""))
        assert who_asked() == ([""], [""])


def test_n18_a_machine_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(ingot.StorageError, match="AWS_EC2_METADATA_DISABLED=true") as caught:
        who_asked()
    assert caught.value.code == "no-credentials"


def test_n18_who_wants_to_be_nobody_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(instance) as service,
        serving(lambda handler, request: handler.part(DATA, request)) as bucket,
    ):
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url(""))
        options = {"endpoint": bucket.url(""), "anonymous": True}
        ingot.safe_open("s3://b/k", "np", storage_options=options)
        assert service.requests == []
        assert "authorization" not in bucket.requests[0].headers
