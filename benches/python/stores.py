"""Saving a file to a store of S3's protocol over loopback. As a program: the table.

`crates/remote/examples/sink.rs` is the store, which discards all bytes, and sends the raw rate of 16
connections. ingot saves from memory; boto3 uploads the same file from the page cache. Neither hashes the
bodies for the signatures, as over https; both send a CRC-32. Each save is a fresh process, timed after its
imports; the sides take turns. Before that each side saves once to a store that keeps the bytes, which are
compared.

Not measured: a network, and checks of the signatures, which are made all the same.
"""

import os
import statistics
import subprocess
import time
import urllib.request
from pathlib import Path

import fresh
import options
from turns import in_turn

NBYTES = 1 << 30
SINK = ("cargo", "build", "--release", "--package", "ingot-remote", "--example", "sink")
ROOT = Path(__file__).resolve().parents[2]
KEYS = {"region": "eu-west-1", "access_key_id": "x", "secret_access_key": "x"}


def save_by_ingot(port: str, path: str, key: str) -> dict:
    import ingot.numpy

    tensors = ingot.numpy.load_file(path)
    given = {"endpoint": f"http://127.0.0.1:{port}", **KEYS}
    return timed(lambda: ingot.numpy.save_file(tensors, f"s3://bucket/{key}", storage_options=given))


def save_by_boto3(port: str, path: str, key: str) -> dict:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="eu-west-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(s3={"payload_signing_enabled": False}, max_pool_connections=16),
    )
    how = TransferConfig(multipart_chunksize=8 << 20, max_concurrency=16)
    return timed(lambda: client.upload_file(path, "bucket", key, Config=how))


def timed(save) -> dict:
    before = os.times()
    _, found = fresh.measured(save)
    after = os.times()
    return {**found, "cpu": after.user + after.system - before.user - before.system}


SIDES = {"ingot": save_by_ingot, "boto3": save_by_boto3}


def one(side: str, port: str, path: str, key: str) -> dict:
    return SIDES[side](port, path, key)


def write_file(path: Path, nbytes: int) -> None:
    """Write a file of random bytes, in which no part equals another."""
    import numpy

    import ingot.numpy

    random = numpy.random.default_rng(0)
    ingot.numpy.save_file({"a": random.integers(0, 256, nbytes, numpy.uint8)}, path)


def check(side: str, port: str, path: Path) -> None:
    """Compare the bytes that a side sends with the file."""
    fresh.one(Path(__file__), side, port, path, "kept")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket/kept") as kept:
        if kept.read() != path.read_bytes():
            raise SystemExit(f"{side} sent other bytes than those of the file")


def main() -> None:
    given = options.parser(__doc__, 7, room="1 GiB", scaled=True, figures=True).parse_args()
    nbytes = int(NBYTES * given.scale)
    subprocess.run(SINK, check=True, cwd=ROOT)
    sink = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release", "examples", "sink")
    with (
        options.place(given.dir) as folder,
        subprocess.Popen([sink, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store,
    ):
        port = store.stdout.readline().strip()
        path = folder / "file"
        write_file(path, nbytes)

        def measure(side: str) -> dict:
            if side == "raw":
                return {"seconds": float(fresh.printed(sink, "send", port, nbytes))}
            return fresh.one(Path(__file__), side, port, path, "discarded")

        for side in SIDES:
            check(side, port, path)

        begun = time.time()
        found = in_turn(given.rounds, measure, ["raw", *SIDES])
        store.stdin.close()
    gib = nbytes / (1 << 30)
    rates = {side: statistics.median(gib / one["seconds"] for one in ran) for side, ran in found.items()}
    for side, rate in rates.items():
        cpu = statistics.median(one.get("cpu", 0) / gib for one in found[side])
        memory = max(one.get("peak_nbytes", 0) for one in found[side]) >> 20
        print(
            f"{side:6} {rate:6.2f} GiB/s   {cpu:5.2f} CPU seconds per GiB   {memory:4} MiB beside the tensors"
        )
    for side in ("raw", "boto3"):
        print(f"ingot / {side} {rates['ingot'] / rates[side]:.2f}")
    print(f"{given.rounds} rounds, {time.time() - begun:.0f} s")
    if given.json:
        import json

        given.json.write_text(json.dumps({"nbytes": nbytes, "rates": rates, "runs": found}, indent=1))


fresh.start(one, main)
