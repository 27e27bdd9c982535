"""Who a caller is to S3: whoever botocore is, set up in the same way, and never somebody else."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1
from pathlib import Path

import pytest

import ingot
from support.clouds import SECRET, Cloud, after, running, told
from support.ctrl_c import interrupted
from support.servers import Handler, Request

#: Variables that say who a caller is, or how services are reached.
PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "GS_", "GCE_", "CLOUDSDK_", "IDENTITY_", "NO_GCE", "HTTP", "http")


class Setup:
    """What is configured for a test: variables and the two files."""

    def __init__(self, cloud: Cloud, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.cloud, self.home, self.patch = cloud, home, patch
        self.files: dict[str, dict[str, dict[str, str]]] = {"config": {}, "credentials": {}}

    def variables(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

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

    def open(self, **options: object) -> str:
        """Open a file; gives who has read it."""
        given = {"endpoint": self.cloud.url(), "retries": 0, **options}
        ingot.safe_open("s3://b/k", "np", storage_options=given)
        return self.cloud.readers[-1]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    pytest.importorskip("botocore", reason="botocore verifies the signatures, and is not installed")
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # botocore asks no service without one.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    # Folders that botocore has looked up when it was imported.
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


# Where it is configured, and who reads then. ----------------------------------------------------------

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


@piece("ROLE.reader.BASE")
def chain_of_roles(setup: Setup) -> None:
    setup.put("config", "default", role_arn="arn:aws:iam::1:role/reader", source_profile="middle")
    setup.put("config", "profile middle", **keys("BASE"), role_arn="arn:aws:iam::1:role/not-taken")


@piece("ROLE.reader.ROLE.middle.BASE")
def roles_of_roles(setup: Setup) -> None:
    setup.put("config", "default", role_arn="arn:aws:iam::1:role/reader", source_profile="between")
    setup.put("config", "profile between", role_arn="arn:aws:iam::1:role/middle", source_profile="base")
    setup.put("credentials", "base", **keys("BASE"))


@piece("ROLE.reader.OWN")
def role_of_itself(setup: Setup) -> None:
    role = {"role_arn": "arn:aws:iam::1:role/reader", "source_profile": "default"}
    setup.put("config", "default", **role, **keys("OWN"))


@piece("ROLE.reader.INSTANCE")
def role_of_a_machine(setup: Setup) -> None:
    instance(setup)
    role = {"role_arn": "arn:aws:iam::1:role/reader", "credential_source": "Ec2InstanceMetadata"}
    setup.put("config", "default", **role)


@piece("ROLE.reader.VARIABLES")
def role_of_variables(setup: Setup) -> None:
    # The keys of the environment are more than a profile, unless that is named by the caller.
    variables(setup)
    role = {"role_arn": "arn:aws:iam::1:role/reader", "credential_source": "Environment"}
    setup.put("config", "profile named", **role)


@piece("ROLE.reader.PROCESS")
def role_of_a_process(setup: Setup) -> None:
    setup.put("config", "default", role_arn="arn:aws:iam::1:role/reader", source_profile="tool")
    setup.put("config", "profile tool", credential_process=process("PROCESS"))


@piece("ROLE.reader.named..BASE")
def role_with_a_name(setup: Setup) -> None:
    role_of_profile(setup)
    setup.put("config", "default", role_session_name="named", duration_seconds="900")


KNOWN = ("VARIABLES", "FILE", "CONFIG", "PROCESS", "BASE", "OWN")
#: The file of a process has no session; what stands here has profiles of its own.
COMBINED = [name for name in PIECES if name != "role_of_variables"]


def of_botocore(profile: str | None = None) -> str:
    """Who botocore is, set up in the same way."""
    from botocore.session import Session

    found = Session(profile=profile).get_credentials()
    return "nobody" if found is None else str(found.get_frozen_credentials().access_key)


@pytest.mark.parametrize("name", PIECES)
def test_each_source_lets_in_who_botocore_is(setup: Setup, name: str) -> None:
    setup.cloud.known(*KNOWN)
    configure, reader = PIECES[name]
    configure(setup)
    options = {"profile": "named"} if name == "role_of_variables" else {}
    assert setup.open(**options) == reader
    assert of_botocore(*options.values()) == reader


@pytest.mark.parametrize("seed", range(60))
def test_of_several_sources_the_one_is_used_that_botocore_uses(setup: Setup, seed: int) -> None:
    setup.cloud.known(*KNOWN)
    chosen = random.Random(seed).sample(COMBINED, k=random.Random(seed).randint(2, 5))
    for name in chosen:
        PIECES[name][0](setup)
    try:
        expected = of_botocore()
    except Exception:
        expected = "error"
    try:
        reader = setup.open()
    except (ingot.OptionError, OSError):
        reader = "error"
    assert reader == expected, chosen
    assert setup.cloud.readers == ([] if expected == "error" else [expected])


def test_what_the_caller_gives_is_more_than_all_else(setup: Setup) -> None:
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


def test_the_token_of_s3fs_is_that_of_a_session(setup: Setup) -> None:
    setup.cloud.keys["ID"] = (SECRET, "session/of+it==")
    assert setup.open(key="ID", secret=SECRET, token="session/of+it==") == "ID"


# What fails. ---------------------------------------------------------------------------------------------

#: Each source that asks somebody, with where it asks.
ASKED = {
    "role_of_profile": "/",
    "web_identity_of_variables": "/",
    "sso_session": "/federation",
    "container": "/creds",
    "instance": "/latest",
    "role_of_a_machine": "/latest",
}
ANSWERS: dict[str, Callable[[Handler, Request], None]] = {
    "refused": lambda handler, request: told(handler, "<Error><Code>AccessDenied</Code></Error>", 403),
    "missing": lambda handler, request: told(handler, "no", 404),
    "broken": lambda handler, request: told(handler, "no", 500),
    "useless": lambda handler, request: told(handler, "{}"),
    "evil": lambda handler, request: told(
        handler, json.dumps({"AccessKeyId": "a\r\nX: b", "SecretAccessKey": "s3cret", "Token": "t"})
    ),
    "echo": lambda handler, request: told(handler, json.dumps({"message": str(request.headers)}), 401),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", ASKED)
def test_a_source_that_fails_is_the_error_and_nobody_else_is_tried(
    setup: Setup, name: str, answer: str
) -> None:
    PIECES[name][0](setup)
    setup.cloud.known(*KNOWN)
    # A later source, which is not asked.
    if name != "instance" and "machine" not in name:
        instance(setup)
    setup.cloud.instead[ASKED[name]] = ANSWERS[answer]
    # A machine that has no role is nobody.
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
    # botocore has no status of the services of machines, and a message in place of the code of SSO.
    if answer == "refused" and name != "role_of_a_machine":
        assert isinstance(caught.value, PermissionError)
        assert "AccessDenied" in str(caught.value) or name in ("sso_session", "role_of_profile")
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("section", "pairs", "why"),
    [
        ("default", {"aws_access_key_id": "x"}, "missing: aws_secret_access_key"),
        ("default", {"role_arn": "arn:r"}, "missing: source_profile or credential_source"),
        ("default", {"role_arn": "arn:r", "source_profile": "default"}, "InfiniteLoopConfigError"),
        ("default", {"role_arn": "arn:r", "source_profile": "none"}, "does not exist"),
        ("default", {"role_arn": "arn:r", "credential_source": "Sky"}, "is not valid"),
        (
            "default",
            {"role_arn": "arn:r", "credential_source": "Environment"},
            "the source Environment failed",
        ),
        (
            "default",
            {"role_arn": "arn:r", "source_profile": "default", "mfa_serial": "m", **keys("x")},
            "mfa_serial asks for a code",
        ),
        ("default", {"web_identity_token_file": "/none"}, "has no role ARN"),
        (
            "default",
            {"web_identity_token_file": "/none", "role_arn": "arn:r"},
            "No such file or directory: /none",
        ),
        (
            "default",
            {"sso_account_id": "1", "sso_role_name": "r"},
            "missing required configuration: sso_start_url",
        ),
        ("default", {"login_session": "x"}, "MissingDependency"),
        ("default", {"credential_process": "echo 'x"}, "ValueError"),
        (
            "default",
            {"credential_process": '/none/program "s3cret"'},
            "No such file or directory: /none/program",
        ),
        ("default", {"credential_process": "/bin/false s3cret"}, "the source custom-process failed"),
        ("default", {"credential_process": "/bin/echo {}"}, "the source custom-process failed"),
        ("profile other", {"credential_process": "/bin/echo {}"}, None),
    ],
    ids=str,
)
def test_what_is_set_up_by_half_is_an_error(
    setup: Setup, section: str, pairs: dict[str, str], why: str | None
) -> None:
    setup.put("config", section, **pairs)
    if why is None:
        assert setup.open() == "nobody"
        setup.variables(AWS_PROFILE="none")
        why = r"the profile `none`: ProfileNotFound"
    with pytest.raises(ingot.SafetensorError, match=why) as caught:
        setup.open()
    assert "s3cret" not in str(caught.value)
    assert setup.cloud.readers in ([], ["nobody"])


def test_roles_that_lead_back_are_an_error(setup: Setup) -> None:
    for name, source in (("default", "a"), ("profile a", "b"), ("profile b", "a")):
        setup.put("config", name, role_arn="arn:r", source_profile=source)
    with pytest.raises(ingot.OptionError, match="InfiniteLoopConfigError"):
        setup.open()


def test_files_that_cannot_be_read_are_an_error_but_for_anybody(setup: Setup) -> None:
    (setup.home / ".aws").mkdir()
    (setup.home / ".aws" / "credentials").write_bytes(b"[default]\n\xff\n")
    with pytest.raises(ingot.OptionError, match="Unable to parse config file"):
        setup.open()
    assert setup.open(anonymous=True) == "nobody"


# What is peculiar to one of them. ------------------------------------------------------------------------


def test_a_login_is_renewed_and_kept_for_other_tools(setup: Setup) -> None:
    sso_session(setup)
    client = {"clientId": "c", "clientSecret": "of-the-client", "registrationExpiresAt": after(9999)}
    path = setup.login("corp", expiresAt=after(60), refreshToken="r1", **client)
    assert setup.open() == "SSO.42.dev.renewed-r1"
    kept = json.loads(path.read_text())
    assert (kept["accessToken"], kept["refreshToken"]) == ("renewed-r1", "next")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert of_botocore() == "SSO.42.dev.renewed-r1"


def test_a_login_that_is_not_renewed_is_good_to_its_end(setup: Setup) -> None:
    sso_session(setup)
    setup.login("corp", expiresAt=after(600))
    assert setup.open() == "SSO.42.dev.login" == of_botocore()
    setup.put("config", "default", sso_role_name="other")
    client = {"clientId": "c", "clientSecret": "is-wrong", "registrationExpiresAt": after(9999)}
    setup.login("corp", expiresAt=after(600), refreshToken="r1", **client)
    assert setup.open() == "SSO.42.other.login" == of_botocore()
    setup.login("corp", expiresAt=after(-1), refreshToken="r1", **client)
    setup.put("config", "default", sso_role_name="third")
    with pytest.raises(ingot.OptionError, match="aws sso login") as caught:
        setup.open()
    assert "is-wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "more", [{}, {"refreshToken": "r", "clientId": "c", "clientSecret": "of-the-client"}]
)
def test_a_login_that_is_over_says_what_to_do(setup: Setup, more: dict[str, str]) -> None:
    sso_session(setup)
    path = setup.login("corp", expiresAt=after(-1), registrationExpiresAt=after(-1), **more)
    for _ in range(2):
        with pytest.raises(ingot.OptionError, match="aws sso login"):
            setup.open()
        path.unlink(missing_ok=True)
    assert setup.cloud.readers == []


def test_a_login_of_the_old_kind(setup: Setup) -> None:
    old = {"sso_start_url": "https://c.example/start", "sso_region": "eu-west-1"}
    setup.put("config", "default", sso_account_id="42", sso_role_name="dev", **old)
    setup.login(old["sso_start_url"], expiresAt=after(600).replace("Z", "UTC"))
    assert setup.open() == "SSO.42.dev.login" == of_botocore()


def test_a_process_is_given_its_words_and_is_run_once(setup: Setup) -> None:
    setup.cloud.known("x y.'z'")
    script = setup.home / "my tools.py"
    script.write_text(
        "import json, sys\n"
        "open(sys.argv[1], 'a').write(json.dumps(sys.argv[2:]) + '\\n')\n"
        f"print(json.dumps(dict(Version=1, AccessKeyId='TOOL', SecretAccessKey={SECRET!r})))\n"
    )
    seen = setup.home / "seen"
    words = """'a  b' "c \\" d" e\\ f "$HOME" ''"""
    setup.cloud.known("TOOL")
    setup.put("config", "default", credential_process=f'{sys.executable} "{script}" {seen} {words}')
    for _ in range(3):
        assert setup.open() == "TOOL"
    assert [json.loads(line) for line in seen.read_text().splitlines()] == [
        ["a  b", 'c " d', "e f", "$HOME", ""]
    ]
    assert of_botocore() == "TOOL"
    lines = seen.read_text().splitlines()
    assert lines[0] == lines[-1]


@pytest.fixture
def endless(setup: Setup) -> Iterator[None]:
    """A process that does not end by itself. It belongs to botocore, which waits for it on its own thread."""
    file = setup.home / "pid"
    setup.put("config", "default", credential_process=f"/bin/sh -c 'echo $$ > {file}; exec sleep 600'")
    yield
    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("endless")
def test_a_process_that_does_not_end_is_left_at_the_deadline(setup: Setup) -> None:
    begun = time.monotonic()
    with pytest.raises(ingot.StorageError, match="the provider did not answer"):
        setup.open(timeout=2)
    assert time.monotonic() - begun < 60


@pytest.mark.usefixtures("endless")
def test_ctrl_c_leaves_a_process(setup: Setup) -> None:
    begun = time.monotonic()
    with interrupted():
        setup.open()
    assert time.monotonic() - begun < 30


def test_ctrl_c_ends_a_question_for_keys(setup: Setup) -> None:
    over = threading.Event()
    container(setup)
    setup.cloud.instead["/creds"] = lambda handler, request: over.wait(60)
    begun = time.monotonic()
    try:
        with interrupted():
            setup.open()
        assert time.monotonic() - begun < 30
    finally:
        over.set()


def test_the_keys_of_many_files_are_asked_for_once(setup: Setup) -> None:
    container(setup)

    def open_one(_: int) -> None:
        setup.open()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(open_one, range(64)))
    asked = [request.path for request in setup.cloud.server.requests if request.path == "/creds"]
    assert asked == ["/creds"]


def test_who_asks_pays_under_the_signature(setup: Setup) -> None:
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


def test_endpoints_come_from_where_amazons_tools_have_them(setup: Setup) -> None:
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
