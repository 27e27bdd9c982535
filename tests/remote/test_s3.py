"""Files in S3, from moto's server, which checks signatures as Amazon does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from support import shards
from support.servers import Handler, Request, good, serving, unused_port

TENSORS = {"a": np.arange(400_000), "b": np.arange(50, dtype=np.float32)}
DATA = ingot.numpy.save(TENSORS)
KEYS = ["model.safetensors", "a b/ü+&=~%2F.safetensors", "a/../b//c.safetensors", "q?x#y.safetensors"]

#: Makes a bucket with these keys and a user who may read them, reports it, and serves until its input ends.
SCRIPT = """
    import json, sys
    port, keys = int(sys.argv[1]), json.loads(sys.argv[2])
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    own = dict(endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", aws_access_key_id="x",
               aws_secret_access_key="x")
    s3, iam = boto3.client("s3", **own), boto3.client("iam", **own)
    s3.create_bucket(Bucket="models")
    data = sys.stdin.buffer.read(int(sys.argv[3]))
    for key in keys:
        s3.put_object(Bucket="models", Key=key, Body=data)
    iam.create_user(UserName="me")
    allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName="me")["AccessKey"]
    print(json.dumps([key["AccessKeyId"], key["SecretAccessKey"]]), flush=True)
    sys.stdin.buffer.read()
"""


@dataclass
class Moto:
    port: int
    key: str
    secret: str

    @property
    def options(self) -> dict[str, object]:
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": self.key,
            "secret_access_key": self.secret,
        }


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    pytest.importorskip("moto", reason="moto is not installed")
    port = unused_port()
    # The requests of the script need no signature. Later requests do.
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(len(KEYS) + 4)}
    arguments = [str(port), json.dumps(KEYS), str(len(DATA))]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(DATA)
        process.stdin.flush()
        yield Moto(port, *json.loads(process.stdout.readline()))
        process.terminate()


def same(found: dict[str, np.ndarray]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        np.array_equal(found[name], TENSORS[name]) for name in found
    )


@pytest.mark.parametrize("key", KEYS)
def test_s3_request_is_signed_for_every_key(moto: Moto, key: str) -> None:
    assert same(ingot.numpy.load_file(f"s3://models/{key}", storage_options=moto.options))


def test_s3_file_is_opened_like_a_local_one(moto: Moto) -> None:
    file = ingot.safe_open("s3://models/model.safetensors", "np", storage_options=moto.options)
    assert (file.path, file.backend) == ("s3://models/model.safetensors", "s3")
    assert file.get_slice("a")[399_990:].tolist() == list(range(399_990, 400_000))


def test_s3_checkpoint_is_signed_shard_by_shard(moto: Moto, tmp_path: Path) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    keys = {"aws_access_key_id": moto.key, "aws_secret_access_key": moto.secret}
    s3 = boto3.client("s3", endpoint_url=moto.options["endpoint"], region_name="us-east-1", **keys)
    for name, data in shards.checkpoint().items():
        s3.put_object(Bucket="models", Key=f"sharded//a b/{name}", Body=data)
    url = f"s3://models/sharded//a b/{shards.INDEX}"
    file = ingot.safe_open(url, "np", storage_options=moto.options)
    assert shards.same(file.get_tensors())
    assert file.shards[2] == f"s3://models/sharded//a b/{shards.NAMES[2]}"
    assert ingot.download(url, tmp_path, storage_options=moto.options).path == str(tmp_path / shards.INDEX)
    assert shards.same(ingot.numpy.load_file(tmp_path))
    s3.delete_object(Bucket="models", Key=f"sharded//a b/{shards.NAMES[1]}")
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        ingot.download(url, tmp_path, storage_options=moto.options, overwrite=True)
    assert shards.same(ingot.numpy.load_file(tmp_path))
    with pytest.raises(FileNotFoundError, match="NoSuchKey") as caught:
        ingot.numpy.load_file(url, storage_options=moto.options)
    assert caught.value.filename == file.shards[1]


@pytest.mark.parametrize("wrong", ["secret_access_key", "access_key_id"])
def test_n18_wrong_signature_is_rejected(moto: Moto, wrong: str) -> None:
    options = {**moto.options, wrong: "hunter2"}
    with pytest.raises(PermissionError) as caught:
        ingot.safe_open("s3://models/model.safetensors", "np", storage_options=options)
    assert "403" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.filename == "s3://models/model.safetensors"


def test_n18_anonymous_request_is_rejected_where_a_signature_is_needed(moto: Moto) -> None:
    for options in ({"endpoint": moto.options["endpoint"]}, {**moto.options, "anonymous": True}):
        with pytest.raises(PermissionError):
            ingot.safe_open("s3://models/model.safetensors", "np", storage_options=options)


def test_s3_missing_key_is_file_not_found(moto: Moto) -> None:
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        ingot.safe_open("s3://models/none", "np", storage_options=moto.options)


def test_n18_nothing_is_signed_without_credentials() -> None:
    with serving(good(DATA)) as server:
        assert same(ingot.numpy.load_file("s3://public/m.bt", storage_options={"endpoint": server.url("")}))
        assert server.requests[0].path == "/public/m.bt"
        assert "authorization" not in server.requests[0].headers


def test_n18_signature_follows_no_redirect() -> None:
    with serving(good(DATA), host="127.0.0.2") as other:

        def answer(handler: Handler, request: Request) -> None:
            handler.head(307, Location=other.url("/x"), Content_Length=0)

        with serving(answer) as server:
            options = {"endpoint": server.url(""), "access_key_id": "id", "secret_access_key": "hunter2"}
            more = {"session_token": "s3ssion", "allow_private_redirects": True}
            ingot.safe_open("s3://b/k", "np", storage_options={**options, **more})
        assert server.requests[0].headers["x-amz-security-token"] == "s3ssion"
        assert "hunter2" not in str(server.requests[0].headers)
        assert not [
            name for name in other.requests[0].headers if name.startswith(("x-amz-", "authorization"))
        ]


def test_n18_bucket_of_another_region_is_requested_there() -> None:
    def answer(handler: Handler, request: Request) -> None:
        if "/eu-central-1/s3/" in request.headers["authorization"]:
            handler.part(DATA, request)
        else:
            handler.head(400, X_Amz_Bucket_Region="eu-central-1", Content_Length=0)

    with serving(answer) as server:
        options = {"endpoint": server.url(""), "access_key_id": "id", "secret_access_key": "s"}
        assert same(ingot.numpy.load_file("s3://b/k", storage_options=options))
        assert len([r for r in server.requests if "us-east-1" in r.headers["authorization"]]) == 1
