"""Identities that ingot does not read itself: from a caller's provider, and from the SDKs of the vendors.

The extension calls `start` on a helper thread, with `given` or `found`. Nothing here is imported before that.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ingot.typing import Identity

#: The fields of `ingot.typing.Identity` in their order, with the expiry in seconds since 1970.
Answer = tuple[str | None, str | None, str | None, str | None, float | None, str | None, str | None]

FIELDS = tuple(Identity.__annotations__)
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_AZURE_SCOPE = "https://storage.azure.com/.default"


class RefusedError(Exception):
    """A provider has no identity. The message holds no secret.

    `kind` is ``"refused"`` (by a service), ``"missing"`` (a library), ``"setting"`` or ``"other"``.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def start(function: str, arguments: tuple[Any, ...], done: Callable[[object, object], object]) -> None:
    """Call a function of this module on a new thread, and `done` with its result and the exception."""

    def run() -> None:
        try:
            answer = globals()[function](*arguments)
        except BaseException as error:
            done(None, error)
        else:
            done(answer, None)

    start_new_thread(run, ())


# A caller's provider. --------------------------------------------------------------------------------------


def given(provider: Callable[[], Any]) -> Answer:
    """Return the fields of the result of a caller's provider."""
    answer = provider()
    if isinstance(answer, Mapping):
        unknown = [str(name) for name in answer if name not in FIELDS]
        if unknown:
            raise RefusedError("setting", f"unknown field {unknown[0]!a}: expected {', '.join(FIELDS)}")
        values = {name: answer.get(name) for name in FIELDS}
    else:
        values = {name: getattr(answer, name, None) for name in FIELDS}
    expires = values.pop("expires_at")
    for name, value in values.items():
        if not (value is None or isinstance(value, str)):
            raise RefusedError("setting", f"{name}: expected str, found {type(value).__name__}")
    key, secret, session, token, region, endpoint = values.values()
    if bool(key) != bool(secret) or not (key or token):
        found = "half a pair of keys" if key or secret else f"{type(answer).__name__} without them"
        expected = "access_key_id and secret_access_key, or token"
        raise RefusedError("setting", f"expected {expected}; found {found}")
    if key:
        # The names of `storage_options`, which s3fs and obstore use too.
        session, token = session or token, None
    return key, secret, session, token, _seconds(expires), region, endpoint


def _seconds(expires: object) -> float | None:
    """Return a time in seconds since 1970."""
    if expires is None:
        return None
    if isinstance(expires, datetime) and expires.tzinfo is not None:
        return expires.timestamp()
    if isinstance(expires, int | float) and not isinstance(expires, bool):
        return float(expires)
    found = "a datetime without a time zone" if isinstance(expires, datetime) else type(expires).__name__
    expected = "a datetime with a time zone or seconds since 1970"
    raise RefusedError("setting", f"expires_at: expected {expected}, found {found}")


# The SDKs. -------------------------------------------------------------------------------------------------


def found(store: str, profile: str | None, credentials_file: Any, *application: str | None) -> Answer:
    """Return the identity that the SDK of a store finds."""
    try:
        if store == "s3":
            return _amazon(profile)
        if store == "gs":
            return _google(credentials_file)
        return _azure(*application)
    except ImportError as error:
        raise _missing(store, error) from None
    except RefusedError:
        raise
    except Exception as error:
        raise _refusal(error) from None


def _missing(store: str, error: ImportError) -> RefusedError:
    extra, library, instead = {
        "s3": ("s3", "botocore", "access_key_id and secret_access_key"),
        "gs": ("gcs", "google-auth", "token"),
        "az": ("azure", "azure-identity", "token, sas_token or account_key"),
    }[store]
    instead = f"or give `credentials`, {instead}, or `anonymous` in storage_options"
    needed = f"{library} reads it, and the module {error.name} is not installed"
    return RefusedError("missing", f"{needed}: run `pip install 'ingot-tensors[{extra}]'`, {instead}")


def _amazon(profile: str | None) -> Answer:
    from botocore.session import Session

    session = Session(profile=profile)
    # This credential would ask for a device code on the terminal.
    roles: Any = session.get_component("credential_provider").get_provider("assume-role")
    roles._prompter = _no_prompt
    credentials = session.get_credentials()
    if credentials is None:
        # A profile that is named explicitly must work. The default one may exist for other settings.
        if profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE"):
            raise RefusedError("setting", "botocore finds no credentials: give `anonymous` to read without")
        return None, None, None, None, None, *_place(session)
    keys = credentials.get_frozen_credentials()
    # The expiry of temporary keys, which `aws configure export-credentials` reads from this variable too.
    expires: datetime | None = getattr(credentials, "_expiry_time", None)
    seconds = expires.timestamp() if expires else None
    return keys.access_key, keys.secret_key, keys.token or None, None, seconds, *_place(session)


def _no_prompt(question: str) -> str:
    why = "its mfa_serial asks for a code: export the keys, or give a credential_process"
    raise RefusedError("setting", why)


def _place(session: Any) -> tuple[str | None, str | None]:
    """Return the region and the endpoint that a profile configures, unless the environment does."""
    region = session.get_config_variable("region")
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if named or session.get_config_variable("ignore_configured_endpoint_urls"):
        return region, None
    profile = session.get_scoped_config()
    services = profile.get("services")
    of_all = session.full_config.get("services", {})
    if services and services not in of_all:
        raise RefusedError("setting", f"the profile names [services {services}], which no file has")
    of_s3 = of_all.get(services, {}).get("s3", {})
    return region, of_s3.get("endpoint_url") or profile.get("endpoint_url")


def _google(credentials_file: str | os.PathLike[str] | None) -> Answer:
    import google.auth
    from google.auth import compute_engine
    from google.auth.transport.requests import Request

    # This library has no type annotations.
    of_machine: Any = compute_engine.Credentials
    of_file: Any = google.auth.load_credentials_from_file
    if credentials_file is None:
        credentials = of_machine(scopes=[_GOOGLE_SCOPE])
    else:
        with warnings.catch_warnings():
            # A check against untrusted files. This file is the user's own.
            warnings.simplefilter("ignore", DeprecationWarning)
            credentials, _ = of_file(os.fspath(credentials_file), scopes=[_GOOGLE_SCOPE])
    credentials.refresh(Request())
    expiry: datetime | None = credentials.expiry
    seconds = expiry.replace(tzinfo=UTC).timestamp() if expiry else None
    return None, None, None, credentials.token, seconds, None, None


def _azure(client_id: str | None, tenant_id: str | None, client_secret: str | None) -> Answer:
    import azure.identity as sdk

    # Log messages may repeat a server's words, so only programs that configure logging see them.
    logger = logging.getLogger("azure.identity")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    credential = _of_application(client_id, tenant_id, client_secret)
    if credential is None:
        client = client_id or os.environ.get("AZURE_CLIENT_ID")
        credential = sdk.ManagedIdentityCredential(client_id=client)
    with credential:
        token = credential.get_token(_AZURE_SCOPE)
    return None, None, None, token.token, float(token.expires_on), None, None


def _of_application(client_id: str | None, tenant_id: str | None, client_secret: str | None) -> Any:
    """Return the credential of an application or of a pod; None if none is configured."""
    import azure.identity as sdk

    variable = os.environ.get
    client = client_id or variable("AZURE_CLIENT_ID")
    secret = client_secret or variable("AZURE_CLIENT_SECRET")
    certificate, file = variable("AZURE_CLIENT_CERTIFICATE_PATH"), variable("AZURE_FEDERATED_TOKEN_FILE")
    # An authority of the user's own is in no list of Microsoft's.
    how: Any = {"disable_instance_discovery": bool(variable("AZURE_AUTHORITY_HOST"))}
    if not (secret or certificate or file):
        return None
    tenant = tenant_id or variable("AZURE_TENANT_ID")
    if not (client and tenant):
        missing = "client_id, or AZURE_CLIENT_ID," if tenant else "tenant_id, or AZURE_TENANT_ID,"
        raise RefusedError("setting", f"it needs {missing} beside it")
    try:
        if secret:
            return sdk.ClientSecretCredential(tenant, client, secret, **how)
        if certificate:
            how["password"] = variable("AZURE_CLIENT_CERTIFICATE_PASSWORD")
            return sdk.CertificateCredential(tenant, client, certificate, **how)
        return sdk.WorkloadIdentityCredential(tenant_id=tenant, client_id=client, token_file_path=file, **how)
    except ValueError as error:
        # Errors of the SDK's own checks, before any request.
        raise RefusedError("setting", str(error)) from None


# Errors of the SDKs.
# ---------------------------------------------------------------------------------------------

#: The error codes of token services (RFC 6749, RFC 8693, Entra ID). The rest of an answer may repeat a
#: secret.
_CODES = (
    r"\b(AADSTS\d+|invalid_(?:request|client|grant|scope|target)|unauthorized_client|"
    r"unsupported_grant_type|access_denied)\b"
)
_LOG_IN = ("SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError")


def _refusal(error: Exception) -> RefusedError:
    """Return the exception of an SDK as text, without a server's words, which may repeat secrets."""
    library = type(error).__module__.partition(".")[0]
    of = {"botocore": _of_botocore, "google": _of_google, "azure": _of_azure}
    kind, words = of.get(library, _of_python)(error)
    return RefusedError(kind, f"{type(error).__name__}{words and f': {words}'}")


def _of_botocore(error: Any) -> tuple[str, str]:
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        code = error.response.get("Error", {}).get("Code", "")
        # A single word, not a text.
        return _by_status(status), f"{status} {code if re.fullmatch(r'[A-Za-z]{1,64}', code) else ''}"
    if isinstance(error, exceptions.CredentialRetrievalError):
        # Its message quotes a program or a service.
        return "other", f"the source {error.kwargs['provider']} failed"
    if isinstance(error, exceptions.HTTPClientError):
        return "other", str(error) if "endpoint_url" in error.kwargs else ""
    hint = ": log in with `aws sso login`" if type(error).__name__ in _LOG_IN else ""
    return "setting", f"{error}{hint}"


def _of_google(error: Any) -> tuple[str, str]:
    from google.auth import exceptions

    if isinstance(error, exceptions.DefaultCredentialsError | exceptions.MalformedError):
        words = [str(part) for part in error.args if isinstance(part, str | exceptions.MalformedError)]
        return "setting", ": ".join(words)
    if isinstance(error, exceptions.TransportError) and isinstance(error.args[0], Exception):
        return "other", type(error.args[0]).__name__
    return _by_answer(error, re.search(r"Status: (\d{3})", str(error)))


def _of_azure(error: Any) -> tuple[str, str]:
    kind, words = _by_answer(error, re.fullmatch(r"(\d{3})", str(getattr(error, "status_code", ""))))
    return "refused" if type(error).__name__ == "ClientAuthenticationError" else kind, words


def _of_python(error: Exception) -> tuple[str, str]:
    if isinstance(error, OSError) and error.filename:
        return "setting", f"{error.strerror}: {error.filename}"
    return "setting" if isinstance(error, ValueError) else "other", ""


def _by_answer(error: Exception, status: re.Match[str] | None) -> tuple[str, str]:
    """Return the error in the answer of a token service."""
    code = re.search(_CODES, str(error))
    if code:
        return "refused", code[1]
    return (_by_status(int(status[1])), f"status {status[1]}") if status else ("other", "")


def _by_status(status: int) -> str:
    return "refused" if 400 <= status < 500 else "other"
