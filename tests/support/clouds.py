"""A server on loopback that issues credentials like the clouds, and serves a file to valid credentials.

Other libraries verify the requests: botocore the signatures of Amazon, google-auth signed tokens. Keys and
tokens are named after their source, so that tests see which source was used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

import ingot
import ingot.numpy

from .servers import Answer, Handler, Request, Server, serving

DATA = ingot.numpy.save({"a": np.arange(10)})
#: The secret of an account of Azure, and of keys that a test has from the start.
SECRET = "c2VjcmV0LW9mLXRoZS10ZXN0cw=="


def after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Refused(Exception):
    """The credentials are invalid."""


def signer(
    keys: dict[str, tuple[str, str | None]],
    url: str,
    method: str,
    request: Request,
    body: bytes,
    service: str = "s3",
) -> str:
    """Return the key, one of `keys`, with which a request is signed, according to botocore."""
    from botocore.auth import S3SigV4Auth, SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    fields = dict(re.findall(r"(\w+)=([^, ]+)", request.headers["authorization"]))
    key, day, region, scope, _ = fields["Credential"].split("/")
    assert scope == service
    if key not in keys:
        raise Refused("there is no such key")
    secret, session = keys[key]
    assert request.headers.get("x-amz-security-token") == session
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    auth = kind(Credentials(key, secret, session), service, region)
    names = fields["SignedHeaders"].split(";")
    assert {name for name in request.headers if name.startswith("x-amz-")} <= set(names)
    again = AWSRequest(
        method=method,
        url=url,
        data=body,
        headers={name: request.headers[name] for name in names},
    )
    time = request.headers["x-amz-date"]
    assert time.startswith(day)
    again.context["timestamp"] = time
    signature = auth.signature(auth.string_to_sign(again, auth.canonical_request(again)), again)
    if signature != fields["Signature"]:
        raise Refused("the signature does not match")
    return key


class Cloud:
    """The issued credentials, and the identities that have read."""

    def __init__(self) -> None:
        self.server = Server(0)
        #: The same server with TLS, for clients that require it.
        self.authority = Server(0)
        #: The secret and the session token of each key of Amazon, by key id.
        self.keys: dict[str, tuple[str, str | None]] = {}
        self.tokens: set[str] = set()
        self.readers: list[str] = []
        #: The body of the last request.
        self.body = b""
        #: The keys for signed tokens.
        self.private = b""
        self.public = b""
        #: Answers in the place of a service, by the beginning of its path.
        self.instead: dict[str, Answer] = {}

    def url(self, path: str = "") -> str:
        return self.server.url(path)

    def known(self, *names: str) -> None:
        """Register keys that a configuration contains."""
        for name in names:
            self.keys[name] = (SECRET, None)

    def answer(self, handler: Handler, request: Request) -> None:
        self.body = body = handler.rfile.read(int(request.headers.get("content-length", 0)))
        try:
            for begin, instead in self.instead.items():
                if request.path.startswith(begin):
                    instead(handler, request)
                    return
            if "range" in request.headers:
                self.readers.append(self._reader(handler, request))
                handler.part(DATA, request, ETag='"v1"', Last_Modified="Mon, 23 Nov 2026 00:00:00 GMT")
            else:
                send_text(handler, self._issued(handler, request, body))
        except (Refused, ValueError, KeyError, AssertionError) as why:
            send_text(handler, f"{type(why).__name__}: {why}", 403)

    # Identities of requests.

    def _reader(self, handler: Handler, request: Request) -> str:
        shown = request.headers.get("authorization", "")
        if shown.startswith("AWS4-HMAC-SHA256 "):
            return self._signer(handler, request, b"", "s3")
        if shown.startswith("Bearer "):
            token = shown.removeprefix("Bearer ")
            if token not in self.tokens:
                raise Refused("this token was issued to nobody")
            if token.startswith("azure") and request.headers.get("x-ms-version", "") < "2017-11-09":
                raise Refused("tokens are of version 2017-11-09")
            return token
        assert shown == "", shown
        query = {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}
        if "sig" in query:
            assert query["sig"] == signature_of_blob(urlsplit(request.path).path, query)
            return "signed query"
        return "nobody"

    def _signer(self, handler: Handler, request: Request, body: bytes, service: str) -> str:
        return signer(self.keys, self.url(request.path), handler.command, request, body, service)

    # Issued credentials.

    def _issued(self, handler: Handler, request: Request, body: bytes) -> str:
        path = urlsplit(request.path).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}
        kind = request.headers.get("content-type", "")
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()} if "form" in kind else {}
        if path == "/" and handler.command == "GET":
            return "computeMetadata/\n"
        if path == "/":
            return self._sts(handler, request, body, form)
        if path == "/federation/credentials":
            token = request.headers["x-amz-sso_bearer_token"]
            key = self._key(f"SSO.{query['account_id']}.{query['role_name']}.{token}")
            names = ["accessKeyId", "secretAccessKey", "sessionToken"]
            over = (datetime.now(UTC).timestamp() + 3600) * 1000
            return json.dumps(
                {"roleCredentials": dict(zip(names, key, strict=True)) | {"expiration": int(over)}}
            )
        if path.startswith("/creds"):
            return self._json_key(f"CONTAINER.{request.headers.get('authorization', 'anybody')}")
        if path.startswith("/latest/"):
            return self._instance(handler, request)
        if path.startswith("/computeMetadata"):
            assert request.headers["metadata-flavor"] == "Google"
            if not path.endswith("/token"):
                return json.dumps({"email": "default", "scopes": [], "aliases": []})
            return self._token("google-machine")
        if path.startswith("/google/"):
            return self._google(path, form)
        if path == "/subject":
            assert request.headers["x-ask"] == "please"
            return json.dumps({"value": "of-the-url"})
        return self._azure(path, request, query, form)

    def _key(self, name: str) -> tuple[str, str, str]:
        name = re.sub(r"[^\w.-]", "_", name)
        self.keys[name] = (f"secret/of+{name}", f"session+of/{name}==")
        return name, *self.keys[name]

    def _json_key(self, name: str) -> str:
        names = ["AccessKeyId", "SecretAccessKey", "Token"]
        return json.dumps(
            {
                "Code": "Success",
                **dict(zip(names, self._key(name), strict=True)),
                "Expiration": after(3600),
            }
        )

    def _token(self, name: str, **more: object) -> str:
        self.tokens.add(name)
        return json.dumps({"access_token": name, "token_type": "Bearer", "expires_in": 3600, **more})

    def _sts(self, handler: Handler, request: Request, body: bytes, form: dict[str, str]) -> str:
        role = form["RoleArn"].rpartition("/")[2]
        if form["Action"] == "AssumeRole":
            name = f"ROLE.{role}.{self._signer(handler, request, body, 'sts')}"
        else:
            # An identity is in the body only.
            assert request.path == "/"
            assert form["Action"] == "AssumeRoleWithWebIdentity"
            # botocore sends the line end of the file too.
            name = f"WEB.{role}.{form['WebIdentityToken'].strip()}"
        key, secret, session = self._key(name)
        return (
            f'<{form["Action"]}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<{form['Action']}Result><Credentials><AccessKeyId>{key}</AccessKeyId>"
            f"<SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{session}</SessionToken>"
            f"<Expiration>{after(3600)}</Expiration></Credentials></{form['Action']}Result>"
            f"</{form['Action']}Response>"
        )

    def _instance(self, handler: Handler, request: Request) -> str:
        if handler.command == "PUT":
            assert request.headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            return "the-token"
        assert request.headers["x-aws-ec2-metadata-token"] == "the-token"
        return "my-role\n" if request.path.endswith("/") else self._json_key("INSTANCE")

    def _google(self, path: str, form: dict[str, str]) -> str:
        from google.auth import jwt

        if path == "/google/token" and form["grant_type"].endswith(":jwt-bearer"):
            # Files name the service; google-auth signs for its built-in one.
            audience = [self.url(path), "https://oauth2.googleapis.com/token"]
            claim = jwt.decode(form["assertion"], certs=self.public, audience=audience)
            return self._token(f"account-{claim['iss']}-{scope(claim['scope'])}")
        if path == "/google/token":
            assert (form["grant_type"], form["client_secret"]) == ("refresh_token", "of-the-client")
            return self._token(f"person-{form['refresh_token']}")
        assert path == "/google/sts"
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:token-exchange"
        assert form["requested_token_type"] == "urn:ietf:params:oauth:token-type:access_token"
        assert (form["audience"], form["subject_token_type"]) == ("//iam/pool", "urn:of:jwt")
        name = f"federated-{form['subject_token']}-{scope(form['scope'])}"
        return self._token(name, issued_token_type="urn:ietf:params:oauth:token-type:access_token")

    def _azure(self, path: str, request: Request, query: dict[str, str], form: dict[str, str]) -> str:
        from google.auth import jwt

        if path.endswith("/.well-known/openid-configuration"):
            tenant = f"https://{request.headers['host']}/{path.split('/')[1]}"
            return json.dumps(
                {
                    "issuer": f"{tenant}/v2.0",
                    "token_endpoint": f"{tenant}/oauth2/v2.0/token",
                    "authorization_endpoint": f"{tenant}/oauth2/v2.0/authorize",
                }
            )
        if path.endswith("/oauth2/v2.0/token"):
            assert form["grant_type"] == "client_credentials"
            assert form["scope"] == "https://storage.azure.com/.default"
            who = f"{path.split('/')[1]}-{form['client_id']}"
            if "client_secret" in form:
                if form["client_secret"] != "of-the/app+":
                    raise Refused("the secret is another")
                return self._token(f"azure-app-{who}")
            assert form["client_assertion_type"].endswith(":client-assertion-type:jwt-bearer")
            claim = jwt.decode(form["client_assertion"], certs=self.public)
            return self._token(f"azure-pod-{who}-{claim['sub']}")
        assert query["resource"].rstrip("/") == "https://storage.azure.com"
        who = query.get("client_id", "itself")
        if path == "/metadata/identity/oauth2/token":
            assert request.headers["metadata"] == "true"
            return self._token(f"azure-machine-{who}", expires_in="3600", expires_on="9999999999")
        assert (path, request.headers["x-identity-header"]) == ("/msi/token", "of-the-app")
        self.tokens.add(f"azure-service-{who}")
        return json.dumps({"access_token": f"azure-service-{who}", "expires_on": "9999999999"})


def scope(text: str) -> str:
    """Return the scope of a token without its address."""
    return text.rpartition("/")[2]


def send_text(handler: Handler, text: str, status: int = 200) -> None:
    kind = "application/json" if text.startswith("{") else "application/text"
    handler.head(status, Content_Length=len(text.encode()), Content_Type=kind, Metadata_Flavor="Google")
    handler.body(text.encode())


def signature_of_blob(path: str, query: dict[str, str]) -> str:
    """Return the signature of a service SAS of one blob (Azure's page "Create a service SAS", 2020-12-06)."""
    fields = [
        *(query.get(name, "") for name in ("sp", "st", "se")),
        f"/blob/me{path}",
        *(query.get(name, "") for name in ("si", "sip", "spr", "sv", "sr", "snapshot", "ses")),
        *(query.get(name, "") for name in ("rscc", "rscd", "rsce", "rscl", "rsct")),
    ]
    digest = hmac.new(base64.b64decode(SECRET), "\n".join(fields).encode(), hashlib.sha256)
    return base64.b64encode(digest.digest()).decode()


@contextmanager
def running() -> Iterator[Cloud]:
    cloud = Cloud()
    with serving(cloud.answer) as cloud.server:
        yield cloud


class Setup:
    """The configuration of a test."""

    #: The file, and the options that all calls need.
    url: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    def __init__(self, cloud: Cloud, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.cloud, self.home, self.patch = cloud, home, patch

    def variables(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def open(self, **options: object) -> str:
        """Open a file, and return the identity that read it."""
        given = {"endpoint": self.cloud.url(), "retries": 0, **self.options, **options}
        ingot.safe_open(self.url, "np", storage_options=given)
        return self.cloud.readers[-1]

    def fail(self, path: str, error: str, status: int) -> None:
        """Answer requests below `path` with an error that repeats the request."""

        def answer(handler: Handler, request: Request) -> None:
            said = f"{unquote(self.cloud.body.decode())} {request.headers}"
            text = {"error": error, "error_description": said}
            send_text(handler, json.dumps({} if status == 200 else text), status)

        self.cloud.instead[path] = answer


def key_pair() -> tuple[bytes, bytes]:
    """Return a private key and the public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public
