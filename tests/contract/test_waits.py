"""Every wait of the library ends: soon after an interrupt, and at its deadline.

`WAITS` is the table of all waits. A row starts a peer that sends nothing, or one byte at a time, and returns
the call that waits for it. Each row runs twice: Ctrl-C comes in the middle, and the deadline passes.

On an idle machine a call ends within 100 ms of an interrupt and within 1.1 times its limit. A busy machine
is allowed more: only a wait without an end fails. With INGOT_WAITS=measure the tests check the exact bounds;
with `-s` they print the measured times.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._write import directory as lock
from ingot.cli.commands import view
from support.proxies import Certificate, certificate, proxying
from support.servers import Answer, Handler, Request, good, serving

#: The timeout of each call, in seconds.
LIMIT = 1.0
OPTIONS = {
    "retries": 0,
    "connect_timeout": LIMIT,
    "stall_timeout": LIMIT,
    "timeout": LIMIT,
    "min_rate": 1000,
    "allow_private_redirects": True,
}
#: The options of calls that only an interrupt ends, which a busy machine may send late.
PATIENT = dict.fromkeys(("connect_timeout", "stall_timeout", "timeout"), 30.0)
IS_EXACT = os.environ.get("INGOT_WAITS") == "measure"
#: Seconds that other processes may keep a call from ending.
ALLOWANCE = 0.0 if IS_EXACT else 10.0

DATA = ingot.numpy.save({"a": np.arange(600_000), "b": np.arange(7)})

Call = Callable[[], object]


class Peers:
    """The peers of the rows. All end with the test."""

    def __init__(self, ending: ExitStack, cert: Callable[[], Certificate], folder: Path) -> None:
        self.ending, self.cert, self.folder = ending, cert, folder
        self.patch = ending.enter_context(pytest.MonkeyPatch.context())
        self.over = threading.Event()
        ending.callback(self.over.set)

    def stall(self, *_: object) -> None:
        self.over.wait(60)

    def drip(self, send: Callable[[bytes], object], data: bytes) -> None:
        with suppress(OSError):
            for byte in data:
                send(bytes([byte]))
                if self.over.wait(0.02):
                    return

    def serve(self, answer: Answer, **how: object) -> str:
        return self.ending.enter_context(serving(answer, **how)).url()

    def listen(self, talk: Callable[[socket.socket], object], scheme: str = "https") -> str:
        """Serve bytes as they are."""
        listener = self.ending.enter_context(socket.create_server(("127.0.0.1", 0)))

        def each(peer: socket.socket) -> None:
            with suppress(OSError), peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                talk(peer)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=each, args=(listener.accept()[0],), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        # A thread left in `accept` would take connections of a later socket with the same descriptor.
        self.ending.callback(accepting.join)
        self.ending.callback(listener.shutdown, socket.SHUT_RDWR)
        return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/m.safetensors"

    def tls(self, peer: socket.socket, *, drips: str) -> None:
        """Serve the file over TLS, with the handshake or the body one byte at a time."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = self.cert().context.wrap_bio(incoming, outgoing, server_side=True)

        def pump(step: Callable[[], bytes | int | None], what: str = "") -> bytes | int | None:
            while True:
                try:
                    found, is_done = step(), True
                except ssl.SSLWantReadError:
                    found, is_done = None, False
                data = outgoing.read()
                if what == drips:
                    self.drip(peer.sendall, data)
                else:
                    peer.sendall(data)
                if is_done:
                    return found
                more = peer.recv(65536)
                if not more:
                    raise OSError
                incoming.write(more)

        pump(session.do_handshake, "handshake")
        head = b""
        while b"\r\n\r\n" not in head:
            head += pump(lambda: session.read(65536))
        nbytes = min(len(DATA), 128 << 10)
        pump(lambda: session.write(part_head(0, nbytes)))
        pump(lambda: session.write(DATA[:nbytes]), "body")


def part_head(begin: int, end: int) -> bytes:
    return (
        f'HTTP/1.1 206 Part\r\nETag: "1"\r\nContent-Range: bytes {begin}-{end - 1}/{len(DATA)}\r\n'
        f"Content-Length: {end - begin}\r\n\r\n"
    ).encode()


def load(url: str, **options: object) -> Call:
    return lambda: ingot.numpy.load_file(url, storage_options={**OPTIONS, **options})


# Connections.


def full_backlog(peers: Peers) -> Call:
    """A listener with a full backlog, which does not complete a connection."""
    listener = peers.ending.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = peers.ending.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return load(f"http://127.0.0.1:{listener.getsockname()[1]}/m")


def tls_silent(peers: Peers) -> Call:
    return load(peers.listen(peers.stall))


def tls_drip(drips: str) -> Callable[[Peers], Call]:
    def row(peers: Peers) -> Call:
        url = peers.listen(lambda peer: peers.tls(peer, drips=drips))
        return load(url, ca_file=str(peers.cert().path))

    return row


def proxied(kind: str, talk: str) -> Callable[[Peers], Call]:
    """A proxy that takes a connection and is silent, or drips."""

    def row(peers: Peers) -> Call:
        talks = {
            "silent": peers.stall,
            "drips": lambda peer: peers.drip(peer.sendall, b"HTTP/1.1 200 Go on\r\nX: " + b"y" * 9999),
            "drips TLS": lambda peer: peers.tls(peer, drips="handshake"),
        }
        if kind == "https" and talk != "drips TLS":
            proxy = proxying(kind, tls=peers.cert().context, instead=talks[talk])
            url = peers.ending.enter_context(proxy).url()
        else:
            url = peers.listen(talks[talk], kind).removesuffix("/m.safetensors")
        peers.patch.setenv("all_proxy", url)
        return load("https://127.0.0.1:9/m", ca_file=str(peers.cert().path))

    return row


# Answers.


def server_silent(peers: Peers) -> Call:
    return load(peers.serve(peers.stall))


def save_silent(peers: Peers) -> Call:
    home = peers.serve(peers.stall).removesuffix("/model.safetensors")
    options = {**OPTIONS, "endpoint": home, "anonymous": True}
    return lambda: ingot.numpy.save_file(
        {"a": np.zeros(3)}, "s3://bucket/key", storage_options={**options, **PATIENT}
    )


def head_drips(peers: Peers) -> Call:
    head = part_head(0, 1000).replace(b"ETag", b"X: " + b"y" * 9999 + b"\r\nETag")
    return load(peers.serve(lambda handler, request: peers.drip(handler.raw, head)))


def body(stalls: bool) -> Answer:
    def answer(peers: Peers, handler: Handler, request: Request) -> None:
        begin, end = request.range
        if begin == 0:
            handler.part(DATA, request, ETag='"1"')
        else:
            handler.raw(part_head(begin, end))
            peers.stall() if stalls else peers.drip(handler.raw, DATA[begin:end])

    return answer


def body_of(call: Callable[[str, Peers], object], stalls: bool = True) -> Callable[[Peers], Call]:
    def row(peers: Peers) -> Call:
        url = peers.serve(lambda handler, request: body(stalls)(peers, handler, request))
        return lambda: call(url, peers)

    return row


def loaded(url: str, peers: Peers) -> object:
    return load(url)()


def whole_file_stalls(peers: Peers) -> Call:
    """A server without ranges that stops within the file."""

    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=64 << 20, ETag='"1"')
        handler.body(bytes(3 << 19))
        peers.stall()

    return lambda: ingot.download(peers.serve(answer), peers.folder / "whole", storage_options=OPTIONS)


def redirect_silent(peers: Peers) -> Call:
    there = peers.serve(peers.stall)

    def answer(handler: Handler, request: Request) -> None:
        handler.head(302, Location=there, Content_Length=0)

    return load(peers.serve(answer))


def told_to_wait(peers: Peers) -> Call:
    """The pause before another attempt, which is shorter than the deadline."""

    def answer(handler: Handler, request: Request) -> None:
        handler.head(503, Retry_After=30, Content_Length=0)

    return load(peers.serve(answer), retries=9, timeout=60)


def silent_shard(peers: Peers) -> str:
    """Return the URL of an index whose shard does not open."""
    index = json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors"}}).encode()

    def answer(handler: Handler, request: Request) -> None:
        if request.path.endswith(".json"):
            handler.part(index, request, ETag='"1"')
        else:
            peers.stall()

    return peers.serve(answer).replace("model.safetensors", "model.safetensors.index.json")


def shard_silent(peers: Peers) -> Call:
    """A shard that does not open."""
    return load(silent_shard(peers))


def shard_of_unknown_name_silent(peers: Peers) -> Call:
    """A shard that may have an alias of this name, and does not open."""
    url = silent_shard(peers)
    return lambda: ingot.open(url, storage_options=OPTIONS).shard_of("unknown")


# Credentials.


def service_silent(scheme: str, variable: str, path: str) -> Callable[[Peers], Call]:
    def row(peers: Peers) -> Call:
        service = peers.serve(peers.stall).removesuffix("/model.safetensors")
        named = service.removeprefix("http://") if variable == "GCE_METADATA_HOST" else service
        peers.patch.delenv("NO_GCE_CHECK", raising=False)
        peers.patch.setenv(variable, named + path)
        if variable == "GCE_METADATA_HOST":
            # google-auth reads it when it is imported.
            peers.patch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", named)
        store = peers.serve(good(DATA)).removesuffix("/model.safetensors")
        return load(f"{scheme}://bucket/key", endpoint=store)

    return row


def program_sleeps(peers: Peers) -> Call:
    # On a busy machine the first import takes longer than the limit.
    pytest.importorskip("botocore.session")
    config = peers.folder / "config"
    program = f"{sys.executable} -c 'import time; time.sleep(60)'"
    config.write_text(f"[default]\ncredential_process = {program}\n")
    peers.patch.setenv("AWS_CONFIG_FILE", str(config))
    store = peers.serve(good(DATA)).removesuffix("/model.safetensors")
    return load("s3://bucket/key", endpoint=store)


def another_threads_request(peers: Peers) -> Call:
    """Another thread asks a silent service for credentials, with a longer timeout."""
    asked = threading.Event()

    def silent(handler: Handler, request: Request) -> None:
        asked.set()
        handler.close_connection = True
        peers.stall()

    service = peers.serve(silent).removesuffix("/model.safetensors")
    peers.patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service}/creds")
    store = peers.serve(good(DATA)).removesuffix("/model.safetensors")
    patient = {"endpoint": store, "timeout": 50, "stall_timeout": 50}

    def first() -> None:
        with suppress(Exception):
            load("s3://bucket/key", **patient)()

    thread = threading.Thread(target=first)
    thread.start()
    # Callbacks run in reverse order: the service ends, and then this thread.
    peers.ending.callback(thread.join)
    peers.ending.callback(peers.over.set)
    assert asked.wait(30)
    return load("s3://bucket/key", endpoint=store)


# Objects.


def store_hangs(opens: bool) -> Callable[[Peers], Call]:
    def row(peers: Peers) -> Call:
        class Store:
            def head(self, path: str) -> dict[str, int]:
                if not opens:
                    peers.stall()
                return {"size": len(DATA)}

            def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
                if starts[0] > 0:
                    peers.stall()
                return [DATA[begin:end] for begin, end in zip(starts, ends, strict=True)]

        return lambda: ingot.numpy.load_file(ingot.Ranges(Store(), "m.safetensors"))

    return row


# Files of this machine. The waits for a GPU are in tests/devices and crates/io/src/device/tests, those for
# other ranks in tests/ranks.


def saved(peers: Peers) -> Path:
    path = peers.folder / "saved.safetensors"
    path.write_bytes(DATA)
    return path


def hold(peers: Peers, path: Path) -> None:
    """Lock a file as another process does."""
    fcntl.flock(peers.ending.enter_context(path.open("a")), fcntl.LOCK_EX)


def directory_locked(peers: Peers) -> Call:
    """Another save writes a checkpoint to the directory."""
    peers.patch.setattr(lock, "WAIT_SECONDS", LIMIT)
    there = peers.folder / "checkpoint"
    there.mkdir()
    hold(peers, there / lock.NAME)
    path = saved(peers)
    return lambda: ingot.split(path, there, 1 << 20)


def file_locked(peers: Peers) -> Call:
    """Another process edits the file."""
    path = saved(peers)
    hold(peers, path)
    return lambda: ingot.update_metadata(path, {"a": "b"})


def pipe_without_a_reader(peers: Peers) -> Call:
    path = peers.folder / "pipe"
    os.mkfifo(path)
    return lambda: ingot.numpy.save_file({"a": np.arange(7)}, path)


def background_save(wait: Callable[[ingot.SaveFuture], object]) -> Callable[[Peers], Call]:
    """A save in the background that waits for the reader of a pipe."""

    def row(peers: Peers) -> Call:
        path = peers.folder / "pipe"
        os.mkfifo(path)
        saving = ingot.numpy.save_file({"a": np.arange(7)}, path, background=True)
        peers.ending.callback(path.read_bytes)
        return lambda: wait(saving)

    return row


def viewer(peers: Peers) -> Call:
    return view._wait


@dataclass(frozen=True)
class Wait:
    """A wait of the library."""

    #: The thing to wait for.
    name: str
    #: Makes the peer, and returns the call that waits.
    prepare: Callable[[Peers], Call]
    #: Whether the wait has a deadline of ingot's.
    is_limited: bool = True


WAITS = [
    Wait("connection", full_backlog),
    Wait("TLS handshake, silent", tls_silent),
    Wait("TLS handshake, dripping", tls_drip("handshake")),
    Wait("TLS record of a body, dripping", tls_drip("body")),
    Wait("http proxy, silent", proxied("http", "silent")),
    Wait("http proxy, dripping", proxied("http", "drips")),
    Wait("https proxy, silent", proxied("https", "silent")),
    Wait("https proxy, dripping", proxied("https", "drips")),
    Wait("https proxy, TLS handshake dripping", proxied("https", "drips TLS")),
    Wait("answer, silent", server_silent),
    Wait("answer, head dripping", head_drips),
    Wait("body, silent", body_of(loaded)),
    Wait("body, dripping", body_of(loaded, stalls=False)),
    Wait("body of a hash", body_of(lambda url, _: ingot.hash(url, storage_options=OPTIONS))),
    Wait(
        "body of a merge",
        body_of(lambda url, at: ingot.merge([url], at.folder / "m", storage_options=OPTIONS)),
    ),
    Wait(
        "body of a download",
        body_of(lambda url, at: ingot.download(url, at.folder / "d", storage_options=OPTIONS)),
    ),
    # A lost answer is followed by a request that reads the object back, after the deadline.
    Wait("answer of a store to a save, silent", save_silent, is_limited=False),
    Wait("whole file from a server without ranges", whole_file_stalls),
    Wait("target of a redirect, silent", redirect_silent),
    Wait("pause before another attempt", told_to_wait, is_limited=False),
    Wait("shard, silent", shard_silent),
    Wait("shard, silent, for an unknown name", shard_of_unknown_name_silent),
    Wait("keys of a container, silent", service_silent("s3", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "/creds")),
    Wait("token of a machine, silent", service_silent("gs", "GCE_METADATA_HOST", "")),
    Wait("program that prints keys", program_sleeps),
    Wait("credential request of another thread", another_threads_request),
    Wait("store object, opening", store_hangs(opens=False), is_limited=False),
    Wait("store object, reading", store_hangs(opens=True), is_limited=False),
    Wait("lock of a directory", directory_locked),
    Wait("lock of a file", file_locked, is_limited=False),
    Wait("pipe without a reader", pipe_without_a_reader, is_limited=False),
    Wait("background save", background_save(lambda saving: saving.result()), is_limited=False),
    Wait("error of a background save", background_save(lambda saving: saving.exception()), is_limited=False),
    Wait("staging of a save", lambda _: ingot.SaveFuture().staged.result, is_limited=False),
    Wait("viewer", viewer, is_limited=False),
]


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Certificate]:
    made: list[Certificate] = []

    def one() -> Certificate:
        if not made:
            made.append(certificate(tmp_path_factory.mktemp("cert")))
        return made[0]

    return one


@pytest.fixture
def peers(cert: Callable[[], Certificate], tmp_path: Path) -> Iterator[Peers]:
    with ExitStack() as ending:
        peers = Peers(ending, cert, tmp_path)
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "GCE_", "GS_", "CLOUDSDK_")) or name.lower().endswith(
                "_proxy"
            ):
                peers.patch.delenv(name)
        peers.patch.setenv("HOME", str(tmp_path))
        peers.patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield peers


def interrupted_after(call: Call) -> float:
    """Send Ctrl-C while `call` waits. Return the seconds from the signal to the end of the call."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        # The signal is for the main thread: another thread would not interrupt its wait.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    timer = threading.Timer(LIMIT / 3, interrupt)

    def interrupted_call() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, seconds in PATIENT.items():
                patch.setitem(OPTIONS, name, seconds)
            timer.start()
            call()

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_call()
        return time.monotonic() - sent[0]
    finally:
        timer.cancel()


def timed_out_after(call: Call) -> float:
    begun = time.monotonic()
    with pytest.raises((ingot.StorageError, OSError)):
        call()
    return time.monotonic() - begun


def noted(name: str, what: str, seconds: float, most: float) -> None:
    print(f"{name:42} {what:11} {1000 * seconds:6.0f} ms")
    assert seconds <= most + ALLOWANCE


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_waits_end_after_an_interrupt(wait: Wait, peers: Peers) -> None:
    noted(wait.name, "interrupted", interrupted_after(wait.prepare(peers)), 0.1)


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait.is_limited], ids=lambda wait: wait.name)
def test_waits_end_at_the_deadline(wait: Wait, peers: Peers) -> None:
    noted(wait.name, "timed out", timed_out_after(wait.prepare(peers)), 1.1 * LIMIT)


#: Runs in a network namespace whose only name server never answers.
RESOLVING = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
sys.path[:0] = sys.argv[2:]
from contract.test_waits import interrupted_after, load, timed_out_after
measure = {"interrupted": interrupted_after, "timed out": timed_out_after}[sys.argv[1]]
print(measure(load("https://no-answer.example/m")), flush=True)
# The system's resolver goes on in its thread.
import os
os._exit(0)
"""


@pytest.mark.parametrize(("what", "most"), [("interrupted", 0.1), ("timed out", 1.1 * LIMIT)])
def test_waits_for_a_name_end(what: str, most: float, tmp_path: Path) -> None:
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None:
        pytest.skip("unshare and ip are not installed")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    alone = [unshare, "--map-root-user", "--mount", "--net", "sh", "-c"]
    begin = f"mount --bind resolv.conf /etc/resolv.conf && {ip} link set lo up"
    if subprocess.run([*alone, begin], cwd=tmp_path, capture_output=True, check=False).returncode != 0:
        pytest.skip("this system makes no network namespaces")
    program = [sys.executable, "-c", RESOLVING, what, str(Path(__file__).parents[1])]
    ended = subprocess.run(
        [*alone, f'{begin} && exec "$@"', "sh", *program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    noted("name server, silent", what, float(ended.stdout), most)


def test_waits_restart_the_deadline_with_payload(tmp_path: Path) -> None:
    """A file from a server without ranges may take longer than `timeout`, as long as it arrives."""
    data = ingot.numpy.save({"a": np.arange(800_000)})

    def answer(handler: Handler, request: Request) -> None:
        handler.head(200, Content_Length=len(data), ETag='"1"')
        with suppress(OSError):
            for begin in range(0, len(data), 1 << 18):
                handler.body(data[begin : begin + (1 << 18)])
                time.sleep(2.5 * LIMIT / (len(data) >> 18))

    options = {**OPTIONS, "timeout": 1.5 * LIMIT, "stall_timeout": 30}
    with serving(answer) as server:
        begun = time.monotonic()
        # The file is larger than one that is kept in memory.
        found = ingot.download(server.url(), tmp_path / "m", storage_options=options)
    assert found.nbytes == len(data)
    assert time.monotonic() - begun > 1.5 * LIMIT
