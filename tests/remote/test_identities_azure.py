"""Identities for Azure: ingot uses the same identity as obstore with the same configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

import ingot
from support import clouds
from support.clouds import DATA, SECRET, running
from support.proxies import certificate
from support.servers import serving, unused_port

APPLICATION = {"tenant_id": "tenant", "client_id": "app", "client_secret": "of-the/app+"}


class Setup(clouds.Setup):
    """The configuration of a test."""

    url = "az://c/b"
    options: ClassVar[dict[str, object]] = {"account": "me"}

    def application(self) -> None:
        self.variables(**{f"AZURE_{name.upper()}": value for name, value in APPLICATION.items()})

    def pod(self) -> str:
        from google.auth import crypt, jwt

        now = int(time.time())
        claim = {"iss": "https://k8s", "sub": "pod", "iat": now, "exp": now + 3600}
        path = self.home / "assertion"
        path.write_bytes(jwt.encode(crypt.RSASigner.from_string(self.cloud.private, "k1"), claim))
        self.variables(AZURE_FEDERATED_TOKEN_FILE=str(path), AZURE_TENANT_ID="tenant", AZURE_CLIENT_ID="app")
        return path.read_text().strip()

    def machine(self) -> None:
        self.variables(AZURE_POD_IDENTITY_AUTHORITY_HOST=self.cloud.url(""))

    def service(self) -> None:
        self.variables(IDENTITY_ENDPOINT=self.cloud.url("/msi/token"), IDENTITY_HEADER="of-the-app")

    def of_obstore(self, **config: str) -> str:
        """Return the identity of obstore."""
        store = self.store(**config)
        assert bytes(store.get_range("b", start=0, end=10)) == DATA[:10]
        return self.cloud.readers[-1]

    def store(self, **config: str):
        obstore = pytest.importorskip("obstore", reason="obstore is not installed")
        return obstore.store.AzureStore(
            "c",
            account_name="me",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
            **{"endpoint": self.cloud.url(), **config},
        )


@pytest.fixture
def setup(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[bytes, bytes],
) -> Iterator[Setup]:
    pytest.importorskip("azure.identity", reason="azure-identity is not installed")
    # The service of a machine may take minutes to start.
    monkeypatch.setattr("azure.core.pipeline.policies.RetryPolicy.sleep", lambda *arguments: None)
    cert = certificate(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(cert.path))
    with running() as cloud, serving(cloud.answer, tls=cert.context) as authority:
        cloud.private, cloud.public = pair
        # azure-identity requests tokens only over TLS.
        cloud.authority = authority
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", authority.url("", "https"))
        yield Setup(cloud, tmp_path, monkeypatch)


def test_azure_application_authenticates_by_secret(setup: Setup) -> None:
    assert setup.of_obstore(authority_host=setup.cloud.url(""), **APPLICATION) == "azure-app-tenant-app"
    assert setup.open(**APPLICATION) == "azure-app-tenant-app"
    setup.application()
    assert setup.open() == "azure-app-tenant-app"
    asked = len(setup.cloud.authority.requests)
    assert setup.open() == "azure-app-tenant-app"
    assert len(setup.cloud.authority.requests) == asked, "the token is good for a while"


def test_azure_pod_authenticates_by_token(setup: Setup) -> None:
    setup.pod()
    assert setup.open() == "azure-pod-tenant-app-pod"
    file = os.environ["AZURE_FEDERATED_TOKEN_FILE"]
    config = {"tenant_id": "tenant", "client_id": "app", "authority_host": setup.cloud.url("")}
    assert setup.of_obstore(federated_token_file=file, **config) == "azure-pod-tenant-app-pod"


def test_azure_machine_has_several_identities(setup: Setup) -> None:
    setup.machine()
    assert setup.open() == "azure-machine-itself"
    assert setup.open(client_id="other") == "azure-machine-other"
    setup.variables(AZURE_CLIENT_ID="third")
    assert setup.open() == "azure-machine-third"
    service = setup.cloud.url("/metadata/identity/oauth2/token")
    assert setup.of_obstore(msi_endpoint=service, client_id="third") == "azure-machine-third"


def test_azure_app_service_is_asked(setup: Setup) -> None:
    setup.machine()
    setup.service()
    assert setup.open() == "azure-service-itself"
    assert setup.open(client_id="other") == "azure-service-other"


def signed_query(setup: Setup) -> str:
    import obstore

    # The account is in the path, as in an emulator: the signed text starts with it.
    store = setup.store(account_key=SECRET, endpoint=setup.cloud.url("/me"))
    return urlsplit(obstore.sign(store, "GET", "b", timedelta(hours=1))).query


def test_azure_options_override_all_sources(setup: Setup) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    query = signed_query(setup)
    setup.cloud.tokens.add("azure-given")
    setup.application()
    connection = f"AccountName=me;SharedAccessSignature={query};BlobEndpoint={setup.cloud.url('')}"
    assert setup.open(sas_token=query) == setup.open(sas_token=f"?{query}\n") == "signed query"
    assert setup.open(token="azure-given") == "azure-given"
    assert setup.open(connection_string=connection, endpoint=None, account=None) == "signed query"
    assert setup.open(**{**APPLICATION, "client_id": "other"}) == "azure-app-tenant-other"
    assert setup.open(token=False) == setup.open(anonymous=True) == "nobody"
    setup.variables(AZURE_STORAGE_CONNECTION_STRING=connection)
    assert setup.open() == setup.open(endpoint=None, account=None) == "signed query"
    setup.variables(AZURE_STORAGE_SAS_TOKEN=query)
    setup.cloud.tokens.add("azure-other")
    assert setup.open(token="azure-other") == "azure-other"
    with pytest.raises(PermissionError):
        setup.open(sas_token=query.replace("sig=", "sig=A"))


def test_azure_first_of_several_sources_is_used(setup: Setup) -> None:
    setup.machine()
    setup.pod()
    assert setup.open() == "azure-pod-tenant-app-pod"
    setup.service()
    assert setup.open() == "azure-pod-tenant-app-pod"
    setup.application()
    assert setup.open() == "azure-app-tenant-app"


def test_azure_key_signs_and_is_not_sent(setup: Setup) -> None:
    setup.machine()
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"):
        setup.variables(**{name: SECRET})
    setup.cloud.instead["/c/"] = lambda handler, request: handler.part(DATA, request)
    ingot.safe_open("az://c/b", "np", storage_options={"endpoint": setup.cloud.url(""), "account": "me"})
    sent = setup.cloud.server.requests[-1].headers
    assert sent["authorization"].startswith("SharedKey me:")
    assert SECRET not in str(sent)


# Failures. ---------------------------------------------------------------------------------------------

ASKED = {"application": "/tenant/oauth2", "pod": "/tenant/oauth2", "machine": "/metadata", "service": "/msi"}


@pytest.mark.parametrize("status", [200, 400, 401, 404, 500])
@pytest.mark.parametrize("name", ASKED)
def test_azure_source_that_fails_is_an_error(setup: Setup, name: str, status: int) -> None:
    setup.machine()
    shown = getattr(setup, name)() or "of-the/app+"

    setup.fail(ASKED[name], "invalid_client", status)
    with pytest.raises((ingot.SafetensorError, OSError)) as caught:
        setup.open()
    assert "no credentials from " in str(caught.value)
    assert setup.cloud.readers == []
    assert shown not in str(caught.value)
    assert "of-the-app" not in str(caught.value)
    if status in (400, 401) and name in ("application", "pod"):
        assert isinstance(caught.value, PermissionError)
        # Entra ID begins its description with a code, which this one does not.
        assert name == "application" or "invalid_client" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"AZURE_CLIENT_SECRET": "s3cret"}, "AZURE_CLIENT_SECRET: it needs tenant_id"),
        (
            {"AZURE_CLIENT_SECRET": "s3cret", "AZURE_TENANT_ID": "t"},
            "AZURE_CLIENT_SECRET: it needs client_id",
        ),
        (
            {"AZURE_FEDERATED_TOKEN_FILE": "/none/s", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"},
            "No such file or directory: /none/s",
        ),
        ({"IDENTITY_ENDPOINT": "http://127.0.0.1:9/"}, "CredentialUnavailableError"),
        ({"AZURE_STORAGE_CONNECTION_STRING": "AccountName=me;AccountKey=s3cret!"}, "not base64"),
    ],
    ids=str,
)
def test_azure_incomplete_configuration_is_an_error(
    setup: Setup, variables: dict[str, str], why: str
) -> None:
    setup.machine()
    setup.variables(**variables)
    with pytest.raises(ingot.SafetensorError, match=why) as caught:
        setup.open()
    assert "s3cret" not in str(caught.value)
    assert setup.cloud.server.requests == []


def test_azure_silent_metadata_service_is_an_error(setup: Setup) -> None:
    setup.variables(AZURE_POD_IDENTITY_AUTHORITY_HOST=f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(ingot.StorageError, match="AZURE_POD_IDENTITY_AUTHORITY_HOST"):
        setup.open()
