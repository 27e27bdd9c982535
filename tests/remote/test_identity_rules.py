"""The identity of a request: after redirects, through proxies, after a rejection, and with empty tokens."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.servers import Answer, Handler, Request, Server, good, serving

TENSORS = {f"t{number}": np.full(300_000, number, np.uint8) for number in range(3)}
DATA = ingot.numpy.save(TENSORS)
QUICK = {"retries": 0, "timeout": 20}


def answered(handler: Handler, text: str, status: int = 200, **headers: str) -> None:
    kind = "application/json" if text.startswith("{") else "text/plain"
    handler.head(status, Content_Length=len(text), Content_Type=kind, **headers)
    handler.body(text.encode())


def sent(server: Server) -> list[tuple[str, str | None]]:
    """Return the path and the identity of each request."""
    return [(request.path, request.headers.get("authorization")) for request in server.requests]


BASIC = "Basic " + base64.b64encode(b"me:p@w").decode()


def redirecting(location: str) -> Answer:
    """Redirect from /old, and serve the file at every other path."""

    def answer(handler: Handler, request: Request) -> None:
        if request.path.endswith("/old"):
            handler.head(302, Location=location.replace("HERE", handler.headers["host"]), Content_Length=0)
        else:
            handler.part(DATA, request, ETag='"v1"')

    return answer


@pytest.mark.parametrize(
    "location", ["/new", "new", "http://HERE/new", "//HERE/new", "http://evil:x@HERE/new"]
)
def test_redirect_on_its_host_keeps_the_user_of_a_url(location: str) -> None:
    with serving(redirecting(location)) as server:
        url = server.url("/old").replace("http://", "http://me:p%40w@")
        assert len(ingot.numpy.load_file(url, storage_options=QUICK)) == 3
        assert {identity for _, identity in sent(server)} == {BASIC}


@pytest.mark.parametrize("location", ["http://evil:x@HERE/new", "//evil:x@HERE/new"])
def test_redirect_user_of_a_server_is_never_sent(location: str) -> None:
    with serving(redirecting(location)) as server:
        ingot.numpy.load_file(server.url("/old"), storage_options=QUICK)
        assert {identity for _, identity in sent(server)} == {None}
    with serving(good(DATA)) as other, serving(redirecting(other.url("/new"))) as server:
        url = server.url("/old").replace("http://", "http://me:pw@")
        options = {**QUICK, "allow_private_redirects": True}
        ingot.numpy.load_file(url, storage_options=options)
        assert {identity for _, identity in sent(other)} == {None}


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(good(DATA)) as server:
        monkeypatch.setenv("http_proxy", server.url(""))
        yield server


STORE = "http://store.example"
SAS = "sv=1&sig=SECRET"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"{STORE}/m?X-Amz-Credential=A&X-Amz-Signature=SECRET", {}),
        (f"{STORE}/m?X-Goog-Signature=SECRET", {}),
        (f"{STORE}/m?Expires=1&Signature=SECRET&Key-Pair-Id=K", {}),
        (f"{STORE}/m?{SAS}", {}),
        (f"{STORE}/m?download=true&access_token=SECRET", {}),
        (f"{STORE}/m?SECRET", {}),
        ("az://c/b", {"account": "acct", "endpoint": STORE, "sas_token": SAS}),
        (
            "az://c/b",
            {"connection_string": f"AccountName=acct;BlobEndpoint={STORE};SharedAccessSignature={SAS}"},
        ),
        (f"az://c/b?{SAS}", {"account": "acct", "endpoint": STORE, "anonymous": True}),
        (f"http://me:SECRET@{STORE[7:]}/m", {}),
        (f"{STORE}/m", {"token": "SECRET"}),
    ],
)
def test_http_proxy_reads_no_credential(proxy: Server, url: str, options: dict[str, object]) -> None:
    with pytest.raises(ingot.OptionError) as caught:
        ingot.numpy.load_file(url, storage_options={**QUICK, **options})
    assert "SECRET" not in str(caught.value)
    assert proxy.requests == []


@pytest.mark.parametrize("query", ["", "?download=true", "?versionId=1&generation=2"])
def test_http_proxy_is_used_without_secrets(proxy: Server, query: str) -> None:
    assert len(ingot.numpy.load_file(f"{STORE}/m{query}", storage_options=QUICK)) == 3


def test_http_proxy_reads_no_signed_redirect(proxy: Server) -> None:
    proxy.replace(redirecting("http://signed.example/m?X-Amz-Signature=SECRET"))
    with pytest.raises(ingot.OptionError):
        ingot.numpy.load_file(f"{STORE}/old", storage_options=QUICK)
    assert not any("SECRET" in request.path for request in proxy.requests)


class Store:
    """A store that accepts valid tokens or keys only, and a service that issues them."""

    def __init__(self, refusal: tuple[int, str]) -> None:
        self.refusal = refusal
        self.issued = 0
        self.valid: set[str] = set()

    def identity(self) -> str:
        self.issued += 1
        self.valid.add(f"identity-{self.issued}")
        return f"identity-{self.issued}"

    def token(self, handler: Handler, request: Request) -> None:
        if not request.path.partition("?")[0].endswith("/token"):
            answered(handler, json.dumps({"email": "default", "scopes": []}), Metadata_Flavor="Google")
            return
        answer = {"access_token": self.identity(), "expires_in": 3600, "token_type": "Bearer"}
        answered(handler, json.dumps(answer), Metadata_Flavor="Google")

    def keys(self, handler: Handler, request: Request) -> None:
        keys = {"AccessKeyId": self.identity(), "SecretAccessKey": "s", "Token": "t"}
        answered(handler, json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}))

    def file(self, handler: Handler, request: Request) -> None:
        identity = request.headers.get("authorization", "")
        if any(f"{valid}/" in f"{identity}/" for valid in self.valid):
            handler.part(DATA, request, ETag='"v1"')
        else:
            status, code = self.refusal
            answered(handler, f"<Error><Code>{code}</Code></Error>", status)


KEY_REFUSALS = [
    (400, "ExpiredToken"),
    (403, "InvalidAccessKeyId"),
    (400, "TokenRefreshRequired"),
    (401, "No"),
]


@pytest.mark.parametrize(
    ("url", "refusal"),
    [("gs://b/k", (401, "Refused")), *(("s3://b/k", refusal) for refusal in KEY_REFUSALS)],
)
def test_refused_identity_is_requested_again(
    monkeypatch: pytest.MonkeyPatch, url: str, refusal: tuple[int, str]
) -> None:
    store = Store(refusal)
    issue = store.token if url.startswith("gs:") else store.keys
    with serving(issue) as service, serving(store.file) as server:
        host = service.url("").removeprefix("http://")
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.delenv("NO_GCE_CHECK")
        # google-auth reads the variable when it is imported.
        pytest.importorskip("google.auth", reason="google-auth is not installed")
        monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds"))
        options = {**QUICK, "endpoint": server.url("")}
        file = ingot.safe_open(url, "np", storage_options=options)
        assert (file["t1"] == 1).all()
        store.valid.clear()
        assert (file["t2"] == 2).all()
        store.valid.clear()
        assert len(ingot.numpy.load_file(url, storage_options=options)) == 3
        assert store.issued == 3
        # If a new token is rejected, ingot requests no further one.
        server.replace(lambda handler, request: answered(handler, "", 401))
        with pytest.raises(PermissionError):
            ingot.safe_open(url, "np", storage_options=options)
        assert store.issued == 4


def test_refused_identity_is_renewed_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store((401, "Refused"))
    together = threading.Barrier(8)

    def file(handler: Handler, request: Request) -> None:
        # All requests have the old identity, and are sent before the first one is rejected.
        if not store.valid and request.range[0] > 0:
            together.wait(30)
        store.file(handler, request)

    with serving(store.keys) as service, serving(file) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds"))
        opened = ingot.safe_open("s3://b/k", "np", storage_options={**QUICK, "endpoint": server.url("")})
        store.valid.clear()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: int(opened["t2"][0]), range(8)))
        assert found == [2] * 8
        assert store.issued == 2


def test_refusal_for_another_reason_renews_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store((403, "AccessDenied"))
    with serving(store.keys) as service, serving(store.file) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds"))
        file = ingot.safe_open("s3://b/k", "np", storage_options={**QUICK, "endpoint": server.url("")})
        store.valid.clear()
        with pytest.raises(ingot.StorageError, match="AccessDenied"):
            file["t2"]
        assert store.issued == 1


@pytest.mark.parametrize("status", [400, 401, 403])
def test_signed_address_with_expired_keys_is_requested_again(status: int) -> None:
    valid = {1}

    def answer(handler: Handler, request: Request) -> None:
        if request.path == "/old":
            handler.head(302, Location=f"/signed?sig={max(valid)}", Content_Length=0)
        elif int(request.path.rpartition("=")[2]) in valid:
            handler.part(DATA, request, ETag='"v1"')
        else:
            answered(handler, "<Error><Code>ExpiredToken</Code></Error>", status)

    with serving(answer) as server:
        file = ingot.safe_open(server.url("/old"), "np", storage_options=QUICK)
        assert (file["t1"] == 1).all()
        valid.clear()
        valid.add(2)
        assert (file["t2"] == 2).all()


EMPTY = ["", " ", "\n"]


@pytest.mark.parametrize("empty", EMPTY)
def test_empty_session_token_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: str) -> None:
    keys = {"AccessKeyId": "K", "SecretAccessKey": "s", "Token": empty, "Expiration": "2099-01-01T00:00:00Z"}
    pair = {"access_key_id": "K", "secret_access_key": "s"}
    with serving(good(DATA)) as server:

        def requested(**options: object) -> list[dict[str, str]]:
            server.requests.clear()
            ingot.safe_open(
                "s3://b/k", "np", storage_options={**QUICK, "endpoint": server.url(""), **options}
            )
            return [request.headers for request in server.requests]

        found = [requested(**pair, session_token=empty)]
        with monkeypatch.context() as set_up:
            set_up.setenv("AWS_ACCESS_KEY_ID", "K")
            set_up.setenv("AWS_SECRET_ACCESS_KEY", "s")
            set_up.setenv("AWS_SESSION_TOKEN", empty)
            found.append(requested())
        with monkeypatch.context() as set_up:
            credentials = tmp_path / "credentials"
            credentials.write_text(
                f"[default]\naws_access_key_id=K\naws_secret_access_key=s\naws_session_token={empty}\n"
            )
            set_up.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
            found.append(requested())
        with serving(lambda handler, request: answered(handler, json.dumps(keys))) as service:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url("/creds"))
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", empty)
            found.append(requested())
            assert "authorization" not in service.requests[0].headers
        for headers in found:
            assert all("Credential=K/" in header["authorization"] for header in headers)
            assert not any("x-amz-security-token" in header for header in headers)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("URL", "token"),
        ("gs://b/k", "token"),
        ("az://c/b", "token"),
        ("az://c/b", "sas_token"),
        ("az://c/b", "account_key"),
        ("az://c/b", "client_secret"),
        ("az://c/b", "connection_string"),
        ("hf://me/model/m.safetensors", "token"),
    ],
)
def test_empty_credential_is_absent(url: str, option: str, empty: str) -> None:
    with serving(good(DATA)) as server:
        options = {**QUICK, option: empty}
        if url == "URL":
            url = server.url()
        else:
            options["endpoint"] = server.url("")
        if url.startswith("az:"):
            options["account"] = "acct"
        ingot.safe_open(url, "np", storage_options=options)
        assert {identity for _, identity in sent(server)} == {None}
        assert not any("?" in path for path, _ in sent(server))


@pytest.mark.parametrize("value", ["a  b", " a\t b ", "a b", "a   b  c"])
def test_headers_with_several_spaces_are_signed_as_botocore_does(value: str) -> None:
    pytest.importorskip("botocore", reason="botocore is not installed")
    from support.clouds import running

    with running() as cloud:
        cloud.known("K")
        secret, _ = cloud.keys["K"]
        options = {
            **QUICK,
            "endpoint": cloud.url(),
            "access_key_id": "K",
            "secret_access_key": secret,
            "headers": {"x-amz-meta-note": value},
        }
        ingot.safe_open("s3://b/k", "np", storage_options=options)
        assert set(cloud.readers) == {"K"}


def test_errors_show_no_query() -> None:
    secret = "se+cret/of=it"
    echoes = [
        secret,
        secret.replace("+", " "),
        quote(secret, safe=""),
        quote(quote(secret, safe=""), safe=""),
    ]
    echoes += [secret.replace("/", "\\/"), secret.replace("+", "&#43;"), secret.replace("=", "\\u003d")]
    for echo in echoes:
        for given in (secret, quote(secret, safe="")):

            def answer(handler: Handler, request: Request, echo: str = echo) -> None:
                answered(handler, f"<Code>bad {echo}</Code>", 403, X_Error_Message=f"no {echo} here")

            with serving(answer) as server, pytest.raises(PermissionError) as caught:
                ingot.safe_open(server.url(f"/m?sig={given}"), "np", storage_options=QUICK)
            text = str(caught.value)
            assert "no … here" in text, (echo, text)
            assert "cret" not in text.replace("secrets", ""), (echo, text)
