"""Identities for S3: the identity that botocore uses with the same configuration, and never another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1
from itertools import combinations
from pathlib import Path

import pytest

import ingot
from support import clouds
from support.clouds import SECRET, Cloud, after, running, send_text
from support.servers import Handler, Request, unused_port


class Setup(clouds.Setup):
    """The configuration of a test: variables and the two files."""

    url = "s3://b/k"

    def __init__(self, cloud: Cloud, home: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(cloud, home, patch)
        self.files: dict[str, dict[str, dict[str, str]]] = {"config": {}, "credentials": {}}

    def put(self, file: str, section: str, **pairs: str) -> None:
        self.files[file].setdefault(section, {}).update(pairs)
        lines = [
            line
            for name, pairs in self.files[file].items()
            for line in (f"[{name}]", *(f"{key} = {value}" for key, value in pairs.items()))
        ]
        (self.home / ".aws").mkdir(exist_ok=True)
        (self.home / ".aws" / file).write_text("\n".join(lines) + "\n")

    def token(self, name: str = "identity") -> str:
        path = self.home / name
        path.write_text(f"{name}\n")
        return str(path)

    def login(self, of: str, **more: str) -> Path:
        folder = self.home / ".aws" / "sso" / "cache"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{sha1(of.encode()).hexdigest()}.json"
        path.write_text(json.dumps({"accessToken": "login", "expiresAt": after(7200), **more}))
        return path


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    pytest.importorskip("botocore", reason="botocore verifies the signatures, and is not installed")
    # Without a region, botocore requests nothing from a service.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    # botocore determined these folders when it was imported.
    cache = str(tmp_path / ".aws" / "sso" / "cache")
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", cache)
    monkeypatch.setattr("botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", cache)
    with running() as cloud:
        for service in ("STS", "SSO", "SSO_OIDC"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", cloud.url())
        yield Setup(cloud, tmp_path, monkeypatch)


def keys(name: str) -> dict[str, str]:
    return {"aws_access_key_id": name, "aws_secret_access_key": SECRET}


def process(name: str, **more: str) -> str:
    text = json.dumps({"Version": 1, "AccessKeyId": name, "SecretAccessKey": SECRET, **more})
    return f"/bin/echo '{text}'"


# Sources of configuration, with their identities. ----------------------------------------------------

PIECES: dict[str, tuple[Callable[[Setup], object], str]] = {}


def piece(reader: str) -> Callable[[Callable[[Setup], object]], Callable[[Setup], object]]:
    def named(function: Callable[[Setup], object]) -> Callable[[Setup], object]:
        PIECES[function.__name__] = function, reader
        return function

    return named


@piece("VARIABLES")
def variables(setup: Setup) -> None:
    setup.variables(**{name.upper(): value for name, value in keys("VARIABLES").items()})


@piece("FILE")
def credentials_file(setup: Setup) -> None:
    setup.put("credentials", "default", **keys("FILE"))


@piece("CONFIG")
def config_file(setup: Setup) -> None:
    setup.put("config", "default", **keys("CONFIG"))


@piece("PROCESS")
def credential_process(setup: Setup) -> None:
    setup.put("config", "default", credential_process=process("PROCESS"))


@piece("ROLE.reader.BASE")
def role_of_profile(setup: Setup) -> None:
    setup.put("config", "default", role_arn="arn:aws:iam::1:role/reader", source_profile="base")
    setup.put("credentials", "base", **keys("BASE"))


@piece("WEB.pod.identity")
def web_identity_of_variables(setup: Setup) -> None:
    setup.variables(AWS_WEB_IDENTITY_TOKEN_FILE=setup.token(), AWS_ROLE_ARN="arn:aws:iam::1:role/pod")


@piece("WEB.reader.other")
def web_identity_of_profile(setup: Setup) -> None:
    file = setup.token("other")
    setup.put("config", "default", role_arn="arn:aws:iam::1:role/reader", web_identity_token_file=file)


@piece("SSO.42.dev.login")
def sso_session(setup: Setup) -> None:
    setup.put("config", "default", sso_session="corp", sso_account_id="42", sso_role_name="dev")
    setup.put("config", "sso-session corp", sso_start_url="https://c.example/start", sso_region="eu-west-1")
    setup.login("corp")


@piece("CONTAINER.anybody")
def container(setup: Setup) -> None:
    setup.variables(AWS_CONTAINER_CREDENTIALS_FULL_URI=setup.cloud.url("/creds"))


@piece("INSTANCE")
def instance(setup: Setup) -> None:
    setup.patch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    setup.variables(AWS_EC2_METADATA_SERVICE_ENDPOINT=setup.cloud.url())


KNOWN = ("VARIABLES", "FILE", "CONFIG", "PROCESS", "BASE")


def of_botocore(profile: str | None = None) -> str:
    """Return the identity of botocore with the same configuration."""
    from botocore.session import Session

    found = Session(profile=profile).get_credentials()
    return "nobody" if found is None else str(found.get_frozen_credentials().access_key)


@pytest.mark.parametrize("name", PIECES)
def test_s3_sources_authenticate_as_botocore(setup: Setup, name: str) -> None:
    setup.cloud.known(*KNOWN)
    configure, reader = PIECES[name]
    configure(setup)
    assert setup.open() == reader == of_botocore()


@pytest.mark.parametrize("pair", [*combinations(PIECES, 2)], ids="-".join)
def test_s3_pairs_of_sources_authenticate_as_botocore(setup: Setup, pair: tuple[str, str]) -> None:
    setup.cloud.known(*KNOWN)
    for name in pair:
        PIECES[name][0](setup)
    try:
        expected = of_botocore()
    except Exception:
        expected = "error"
    try:
        reader = setup.open()
    except (ingot.OptionError, OSError):
        reader = "error"
    assert reader == expected
    assert setup.cloud.readers == ([] if expected == "error" else [expected])


def test_s3_options_override_all_sources(setup: Setup) -> None:
    setup.cloud.known(*KNOWN, "GIVEN", "WORK")
    for name in ("variables", "credentials_file", "container"):
        PIECES[name][0](setup)
    setup.put("credentials", "work", **keys("WORK"))
    assert setup.open(access_key_id="GIVEN", secret_access_key=SECRET) == "GIVEN"
    assert setup.open(profile="work") == "WORK" == of_botocore("work")
    assert setup.open(anonymous=True) == "nobody"
    setup.variables(AWS_PROFILE="work")
    assert setup.open() == "VARIABLES"
    setup.patch.delenv("AWS_ACCESS_KEY_ID")
    assert setup.open() == "WORK"


def test_s3_token_of_s3fs_is_the_session_token(setup: Setup) -> None:
    setup.cloud.keys["ID"] = (SECRET, "session/of+it==")
    assert setup.open(key="ID", secret=SECRET, token="session/of+it==") == "ID"


# Failures. ---------------------------------------------------------------------------------------------

#: The sources that send requests, with their paths.
ASKED = {
    "role_of_profile": "/",
    "web_identity_of_variables": "/",
    "sso_session": "/federation",
    "container": "/creds",
    "instance": "/latest",
}
ANSWERS: dict[str, Callable[[Handler, Request], None]] = {
    "refused": lambda handler, request: send_text(handler, "<Error><Code>AccessDenied</Code></Error>", 403),
    "missing": lambda handler, request: send_text(handler, "no", 404),
    "broken": lambda handler, request: send_text(handler, "no", 500),
    "useless": lambda handler, request: send_text(handler, "{}"),
    "evil": lambda handler, request: send_text(
        handler, json.dumps({"AccessKeyId": "a\r\nX: b", "SecretAccessKey": "s3cret", "Token": "t"})
    ),
    "echo": lambda handler, request: send_text(handler, json.dumps({"message": str(request.headers)}), 401),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", ASKED)
def test_s3_source_that_fails_is_an_error(setup: Setup, name: str, answer: str) -> None:
    PIECES[name][0](setup)
    setup.cloud.known(*KNOWN)
    # A later source, which must not be used.
    if name != "instance":
        instance(setup)
    setup.cloud.instead[ASKED[name]] = ANSWERS[answer]
    # A machine without a role is anonymous.
    if (name, answer) == ("instance", "missing"):
        assert setup.open() == "nobody"
        return
    with pytest.raises((ingot.SafetensorError, OSError)) as caught:
        setup.open()
    assert setup.cloud.readers == []
    assert "no credentials from " in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "session of" not in str(caught.value).replace("+", " ")
    assert "login" not in str(caught.value).replace("aws sso login", "")
    # botocore's error lacks the status of a machine's service, and has a message instead of the code of SSO.
    if answer == "refused":
        assert isinstance(caught.value, PermissionError)
        assert "AccessDenied" in str(caught.value) or name in ("sso_session", "role_of_profile")
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ({"aws_access_key_id": "x"}, "missing: aws_secret_access_key"),
        ({"role_arn": "arn:r", "credential_source": "Environment"}, "the source Environment failed"),
        (
            {"role_arn": "arn:r", "source_profile": "default", "mfa_serial": "m", **keys("x")},
            "mfa_serial asks for a code",
        ),
        ({"web_identity_token_file": "/none", "role_arn": "arn:r"}, "No such file or directory: /none"),
        ({"credential_process": "echo 'x"}, "ValueError"),
        ({"credential_process": "/bin/false s3cret"}, "the source custom-process failed"),
    ],
    ids=str,
)
def test_s3_incomplete_configuration_is_an_error(setup: Setup, pairs: dict[str, str], why: str) -> None:
    setup.put("config", "default", **pairs)
    with pytest.raises(ingot.SafetensorError, match=why) as caught:
        setup.open()
    assert "s3cret" not in str(caught.value)
    assert setup.cloud.readers == []


def test_s3_profile_must_exist_only_if_named(setup: Setup) -> None:
    setup.put("config", "profile other", credential_process=process("PROCESS"))
    assert setup.open() == "nobody"
    setup.variables(AWS_PROFILE="none")
    with pytest.raises(ingot.SafetensorError, match="the profile `none`: ProfileNotFound"):
        setup.open()


def test_s3_unreadable_files_are_an_error_unless_anonymous(setup: Setup) -> None:
    (setup.home / ".aws").mkdir()
    (setup.home / ".aws" / "credentials").write_bytes(b"[default]\n\xff\n")
    with pytest.raises(ingot.OptionError, match="Unable to parse config file"):
        setup.open()
    assert setup.open(anonymous=True) == "nobody"


# Single sources. ----------------------------------------------------------------------------------------


def test_s3_expired_login_names_the_remedy(setup: Setup) -> None:
    sso_session(setup)
    path = setup.login("corp", expiresAt=after(-1), registrationExpiresAt=after(-1))
    for _ in range(2):
        with pytest.raises(ingot.OptionError, match="aws sso login"):
            setup.open()
        path.unlink(missing_ok=True)
    assert setup.cloud.readers == []


def test_s3_credential_process_runs_once(setup: Setup) -> None:
    script = setup.home / "script"
    script.write_text(f"echo >> {setup.home}/ran\n{process('PROCESS')}")
    setup.cloud.known("PROCESS")
    setup.put("config", "default", credential_process=f"/bin/sh {script}")
    assert [setup.open() for _ in range(3)] == ["PROCESS"] * 3
    assert (setup.home / "ran").read_text() == "\n"


def test_s3_credentials_are_requested_once(setup: Setup) -> None:
    container(setup)
    setup.variables(AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=setup.token("from-the-file"))
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: setup.open(), range(64)))
    assert set(setup.cloud.readers) == {"CONTAINER.from-the-file"}
    asked = [request.path for request in setup.cloud.server.requests if request.path == "/creds"]
    assert asked == ["/creds"]


def test_s3_expiring_credentials_are_refreshed(setup: Setup) -> None:
    given: list[str] = []

    def answer(handler: Handler, request: Request) -> None:
        given.append(f"KEY{len(given)}")
        setup.cloud.keys[given[-1]] = (SECRET, "t")
        issued = {"AccessKeyId": given[-1], "SecretAccessKey": SECRET, "Token": "t", "Expiration": after(60)}
        send_text(handler, json.dumps(issued))

    container(setup)
    setup.cloud.instead["/creds"] = answer
    assert [setup.open(), setup.open()] == given == ["KEY0", "KEY1"]


def test_s3_silent_metadata_service_is_an_error(setup: Setup) -> None:
    instance(setup)
    setup.variables(AWS_EC2_METADATA_SERVICE_ENDPOINT=f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(ingot.StorageError, match="AWS_EC2_METADATA_DISABLED=true") as caught:
        setup.open()
    assert caught.value.code == "no-credentials"
    assert setup.open(anonymous=True) == "nobody"


def test_s3_requester_pays_is_signed(setup: Setup) -> None:
    setup.cloud.known("VARIABLES")
    variables(setup)
    paid = [
        ({"request_payer": True}, None),
        ({"request_payer": "requester"}, None),
        ({"requester_pays": True}, None),
        ({}, "requester"),
        ({"anonymous": True, "request_payer": True}, None),
    ]
    for options, variable in paid:
        if variable:
            setup.variables(AWS_REQUEST_PAYER=variable)
        setup.open(**options)
        asked = setup.cloud.server.requests[-1].headers
        assert asked["x-amz-request-payer"] == "requester"
    setup.open(request_payer=False)
    assert "x-amz-request-payer" not in setup.cloud.server.requests[-1].headers


def test_s3_endpoints_equal_botocores(setup: Setup) -> None:
    from botocore.session import Session

    setup.cloud.known("FILE")
    credentials_file(setup)
    setup.patch.delenv("AWS_DEFAULT_REGION")
    nowhere = "http://127.0.0.1:9"

    def reads() -> bool:
        of_botocore = Session().create_client("s3", region_name="us-east-1").meta.endpoint_url
        assert of_botocore in (nowhere, setup.cloud.url())
        try:
            ingot.safe_open("s3://b/k", "np", storage_options={"retries": 0})
        except ingot.StorageError:
            assert of_botocore == nowhere
            return False
        assert of_botocore == setup.cloud.url()
        return True

    setup.put("config", "default", endpoint_url=setup.cloud.url(), region="eu-west-3")
    assert reads()
    setup.put("config", "default", s3="\n  endpoint_url = http://127.0.0.1:9")
    assert reads(), "of a setting below another"
    setup.put("config", "default", services="local")
    with pytest.raises(ingot.OptionError, match="services local"):
        setup.open(endpoint=None)
    setup.put("config", "services local", s3=f"\n  endpoint_url = {nowhere}", sts="\n  endpoint_url = x")
    assert not reads()
    setup.variables(AWS_ENDPOINT_URL=setup.cloud.url())
    assert reads()
    setup.variables(AWS_ENDPOINT_URL_S3=nowhere)
    assert not reads()
    scope = setup.cloud.server.requests[-1].headers["authorization"]
    assert "/eu-west-3/s3/" in scope
