"""`storage_options` accepts the option names of other libraries, which are in one table."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ingot
from ingot._base.checks import NAMES, OPTIONS, OTHER_NAMES
from ingot.typing import StorageOptions
from support.clouds import SECRET, running
from support.servers import good, serving

from .test_identities_amazon import Setup, setup  # noqa: F401


def test_option_table_has_known_names() -> None:
    spread = [other for others in OTHER_NAMES.values() for other in others.split()]
    assert len(spread) == len(set(spread)), "a name stands for one option"
    assert set(spread).isdisjoint(OPTIONS)
    assert set(NAMES) == {*OPTIONS, *OTHER_NAMES, *spread}


def test_option_table_is_documented() -> None:
    path = Path(__file__).parents[2] / "docs" / "guides" / "credentials.md"
    table = path.read_text().partition("| here | elsewhere |")[2]
    known = set(re.findall(r"`(\w+)`", table))
    assert NAMES.keys() - OPTIONS - known == set()
    for name, others in OTHER_NAMES.items():
        assert not others or re.search(rf"`{name}`.*`{'`, `'.join(others.split())}`", table), name


#: Options of object_store that ingot does not have, or has in another form: options for writing, for other
#: protocols and for pools, and values that ingot reads from the environment only.
NOT_OURS = {
    *("aws_endpoint_url_s3", "bucket", "checksum_algorithm", "conditional_put", "copy_if_not_exists"),
    *("container_credentials_relative_uri", "container_credentials_full_uri", "web_identity_token_file"),
    *("container_authorization_token_file", "disable_tagging", "disable_bulk_delete", "imdsv1_fallback"),
    *("metadata_endpoint", "role_arn", "role_session_name", "s3_express", "server_side_encryption"),
    *("sse_bucket_key_enabled", "sse_customer_key_base64", "sse_kms_key_id", "sts_endpoint"),
    *("unsigned_payload", "service_account_key", "credential_type", "authority_host", "use_emulator"),
    *("use_fabric_endpoint", "encryption_key", "msi_endpoint", "object_id", "msi_resource_id"),
    *("federated_token_file", "use_azure_cli", "container_name", "fabric_token_service_url"),
    *("fabric_workload_host", "fabric_session_token", "fabric_cluster_identifier"),
    *("allow_invalid_certificates", "default_content_type", "http1_only", "http2_only", "user_agent"),
    *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "proxy_url"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes"),
    *("randomize_addresses", "read_timeout"),
}


def test_option_names_of_obstore_are_known_or_listed() -> None:
    store = pytest.importorskip("obstore.store", reason="obstore is not installed")
    folder = inspect.getfile(store).removesuffix("store.py") + "_store/"
    names: set[str] = set()
    for file in ("_aws", "_gcs", "_azure", "_client"):
        text = Path(f"{folder}{file}.pyi").read_text()
        for body in re.findall(r"class \w*Config\(TypedDict[^\n]*\n((?:    .*\n|\n)*)", text):
            names |= set(re.findall(r"^    ([a-z]\w+):", body, re.MULTILINE))
    assert len(names) > 40
    assert names - NAMES.keys() - NOT_OURS == set()


SAME = {
    "s3fs": {
        "key": "ID",
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": "{}", "region_name": "eu-west-3", "verify": True},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "requester_pays": True,
    },
    "s3fs, flat": {
        "username": "ID",
        "password": SECRET,
        "endpoint_url": "{}",
        "client_kwargs": {"region_name": "eu-west-3"},
        "request_payer": "requester",
    },
    "object_store": {
        "aws_access_key_id": "ID",
        "aws_secret_access_key": SECRET,
        "aws_endpoint": "{}",
        "aws_region": "eu-west-3",
        "aws_request_payer": "true",
        "aws_virtual_hosted_style_request": "false",
        "aws_skip_signature": "false",
        "allow_http": "true",
    },
    "object_store, in large letters": {
        "AWS_ACCESS_KEY_ID": "ID",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": "{}",
        "AWS_DEFAULT_REGION": "eu-west-3",
        "AWS_REQUEST_PAYER": "true",
        "client_options": {"allow_http": True, "default_headers": {"X-Own": "y"}},
    },
}


@pytest.mark.parametrize("name", SAME)
def test_option_names_of_other_libraries_mean_the_same(setup: Setup, name: str) -> None:  # noqa: F811
    def filled(given: object) -> object:
        if isinstance(given, dict):
            return {key: filled(value) for key, value in given.items()}
        return setup.cloud.url("") if given == "{}" else given

    setup.cloud.known("ID")
    options = filled(SAME[name])
    ingot.safe_open("s3://b/k", "np", storage_options=options)
    assert setup.cloud.readers == ["ID"]
    sent = setup.cloud.server.requests[-1]
    assert sent.path == "/b/k"
    assert "/eu-west-3/s3/" in sent.headers["authorization"]
    assert sent.headers["x-amz-request-payer"] == "requester"


def test_option_names_of_gcsfs_and_adlfs_are_known() -> None:
    with running() as cloud:
        cloud.tokens |= {"given"}
        options = {"endpoint_url": cloud.url(""), "bearer_token": "given"}
        ingot.safe_open("gs://b/k", "np", storage_options=options)
        host = {"account_name": "me", "base_url": cloud.url(""), "anon": True}
        ingot.safe_open("az://c/b", "np", storage_options=host)
        assert cloud.readers == ["given", "nobody"]
    options = {"account_name": "me", "account_host": "nowhere.invalid", "anon": True, "retries": 0}
    with pytest.raises(ingot.SafetensorError, match=r"cannot connect to nowhere\.invalid:443"):
        ingot.safe_open("az://c/b", "np", storage_options=options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"retriez": 1}, "`retriez` is unknown: expected one of token, credentials, headers, "),
        ({"client_kwargs": {"s3cret": "s3cret"}}, "is unknown: expected one of"),
        ({"key": "s3cret", "access_key_id": "s3cret"}, "key and access_key_id are the same option"),
        ({"endpoint": "http://h", "client_kwargs": {"endpoint_url": "http://h"}}, "are the same option"),
        ({"key": "s3cret"}, "expected both of access_key_id and secret_access_key"),
        ({"client_kwargs": {"verify": False}}, "verify: cannot be this bool"),
        ({"config_kwargs": {"s3": {"addressing_style": "s3cret"}}}, "addressing_style: cannot be this str"),
        ({"allow_http": False, "endpoint": "http://h"}, "allow_http is False"),
        ({"anon": "s3cret"}, "anon: cannot be this str"),
        ({"token": "browser"}, "token: cannot be this str"),
    ],
    ids=str,
)
def test_option_without_effect_is_an_error(options: dict[str, object], why: str) -> None:
    with serving(good(b"")) as server:
        with pytest.raises(ingot.OptionError, match=re.escape(why)) as caught:
            ingot.safe_open("s3://b/k", "np", storage_options=options)
        assert "s3cret" not in str(caught.value).replace("`s3cret` is unknown", "")
        assert server.requests == []


@pytest.mark.parametrize("name", StorageOptions.__annotations__)
def test_option_with_a_strange_value_names_the_allowed_ones(name: str) -> None:
    for value in (object(), float("nan"), -1, 10**30, b"", [5]):
        try:
            ingot.open("nothing", storage_options={name: value})  # type: ignore[misc]
        except FileNotFoundError:
            # The value is valid.
            continue
        except (TypeError, ingot.OptionError) as fault:
            error = fault
        expected = f"open(): storage_options: {name}: cannot be this {type(value).__name__}: expected "
        assert str(error).startswith(expected), (value, error)


def test_option_key_that_is_no_str_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"open\(\): storage_options: expected str as keys, found int"):
        ingot.open("nothing", storage_options={5: "x"})  # type: ignore[misc]


@pytest.mark.parametrize("options", [{"token": {"a": 1}}, {"client_kwargs": "s3cret"}, {"key": 1}], ids=str)
def test_option_of_another_type_is_a_type_error(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="cannot be this") as caught:
        ingot.safe_open("s3://b/k", "np", storage_options=options)
    assert "s3cret" not in str(caught.value)
