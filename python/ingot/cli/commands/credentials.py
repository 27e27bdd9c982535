"""``ingot credentials``: the identity that requests for a URL use."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import click

from ingot import _native
from ingot.cli import arguments
from ingot.cli.screen import Screen, printing

_NAMES = ("AccessKeyId", "SecretAccessKey", "SessionToken")


@click.command(short_help="The identity that requests for a URL use.")
@click.argument("url", shell_complete=arguments.paths)
@click.option("--profile", help="The profile of Amazon's files to use instead of the environment.")
@click.option(
    "--process",
    is_flag=True,
    help="Print the keys as JSON, with their secrets, in the form of `credential_process`.",
)
@printing
def command(screen: Screen, url: str, profile: str | None, process: bool) -> int:
    """Print the identity that requests for URL use, and the setting that holds it, without a secret.

    With --process, the keys of S3 are printed for programs that run a `credential_process` of Amazon's files.
    """
    options = {"profile": profile} if profile else None
    source, fields = _native.identity(url, options) or (None, None)
    key, secret, session, token, expires, region, endpoint = fields or (None,) * 7
    until = None if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds")
    if process:
        if key is None:
            raise click.UsageError(f"{_native.shown_url(url)} is not read with keys of S3")
        pairs = zip(_NAMES, (key, secret, session), strict=True)
        given = {"Version": 1, **{name: value for name, value in pairs if value}}
        screen.result(json.dumps(given | ({"Expiration": until} if until else {})))
        return 0
    facts = {
        "source": source,
        "kind": _kind(source, key, token),
        "access key": key and f"…{key[-4:]}" if key and len(key) >= 16 else None,
        "expires": until,
        "region": region,
        "endpoint": endpoint and _native.shown_url(endpoint),
    }
    found = {name: value for name, value in facts.items() if value is not None}
    screen.answer({name.replace(" ", "_"): value for name, value in found.items()})
    for name, value in found.items():
        screen.result(f"{name}: {value}")
    return 0


def _kind(source: str | None, key: str | None, token: str | None) -> str:
    if source is None:
        return "anonymous"
    if key:
        return "keys"
    return "token" if token else source
