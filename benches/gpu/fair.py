"""Time loads onto a GPU, each loader in a process of its own and with settings for a file in the page cache.

Rows that end with "cold" drop the file from the cache before each load, and use the default settings.

A process imports its loader and torch, creates the context, loads once ("first"), and then `--rounds` times
without a pause, so that no loader frees its pools. Results own their memory, and one tensor is compared.
`--rc` names a folder with safetensors 0.9.0rc1 (`pip install --target`). A loader that is not installed has a
row with the reason. `--device cpu` tries the program without a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Load = Callable[[], Any]

TENSOR_NBYTES = 64 << 20
#: Bytes at the end of the last tensor that are compared.
COMPARED = 100_000

RUNAI = {"RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
BUFFERED = {**RUNAI, "RUNAI_STREAMER_FS_STRATEGY": "io_uring_buffered,sync_buffered"}

#: The file is dropped from the page cache before each load.
COLD = {"BENCH_COLD": "1"}

#: The name of each row, its loader, and its environment.
ROWS: list[tuple[str, str, dict[str, str]]] = [
    ("pinned copies", "pinned", {}),
    ("ingot", "load_file", {}),
    ("ingot, 16 MiB pinned", "load_file", {"INGOT_PINNED": str(16 << 20)}),
    ("ingot, 64 MiB pinned", "load_file", {"INGOT_PINNED": str(64 << 20)}),
    ("ingot, 8 readers", "load_file", {"INGOT_THREADS": "8"}),
    ("ingot, load_into tensors of the GPU", "load_into", {}),
    ("ingot, data at a page (align=4096)", "aligned", {}),
    ("safetensors", "safetensors", {}),
    ("safetensors 0.9rc1 prefetch, 8 threads", "prefetch", {"PREFETCH_THREADS": "8"}),
    ("safetensors 0.9rc1 prefetch, 16 threads", "prefetch", {"PREFETCH_THREADS": "16"}),
    ("instanttensor, buffered", "instanttensor", {"INSTANTTENSOR_BACKEND": "BUFFERED"}),
    ("instanttensor, default (past the cache)", "instanttensor", {}),
    ("fastsafetensors, buffered, cloned", "fastsafetensors", {"FASTSAFETENSORS_ODIRECT": "0"}),
    ("fastsafetensors, default (past the cache)", "fastsafetensors", {}),
    ("runai, buffered, to the device", "runai", BUFFERED),
    ("runai, default (past the cache)", "runai", RUNAI),
    ("flashpack, from a file of its own format", "flashpack", {}),
    ("ingot, cold", "load_file", COLD),
    ("safetensors, cold", "safetensors", COLD),
    ("safetensors 0.9rc1 prefetch, 16 threads, cold", "prefetch", {**COLD, "PREFETCH_THREADS": "16"}),
    ("instanttensor, cold", "instanttensor", COLD),
    ("fastsafetensors, cold", "fastsafetensors", COLD),
    ("runai, cold", "runai", {**COLD, **RUNAI}),
]


def pinned(device: str, path: str) -> Load:
    count = max(1, os.path.getsize(path) // TENSOR_NBYTES)
    host = [torch.empty(TENSOR_NBYTES, dtype=torch.uint8).random_() for _ in range(min(32, count))]
    if device != "cpu":
        host = [one.pin_memory() for one in host]
    turns = max(1, count // len(host))
    return lambda: [one.to(device, non_blocking=True, copy=True) for _ in range(turns) for one in host]


def load_file(device: str, path: str) -> Load:
    import ingot.torch

    return lambda: ingot.torch.load_file(path, device=device)


def load_into(device: str, path: str) -> Load:
    import ingot.torch

    target = {name: torch.empty_like(one) for name, one in load_file(device, path)().items()}

    def fill() -> Any:
        ingot.torch.load_into(target, path)
        return target

    return fill


def aligned(device: str, path: str) -> Load:
    return load_file(device, beside(path))


def safetensors(device: str, path: str) -> Load:
    import safetensors.torch as peer

    return lambda: peer.load_file(path, device=device)


def prefetch(device: str, path: str) -> Load:
    from safetensors import safe_open

    threads = int(os.environ["PREFETCH_THREADS"])

    def load() -> Any:
        with safe_open(path, "pt") as file, file.prefetch(device=device, threads=threads) as loader:
            return dict(loader)

    return load


def instanttensor(device: str, path: str) -> Load:
    from instanttensor import safe_open

    def load() -> Any:
        with safe_open(path, framework="pt", device=torch.device(device).index or 0) as file:
            return dict(file.tensors())

    return load


def fastsafetensors(device: str, path: str) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device(device), nogds=True)
        loader.add_filenames({0: [path]})
        files = loader.copy_files_to_device()
        found = {name: files.get_tensor(name).clone() for name in files.key_to_rank_lidx}
        files.close()
        loader.close()
        return found

    return load


def runai(device: str, path: str) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path, device=device)
            return dict(streamer.get_tensors())

    return load


def flashpack(device: str, path: str) -> Load:
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file
    from flashpack.serialization import pack_to_file

    packed = path.replace(".safetensors", ".flashpack")
    pack_to_file(load_file("cpu", path)(), packed, None)
    os.sync()

    def load() -> Any:
        storage, metadata = read_flashpack_file(packed, device)
        return dict(iterate_from_flash_tensor(storage, metadata))

    return load


LOADERS = [
    *(pinned, load_file, load_into, aligned, safetensors, prefetch),
    *(instanttensor, fastsafetensors, runai, flashpack),
]


def beside(path: str) -> str:
    """Return the path of the same tensors with data at a page."""
    return path.replace(".safetensors", ".aligned.safetensors")


def compare(found: dict[str, torch.Tensor], path: str, device: str) -> None:
    """Compare the end of the last tensor with the end of the file."""
    with open(path, "rb") as file:
        file.seek(-COMPARED, os.SEEK_END)
        end = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    last = found[max(found)]
    assert last.device.type == torch.device(device).type, last.device
    assert torch.equal(last.flatten()[-COMPARED:].view(torch.uint8).cpu(), end), "wrong bytes"


def run(name: str, device: str, path: str, rounds: int) -> None:
    """Time a loader in this process, and print the seconds of each load."""
    settle = torch.cuda.synchronize if device != "cpu" else lambda: None
    torch.empty(1, device=device)
    settle()
    load = next(one for one in LOADERS if one.__name__ == name)(device, path)
    times = []
    for _ in range(rounds + 1):
        if COLD.items() <= os.environ.items():
            drop(path)
        settle()
        begun = time.perf_counter()
        found = load()
        settle()
        times.append(time.perf_counter() - begun)
        if len(times) == 1 and isinstance(found, dict):
            compare(found, path, device)
        del found
    print(json.dumps(times))


def drop(path: str) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def write(path: str, count: int) -> None:
    """Write the file, and the same with data at a page, both synced."""
    import ingot.torch

    generator = torch.Generator().manual_seed(1)
    one = torch.randint(-(2**62), 2**62, (TENSOR_NBYTES // 8,), dtype=torch.int64, generator=generator)
    tensors = {f"layer.{number:05}": one.view(torch.uint8) for number in range(count)}
    ingot.torch.save_file({name: one.clone() for name, one in tensors.items()}, path)
    ingot.torch.save_file(
        {name: one.clone() for name, one in tensors.items()}, beside(path), write_options={"align": 4096}
    )
    os.sync()


def is_chosen(row: str, only: list[str]) -> bool:
    """Return whether a part of the name is chosen, or all of it by a part that ends with a dollar sign."""
    return not only or any(row == part[:-1] if part.endswith("$") else part in row for part in only)


def timed(name: str, variables: dict[str, str], given: argparse.Namespace, path: str) -> list[float] | str:
    """Return the seconds of each load of a loader in a new process, or the reason for a failure."""
    env = {**os.environ, **variables}
    if name == "prefetch" and given.rc:
        env["PYTHONPATH"] = given.rc + os.pathsep + env.get("PYTHONPATH", "")
    command = [sys.executable, __file__, "--loader", name, "--path", path]
    command += ["--device", given.device, "--rounds", str(given.rounds)]
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "more than 60 s"
    if ended.returncode:
        return ended.stderr.strip().rpartition("\n")[2][:110]
    times: list[float] = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=8192, help="the size of the file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="", help="parts of the names of rows, separated by semicolons")
    parser.add_argument("--rc", default="", help="the folder of safetensors 0.9.0rc1")
    parser.add_argument("--dir", help="where the files go")
    parser.add_argument("--loader", default="", help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loader:
        run(given.loader, given.device, given.path, given.rounds)
        return
    only = [part for part in given.only.split(";") if part]
    with tempfile.TemporaryDirectory(prefix="ingot-bench-", dir=given.dir) as folder:
        path = str(Path(folder) / "whole.safetensors")
        write(path, max(1, given.mib * 2**20 // TENSOR_NBYTES))
        nbytes = os.path.getsize(path)
        print(f"{'GB/s':46} {'first':>9} {'best':>9} {'median':>9}   over pinned copies (best)")
        limit = None
        for row, name, variables in ROWS:
            if not is_chosen(row, only):
                continue
            times = timed(name, variables, given, path)
            if isinstance(times, str):
                print(f"{row:46} - {times}", flush=True)
                continue
            first, *later = (nbytes / seconds / 1e9 for seconds in times)
            limit = max(later) if name == "pinned" else limit
            ratio = f"{max(later) / limit:10.3f}" if limit else ""
            median = statistics.median(later)
            print(f"{row:46} {first:9.1f} {max(later):9.1f} {median:9.1f}   {ratio}", flush=True)


if __name__ == "__main__":
    main()
