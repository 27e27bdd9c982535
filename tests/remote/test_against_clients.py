"""Requests compared with other clients: addresses and signatures of stores, `no_proxy`, redirects."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support.proxies import certificate
from support.servers import Handler, Request, Server, good, serving

DATA = ingot.numpy.save({"a": np.arange(5)})
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
AZURE_KEY = b64encode(SECRET.encode()).decode()
AZURE = "http://me.blob.example"
#: No pauses that a test would wait for.
QUICK = {"retries": 0, "connect_timeout": 2, "timeout": 5}


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run a proxy for every host. It serves the same file for every URL."""
    with serving(good(DATA)) as server:
        monkeypatch.setenv("http_proxy", server.url(""))
        yield server


PIECES = [
    *"aZ09-._~/!*'()&$@=;:+, %\"<>\\^`{|}[]",
    "ü",
    "日本",
    "e\u0301",
    "🦀",
    "//",
    "/./",
    "/../",
    "%2F",
    "%20",
    "%zz",
]


def keys() -> list[str]:
    dice = random.Random(5)
    made = ("".join(dice.choices(PIECES, k=dice.randint(1, 12))) for _ in range(1000))
    return [f"{key}.safetensors" for key in made]


@pytest.mark.parametrize("path_style", [True, False])
def test_s3_signature_equals_botocores(proxy: Server, path_style: bool) -> None:
    auth = pytest.importorskip("botocore.auth", reason="botocore is not installed")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials
    from botocore.utils import percent_encode

    signer = auth.S3SigV4Auth(Credentials("AKIDEXAMPLE", SECRET), "s3", "eu-central-1")
    options = {
        **QUICK,
        "endpoint": "http://s3.example",
        "region": "eu-central-1",
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": SECRET,
        "path_style": path_style,
    }
    base = "http://s3.example/models/" if path_style else "http://models.s3.example/"
    # Half of the keys each, so that together they are a thousand.
    for key in keys()[path_style::2]:
        proxy.requests.clear()
        ingot.safe_open(f"s3://models/{key}", "np", storage_options=options)
        assert proxy.requests
        for request in proxy.requests:
            # The address that botocore makes of a key, and its signature of the headers that were sent.
            assert request.path == base + percent_encode(key, safe="/~"), key
            said = request.headers["authorization"]
            signed = re.search("SignedHeaders=([^,]*)", said)[1].split(";")
            assert {"host", "range"} <= {*signed, "range"}
            asked = AWSRequest("GET", request.path, headers={name: request.headers[name] for name in signed})
            time = request.headers["x-amz-date"]
            datetime.strptime(time, "%Y%m%dT%H%M%SZ")
            asked.context["timestamp"] = time
            text = signer.string_to_sign(asked, signer.canonical_request(asked))
            assert said.endswith(f"Signature={signer.signature(text, asked)}"), key


def test_azure_signature_equals_the_sdks(proxy: Server) -> None:
    blobs = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    from azure.core.pipeline import PipelineContext, PipelineRequest
    from azure.core.pipeline.transport import HttpRequest
    from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy

    signer = SharedKeyCredentialPolicy("me", AZURE_KEY)
    options = {**QUICK, "endpoint": AZURE, "account": "me", "account_key": AZURE_KEY}
    for key in keys():
        proxy.requests.clear()
        ingot.safe_open(f"az://models/{key}", "np", storage_options=options)
        url = blobs.BlobClient(AZURE, "models", key).url
        assert proxy.requests
        for request in proxy.requests:
            assert request.path == url, key
            headers = dict(request.headers)
            said = headers.pop("authorization")
            datetime.strptime(headers["x-ms-date"], "%a, %d %b %Y %H:%M:%S GMT")
            # The client of Azure sends `x-ms-range`, and takes the value that it signs for `Range` from an
            # entry
            # `byte_range`.
            headers["byte_range"] = headers.pop("range")
            asked = HttpRequest("GET", url, headers=headers)
            signer.on_request(PipelineRequest(asked, PipelineContext(None)))
            assert asked.headers["Authorization"] == said, key


def test_azure_signed_query_is_sent_unchanged() -> None:
    blobs = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    late = datetime(2099, 1, 1, tzinfo=UTC)
    # Without a proxy, which would parse the query.
    with serving(good(DATA)) as server:
        for key in keys()[:200]:
            signed = blobs.generate_blob_sas(
                "me", "models", key, account_key=AZURE_KEY, permission="r", expiry=late
            )
            server.requests.clear()
            options = {**QUICK, "endpoint": server.url(""), "account": "me", "sas_token": signed}
            ingot.safe_open(f"az://models/{key}", "np", storage_options=options)
            url = blobs.BlobClient(server.url(""), "models", key, credential=signed).url
            assert signed in url
            assert {server.url(request.path) for request in server.requests} == {url}, key
            assert not any("authorization" in request.headers for request in server.requests)


def test_gcs_addresses_equal_those_of_google(proxy: Server) -> None:
    storage = pytest.importorskip("google.cloud.storage", reason="google-cloud-storage is not installed")
    from google.auth.credentials import AnonymousCredentials

    endpoint = "http://gs.example"
    client = storage.Client("none", AnonymousCredentials(), client_options={"api_endpoint": endpoint})
    bucket = client.bucket("models")
    options = {**QUICK, "endpoint": endpoint, "anonymous": True}
    for key in keys():
        proxy.requests.clear()
        ingot.safe_open(f"gs://models/{key}", "np", storage_options=options)
        assert {request.path for request in proxy.requests} == {bucket.blob(key).public_url}, key
    client.close()


def test_redirects_drop_authorization_as_requests_does(tmp_path: Path) -> None:
    requests = pytest.importorskip("requests", reason="requests is not installed")
    cert = certificate(tmp_path)
    options = {
        **QUICK,
        "headers": {"Authorization": "Bearer hunter2"},
        "allow_private_redirects": True,
        "ca_file": str(cert.path),
    }
    there = ""

    def answer(handler: Handler, request: Request) -> None:
        if request.path == "/old":
            handler.head(302, Location=there, Content_Length=0)
        else:
            handler.part(DATA, request, ETag='"v1"')

    with serving(answer) as plain, serving(answer) as other, serving(answer, tls=cert.context) as safe:
        servers = [("http", plain), ("http", other), ("https", safe)]
        places = [
            (server, f"{scheme}://{host}:{server.port}")
            for scheme, server in servers
            for host in ("127.0.0.1", "localhost", "LOCALHOST")
        ]
        kept = 0
        for (_, old), (server, new) in itertools.product(places, places):
            there = f"{new}/new"
            server.requests.clear()
            # From https: to http: is refused.
            with suppress(OSError):
                ingot.safe_open(f"{old}/old", "np", storage_options=options)
            reached = [request for request in server.requests if request.path == "/new"]
            is_downgrade = old.startswith("https:") and new.startswith("http:")
            assert bool(reached) != is_downgrade, (old, new)
            is_kept = any("authorization" in request.headers for request in reached)
            with requests.Session() as session:
                is_stripped = session.should_strip_auth(f"{old}/old", there)
            assert not (is_kept and is_stripped), (old, new)
            assert is_kept or old != new, old
            kept += is_kept
    # Credentials are kept at least for a redirect to the same place, and to the same name in other letters.
    assert kept >= len(places)


#: Entries of `no_proxy` that apply here and not in curl, with the reason. All entries that apply in curl
#: apply here.
WIDER = {
    "*,b.invalid": "Go reads a * among others",
    "0.0.0.0/0": "Go reads a network of no bits, which curl takes for one address",
    "a.invalid:80": "requests and Go read a port",
    "10.0.0.1:80": "requests and Go read a port",
}
WORDS = [
    "a.invalid",
    ".a.invalid",
    "A.INVALID",
    "a.invalid.",
    "invalid",
    ".invalid",
    "b.invalid",
    "xa.invalid",
    "x.a.invalid",
    "a.invalid,b.invalid",
    "b.invalid, a.invalid",
    "b.invalid a.invalid",
    " a.invalid ",
    "a.invalid:80",
    "a.invalid:81",
    "*",
    "*.invalid",
    "*,b.invalid",
    "10.0.0.1",
    "10.0.0.1:80",
    "10.0.0.0/8",
    "10.0.0.0/31",
    "10.0.0.2/31",
    "10.0.0.1/32",
    "10.0.0",
    "10.",
    "0.0.0.0/0",
    "",
    ",",
]
TARGETS = [
    "http://a.invalid/x",
    "http://x.a.invalid/x",
    "http://xa.invalid/x",
    "http://A.Invalid/x",
    "http://10.0.0.1/x",
]


def test_no_proxy_equals_curls(proxy: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    # Without a proxy the address is a port without a listener.
    command = [
        curl,
        "-s",
        "-o",
        os.devnull,
        "-m",
        "5",
        "--connect-timeout",
        "0.2",
        "--resolve",
        "*:80:127.0.0.1",
    ]
    wrong = []
    for word, target in itertools.product(WORDS, TARGETS):
        monkeypatch.setenv("no_proxy", word)
        proxy.requests.clear()
        subprocess.run([*command, target], check=False, timeout=30)
        curl_is_direct = not proxy.requests
        proxy.requests.clear()
        with suppress(OSError):
            ingot.safe_open(target, "np", storage_options={**QUICK, "connect_timeout": 0.2})
        is_direct = not proxy.requests
        if is_direct != curl_is_direct and not (is_direct and word in WIDER):
            wrong.append((word, target, is_direct))
    assert not wrong
