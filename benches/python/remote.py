"""Loading a whole file over loopback, HTTP and S3, against what others load it with. As a program: the table.

nginx serves the file, also as S3 does: it does not check signatures, which are made all the same. Each load
is a fresh process, timed after its imports; the sides take turns. A peer that is missing is left out.

Then the bytes that nginx sends for an eighth of a tensor, and numbers of requests: for 2,000 tensors of 1 KiB
with each option, compared with a load of all of them, and for ten rows of one tensor of a sharded model.
"""

import hashlib
import importlib.util
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import fresh
import options
from turns import in_turn

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000; log_format sizes '$body_bytes_sent';
  client_body_temp_path {folder}/tmp; proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp;
  uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
  server {{
    listen 127.0.0.1:{port} reuseport; root {folder}/www;
    location /counted/ {{ alias {folder}/www/bucket/; access_log {folder}/sizes.log sizes; }}
  }}
}}
"""


def ingot_http(port: int, folder: str) -> object:
    import ingot.numpy

    return ingot.numpy.load_file(f"http://127.0.0.1:{port}/bucket/model.safetensors")


def ingot_s3(port: int, folder: str) -> object:
    import ingot.numpy

    options = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "x", "secret_access_key": "x"}
    return ingot.numpy.load_file("s3://bucket/model.safetensors", storage_options=options)


def ingot_cached(port: int, folder: str) -> object:
    """From the cache. The first load, which fills it, is one of the rounds."""
    import ingot.numpy

    options = {"cache_dir": f"{folder}/cache"}
    return ingot.numpy.load_file(f"http://127.0.0.1:{port}/bucket/model.safetensors", storage_options=options)


def ingot_local(port: int, folder: str) -> object:
    """Into memory of its own, as from a URL."""
    import ingot.numpy

    return ingot.numpy.load_file(f"{folder}/www/bucket/model.safetensors", backend="pread")


def fsspec_http(port: int, folder: str) -> object:
    import fsspec
    import safetensors.numpy

    with fsspec.open(f"http://127.0.0.1:{port}/bucket/model.safetensors", block_size=8 << 20) as file:
        return safetensors.numpy.load(file.read())


def runai_s3(port: int, folder: str) -> object:
    import os

    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_MEMORY_LIMIT": "-1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file("s3://bucket/model.safetensors")
        return {name: tensor.clone().numpy() for name, tensor in streamer.get_tensors()}


def curl_http(port: int, folder: str) -> object:
    """Sixteen at once, into files of a memory file system where there is one; no tensor is made of them."""
    url = f"http://127.0.0.1:{port}/bucket/model.safetensors"
    nbytes = (Path(folder) / "www/bucket/model.safetensors").stat().st_size
    step = -(-nbytes // 16)
    shared = Path("/dev/shm")
    with options.place(shared if shared.is_dir() else None) as into:
        running = []
        for number, begin in enumerate(range(0, nbytes, step)):
            part = f"{begin}-{min(begin + step, nbytes) - 1}"
            running.append(subprocess.Popen(["curl", "-s", "-f", "-o", into / str(number), "-r", part, url]))
        for process in running:
            if process.wait() != 0:
                raise SystemExit("curl failed")
    return None


SIDES: dict[str, tuple[Callable[[int, str], object], tuple[str, ...]]] = {
    "ingot, HTTP": (ingot_http, ()),
    "curl, 16 at once, no tensors": (curl_http, ()),
    "fsspec + safetensors, HTTP": (fsspec_http, ("fsspec", "aiohttp")),
    "ingot, S3": (ingot_s3, ()),
    "ingot, from the cache": (ingot_cached, ()),
    "ingot, local file": (ingot_local, ()),
    "runai-model-streamer, S3": (runai_s3, ("runai_model_streamer", "runai_model_streamer_s3")),
}

#: The part of a matrix of 4096 rows and 8192 columns that one of eight ranks reads.
EIGHTHS = {"rows": (slice(512, 1024),), "columns": (slice(None), slice(1024, 2048))}

#: For each side, the side that it is compared with, and the required ratio.
OWED = {
    "curl, 16 at once, no tensors": ("ingot, HTTP", 0.8),
    "fsspec + safetensors, HTTP": ("ingot, HTTP", 3.0),
    "runai-model-streamer, S3": ("ingot, S3", 1.0),
    "ingot, local file": ("ingot, from the cache", 0.9),
}


def on_the_wire(port: int, folder: Path, index: tuple[slice, ...]) -> tuple[int, int]:
    """Bytes of a part of a tensor, and those that were sent for it, without the header."""
    import ingot

    log = folder / "sizes.log"

    def sent(requests: int) -> int:
        # nginx writes a line after it has answered.
        while len(log.read_text().split()) < requests:
            time.sleep(0.01)
        time.sleep(0.1)
        return sum(map(int, log.read_text().split()))

    earlier = len(log.read_text().split()) if log.exists() else 0
    file = ingot.safe_open(f"http://127.0.0.1:{port}/counted/model.safetensors", "np")
    while not log.exists():
        time.sleep(0.01)
    before = sent(earlier + 1)
    part = file.get_slice("layer.0")[index]
    return part.nbytes, sent(earlier + 2) - before


def requests(port: int, folder: Path) -> dict[str, int]:
    """Return the number of requests for 2,000 tensors of 1 KiB, whole and with each option."""
    import numpy

    import ingot.numpy

    url, log = f"http://127.0.0.1:{port}/counted/many.safetensors", folder / "sizes.log"
    values = numpy.random.default_rng(1).random((2000, 16, 16), numpy.float32)
    tensors = {f"layers.{n:04}": value for n, value in enumerate(values)}
    ingot.numpy.save_file(tensors, folder / "www/bucket/many.safetensors", durable=False)
    given = {
        "whole": {},
        "dtype": {"dtype": "F16"},
        "out": {"out": {name: numpy.empty_like(value) for name, value in tensors.items()}},
        "halves": {"slices": dict.fromkeys(tensors, numpy.s_[:, 8:])},
    }
    found = {}
    for what, arguments in given.items():
        before = len(log.read_text().split())
        loaded = ingot.numpy.load_file(url, **arguments)
        time.sleep(0.2)
        found[what] = len(log.read_text().split()) - before
        for name, value in tensors.items():
            expected = value[:, 8:] if what == "halves" else value
            assert (loaded[name] == expected.astype(loaded[name].dtype)).all(), f"{what}: bytes differ"
    return found


def ten_rows(port: int, folder: Path) -> int:
    """Return the number of requests for ten rows of one tensor of a model with eight files."""
    import numpy

    import ingot.numpy

    log = folder / "sizes.log"
    value = numpy.random.default_rng(2).random((1024, 256), numpy.float32)
    tensors = {f"layers.{n}": value + n for n in range(8)}
    whole = folder / "whole.safetensors"
    ingot.numpy.save_file(tensors, whole, durable=False)
    ingot.split(whole, folder / "www/bucket/sharded", max_shard_size=value.nbytes, durable=False)
    before = len(log.read_text().split())
    with ingot.safe_open(
        f"http://127.0.0.1:{port}/counted/sharded/model.safetensors.index.json", "np"
    ) as file:
        rows = file.get_slice("layers.5")[100:110]
    time.sleep(0.2)
    assert (rows == tensors["layers.5"][100:110]).all(), "ten rows: bytes differ"
    return len(log.read_text().split()) - before


def digest(loaded: object) -> str:
    if not isinstance(loaded, dict):
        return ""
    hashed = hashlib.sha256()
    for name in sorted(loaded):
        hashed.update(name.encode())
        hashed.update(memoryview(loaded[name]).cast("B"))
    return hashed.hexdigest()


def one(side: str, port: str, folder: str) -> dict:
    load, packages = SIDES[side]
    import numpy  # noqa: F401

    for package in packages:
        importlib.import_module(package)
    if side.startswith("ingot"):
        import ingot.numpy  # noqa: F401
    begun = time.perf_counter()
    loaded = load(int(port), folder)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "digest": digest(loaded)}


def is_there(side: str) -> bool:
    if side.startswith("curl"):
        return shutil.which("curl") is not None
    return all(importlib.util.find_spec(package) for package in SIDES[side][1])


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="the size of the file")
    given = parser.parse_args()
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise SystemExit("nginx is not installed")
    import numpy

    import ingot.numpy

    with options.place() as folder, socket.socket() as probe:
        folder.chmod(0o755)
        (folder / "www/bucket").mkdir(parents=True)
        random = numpy.random.default_rng(0)
        count = max(1, given.mib // 32)
        tensors = {f"layer.{n}": random.integers(0, 255, (4096, 8192), numpy.uint8) for n in range(count)}
        ingot.numpy.save_file(tensors, folder / "www/bucket/model.safetensors", durable=False)
        expected = digest(tensors)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port))
        server = subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf"])
        time.sleep(0.5)
        sides = [side for side in SIDES if is_there(side)]

        def measured(side: str) -> float:
            found = fresh.one(Path(__file__), side, port, folder)
            if found["digest"] not in ("", expected):
                raise SystemExit(f"{side}: other bytes than were saved")
            return found["seconds"]

        try:
            times = in_turn(given.rounds, measured, sides)
            parts = {what: on_the_wire(port, folder, index) for what, index in EIGHTHS.items()}
            asked = requests(port, folder)
            few = ten_rows(port, folder)
        finally:
            server.terminate()
            server.wait()
    medians = {side: statistics.median(times[side]) for side in sides}
    print(f"{nbytes / 2**20:.0f} MiB over loopback, {given.rounds} rounds, medians")
    for side in SIDES:
        if side not in medians:
            print(f"{side:32} not installed")
            continue
        line = f"{side:32} {medians[side]:8.3f} s {nbytes / medians[side] / 1e9:6.2f} GB/s"
        if side in OWED:
            ours, owed = OWED[side]
            line += f"   ingot: {medians[side] / medians[ours]:.2f}x (owed {owed}x)"
        print(line)
    for what, (wanted, sent) in parts.items():
        print(f"an eighth of a tensor, {what:9} {wanted:,} bytes wanted, {sent:,} on the wire")
    most = 2 * asked["whole"] + 2
    for what, count in asked.items():
        met = "ok" if count <= most else "MISSED"
        print(f"2,000 tensors of 1 KiB, {what:8} {count} requests (owed at most {most}): {met}")
    # The index, the header of the shard, the rows.
    met = "ok" if few <= 3 else "MISSED"
    print(f"ten rows of one tensor of eight files: {few} requests (owed at most 3): {met}")


if __name__ == "__main__":
    fresh.start(one, main)
