"""Measure the parts of a load onto a GPU, each by itself and then together, to find the limit of a machine.

It needs Linux, an NVIDIA GPU and a C compiler, but neither ingot nor torch. Sections F and M begin with
ingot's settings, and then change one at a time. Rates are in 10^9 bytes per second: the best of `--rounds`,
since other work only slows copies down, and the median. Parts of every load and save are compared with the
file; wrong bytes are a fault, and the program exits with 1. `--dry-run` tries the program on the simulated
driver of the tests, with small sizes.
"""

import argparse
import ctypes
import functools
import json
import mmap
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Step = Callable[[], Any]

MIB = 1 << 20
PAGE = 4096
HUGE_PAGE = 2 * MIB
POPULATE_WRITE = 23

#: ingot's slot for a chunk of 1 MiB, and the bytes of its slots together.
SLOT = MIB + PAGE
ARENA = 32 * MIB
#: The bytes of the largest arena that is tried.
LARGEST = 128 * MIB

#: Constants of the driver.
LEGACY_STREAM, NON_BLOCKING, WITHOUT_TIMES, PORTABLE, RELAXED = 1, 1, 2, 1, 2
ATTRIBUTES = {18: "integrated", 40: "copy engines", 99: "registers memory", 134: "memory node of the host"}

#: How a slot is filled, as in probe.c.
READ, MAPPED, NON_TEMPORAL, NOTHING = range(4)

KINDS = {"huge": "registered huge pages", "small": "registered 4 KiB pages", "driver": "cuMemHostAlloc"}

#: Changes of copies of 1 MiB from pinned memory.
LINKS: list[tuple[str, dict[str, Any]]] = [
    ("2 streams", {"streams": 2}),
    ("4 streams", {"streams": 4}),
    ("registered 4 KiB pages", {"kind": "small"}),
    ("cuMemHostAlloc", {"kind": "driver"}),
    ("from 8 MiB again and again", {"arena": 8 * MIB}),
    ("from 32 MiB again and again", {"arena": ARENA}),
    ("from the device", {"outward": 1}),
]

#: Changes of ingot's way to load a file.
LOADS: list[tuple[str, dict[str, Any]]] = [
    ("ingot", {}),
    ("registered 4 KiB pages", {"kind": "small"}),
    ("cuMemHostAlloc", {"kind": "driver"}),
    ("2 streams", {"streams": 2}),
    ("4 streams", {"streams": 4}),
    ("memcpy from a mapping", {"fill": MAPPED}),
    ("non-temporal stores", {"fill": NON_TEMPORAL}),
    ("non-temporal stores, slots in turn", {"fill": NON_TEMPORAL, "arena": LARGEST, "last_first": 0}),
    ("chunks that begin 2920 bytes into a page of the file", {"begin": 2920}),
]

#: Changes of ingot's way to save with `snapshot="host"`.
SNAPSHOTS: list[tuple[str, dict[str, Any]]] = [
    ("ingot's first snapshot: two slots for each thread, fresh huge pages", {}),
    ("one slot for each thread", {"held": 1}),
    ("8 threads", {"threads": 8}),
    ("4 threads", {"threads": 4}),
    ("slots of 2 MiB", {"chunk": 2 * MIB}),
    ("ingot's later snapshots: pages that were used before", {"fresh": 0}),
    ("pages that were used before, one slot for each thread", {"fresh": 0, "held": 1}),
]


class Way(ctypes.Structure):
    """A way for bytes to take, as in probe.c."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("file", "fill", "threads", "streams")),
        *((name, ctypes.c_int) for name in ("last_first", "outward", "held", "fresh")),
        *((name, ctypes.c_uint64) for name in ("begin", "nbytes", "chunk_nbytes", "piece_nbytes")),
        *((name, ctypes.c_void_p) for name in ("slots", "host")),
        *((name, ctypes.c_uint64) for name in ("slot_nbytes", "slot_count", "device", "used")),
    )


class Failed(Exception):
    """A call of the driver that failed, a read that failed, or wrong bytes."""


class Driver:
    """The driver's functions, and the loops of probe.c."""

    def __init__(self, path: str, folder: str) -> None:
        self.path, self.library = path, ctypes.CDLL(path)
        source, built = str(Path(__file__).with_suffix(".c")), f"{folder}/probe.so"
        command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", source, "-o", built, "-ldl"]
        subprocess.run(command, check=True)
        self.loops = ctypes.CDLL(built)
        self.loops.probe_load.restype = self.loops.probe_save.restype = ctypes.c_double

    def code(self, name: str, *given: Any) -> int:
        """Call a function, and return its code."""
        # Linux passes integers of all sizes and pointers in the same registers.
        wide = (ctypes.c_uint64(value) if isinstance(value, int) else value for value in given)
        return int(getattr(self.library, name)(*wide))

    def call(self, name: str, *given: Any) -> None:
        self.check(name, self.code(name, *given))

    def made(self, name: str, *given: Any) -> int:
        """Call a function that writes a result to its first parameter, and return the result."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *given)
        return result.value

    def check(self, name: str, code: int) -> None:
        if code:
            raise Failed(f"{name} returned {self.words(code)}")

    def words(self, code: int) -> str:
        found = ctypes.c_char_p()
        self.code("cuGetErrorName", code, ctypes.byref(found))
        return f"{code} {(found.value or b'').decode()}"

    def enter(self, context: int) -> None:
        self.call("cuCtxSetCurrent", context)
        if not self.loops.probe_open(self.path.encode(), ctypes.c_void_p(context)):
            raise Failed(f"{self.path} lacks a function that probe.c calls")

    def seconds(self, loop: str, way: Way) -> float:
        """Run a loop, and return its time."""
        seconds = float(getattr(self.loops, loop)(ctypes.byref(way)))
        name = ctypes.create_string_buffer(64)
        code = self.loops.probe_fault(name, ctypes.c_size_t(64))
        self.check(name.value.decode(), code)
        if seconds < 0:
            raise Failed(f"a read failed with error {-seconds:.0f}")
        return seconds


class Memory:
    """Memory of the host that begins at a huge page, of pages of one size."""

    def __init__(self, nbytes: int, *, is_huge: bool = True) -> None:
        self.map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.begin = -address % HUGE_PAGE
        self.start = address + self.begin

    def touch(self, begin: int, nbytes: int) -> None:
        """Request pages from the system, as ingot does before it registers a slot."""
        try:
            self.map.madvise(POPULATE_WRITE, self.begin + begin, nbytes)
        except OSError:
            ctypes.memset(self.start + begin, 0, nbytes)

    def drop(self) -> None:
        """Return all pages to the system."""
        self.map.madvise(mmap.MADV_DONTNEED)


def elapsed(work: Step) -> float:
    """Return the milliseconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def printed(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


class Probe:
    """The sections, and the rows that they print."""

    def __init__(self, given: argparse.Namespace, driver: Driver) -> None:
        self.given, self.driver, self.begun = given, driver, time.perf_counter()
        self.threads = min(16, len(os.sched_getaffinity(0)))
        self.nbytes = given.mib * MIB
        self.largest = ARENA if given.dry_run else LARGEST
        self.rows: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.arenas: dict[str, int] = {}
        #: Objects whose memory is in use until the end.
        self.kept: list[Any] = []
        self.section, self.limit, self.context, self.device = "", 0.0, 0, 0

    # Rows.

    def row(self, what: str, value: float | str, unit: str = "", note: str = "") -> None:
        self.rows.append({"section": self.section, "what": what, "value": value, "unit": unit, "note": note})
        shown = f"{value:.2f}" if isinstance(value, float) else value
        print(f"  {what:70} {shown:>9} {unit:4}  {note}".rstrip(), flush=True)

    def fault(self, what: str, reason: str) -> None:
        self.faults.append(f"{self.section}: {what}: {reason}")
        self.row(what, "failed", note=reason)

    def rate(self, what: str, way: Way, loop: str = "probe_load", before: Step | None = None) -> float:
        """Time a way and compare its bytes. Return its best rate, or 0 if it failed."""
        if time.perf_counter() - self.begun > self.given.seconds:
            self.row(what, "left out", note=f"{self.given.seconds:.0f} s are over")
            return 0.0
        rates: list[float] = []
        try:
            for _ in range(self.given.rounds):
                self.spoil(way)
                if before:
                    before()
                rates.append(way.nbytes / self.driver.seconds(loop, way) / 1e9)
                self.compare(way)
        except Failed as fault:
            self.fault(what, str(fault))
            return 0.0
        share = f", {max(rates) / self.limit:.3f} of the limit" if self.limit else ""
        slots = f", {way.used} slots" if way.used else ""
        self.row(what, max(rates), "GB/s", f"median {statistics.median(rates):.2f}{share}{slots}")
        return max(rates)

    # Bytes.

    def samples(self, way: Way) -> Iterable[int]:
        """Return positions to compare: none if the way only reads, or copies other bytes."""
        moves = way.device and (way.host if way.outward else way.fill != NOTHING)
        return [rank * (way.nbytes - PAGE) // 63 for rank in range(64)] if moves else []

    def spoil(self, way: Way) -> None:
        """Overwrite the samples at the destination of a way."""
        wrong = ctypes.create_string_buffer(b"\x55" * PAGE, PAGE)
        for at in self.samples(way):
            if not way.outward:
                self.driver.call("cuMemcpyHtoDAsync_v2", way.device + at, wrong, PAGE, LEGACY_STREAM)
            else:
                ctypes.memmove(way.host + at, wrong, PAGE)
        self.driver.call("cuStreamSynchronize", LEGACY_STREAM)

    def compare(self, way: Way) -> None:
        """Compare the samples at the destination of a way with the file."""
        found = ctypes.create_string_buffer(PAGE)
        for at in self.samples(way):
            if way.outward:
                ctypes.memmove(found, way.host + at, PAGE)
            else:
                self.driver.call("cuMemcpyDtoHAsync_v2", found, way.device + at, PAGE, LEGACY_STREAM)
                self.driver.call("cuStreamSynchronize", LEGACY_STREAM)
            if found.raw != os.pread(self.file, PAGE, way.begin + at):
                raise Failed(f"wrong bytes at {at}")

    # The file, and memory.

    @functools.cached_property
    def file(self) -> int:
        """The descriptor of a file in the page cache. No two of its chunks are equal."""
        file = tempfile.TemporaryFile(dir=self.given.dir)  # noqa: SIM115
        self.kept.append(file)
        period = os.urandom(min(16 * MIB, self.nbytes) + 4099)
        for _ in range(self.nbytes // len(period) + 2):
            file.write(period)
        file.flush()
        # Otherwise the system writes it back during a measurement.
        os.fsync(file.fileno())
        return file.fileno()

    def forget(self) -> None:
        """Drop the file from the page cache."""
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def arena(self, kind: str) -> int:
        """Return the address of pinned memory of a kind."""
        if kind not in self.arenas and kind == "driver":
            self.arenas[kind] = self.driver.made("cuMemHostAlloc", self.largest, PORTABLE)
        elif kind not in self.arenas:
            memory = Memory(self.largest, is_huge=kind == "huge")
            memory.touch(0, self.largest)
            self.driver.call("cuMemHostRegister_v2", memory.start, self.largest, PORTABLE)
            self.kept.append(memory)
            self.arenas[kind] = memory.start
        return self.arenas[kind]

    def way(self, *, chunk: int = MIB, arena: int = ARENA, kind: str = "huge", **changes: int) -> Way:
        """Return ingot's way to load the file, with changes."""
        way = Way(threads=self.threads, streams=1, last_first=1, nbytes=self.nbytes, device=self.device)
        way.file, way.slots, way.slot_nbytes = self.file, self.arena(kind), chunk + PAGE
        way.chunk_nbytes = way.piece_nbytes = chunk
        way.slot_count = min(arena, self.largest) // way.slot_nbytes
        for name, value in changes.items():
            setattr(way, name, value)
        return way

    # Sections.

    def machine(self) -> None:
        for name, _, value in (line.partition(":") for line in printed("lscpu").splitlines()):
            if re.match(r"\s*(Model name|CPU\(s\)|L[123]|NUMA node|Hypervisor)", name):
                self.row(name.strip(), value.strip())
        self.row("cores for this process", str(len(os.sched_getaffinity(0))))
        self.row("huge pages", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip())
        self.row("kernel", platform.release())
        query = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total"
        self.row("GPU", printed("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"))

    def start(self) -> None:
        driver = self.driver
        self.row("cuInit", elapsed(lambda: driver.call("cuInit", 0)), "ms")
        device = driver.made("cuDeviceGet", 0)
        begun = time.perf_counter()
        self.context = driver.made("cuDevicePrimaryCtxRetain", device)
        self.row("primary context", (time.perf_counter() - begun) * 1e3, "ms")
        driver.enter(self.context)
        for number, what in ATTRIBUTES.items():
            value = ctypes.c_int()
            code = driver.code("cuDeviceGetAttribute", ctypes.byref(value), number, device)
            self.row(f"attribute {number}: {what}", driver.words(code) if code else str(value.value))
        # A way may begin some bytes into a page.
        self.device = driver.made("cuMemAlloc_v2", self.nbytes + PAGE)

    def pinning(self) -> None:
        for mib in sorted({1, 32, self.largest // MIB}):
            self.pinned(f"cuMemHostAlloc, {mib} MiB", [mib * MIB], "driver")
            for kind in ("huge", "small"):
                for touches in (True, False):
                    state = "touched first" if touches else "untouched"
                    self.pinned(f"{KINDS[kind]}, {mib} MiB, {state}", [mib * MIB], kind, touches)
        slots = [SLOT] * (ARENA // SLOT)
        for threads in sorted({1, 4, self.threads}):
            what = f"ingot: {len(slots)} slots, touched and registered one by one"
            self.pinned(f"{what}, threads: {threads}", slots, "huge", threads=threads)

    def pinned(self, what: str, sizes: list[int], kind: str, touches: bool = True, threads: int = 1) -> None:
        """Time pinning memory of these sizes."""
        rounds = [self.pin(sizes, kind, touches, threads) for _ in range(self.given.rounds)]
        pinning, freeing = (min(times) for times in zip(*rounds, strict=True))
        note = f"{pinning / sum(sizes) * MIB:.3f} for each MiB, first {rounds[0][0]:.2f}"
        self.row(what, pinning, "ms", f"{note}, unpinning {freeing:.2f}")

    def pin(self, sizes: list[int], kind: str, touches: bool, threads: int) -> tuple[float, float]:
        """Pin memory, and unpin it again. Return both times."""
        driver, memory = self.driver, Memory(sum(sizes), is_huge=kind == "huge")
        starts = [0] * len(sizes)

        def pin(rank: int) -> None:
            begin = sum(sizes[:rank])
            if kind == "driver":
                starts[rank] = driver.made("cuMemHostAlloc", sizes[rank], PORTABLE)
                return
            if touches:
                memory.touch(begin, sizes[rank])
            starts[rank] = memory.start + begin
            driver.call("cuMemHostRegister_v2", starts[rank], sizes[rank], PORTABLE)

        unpin = "cuMemFreeHost" if kind == "driver" else "cuMemHostUnregister"
        all_started = threading.Barrier(threads, timeout=10)
        enter = functools.partial(driver.call, "cuCtxSetCurrent", self.context)
        with ThreadPoolExecutor(threads, initializer=enter) as pool:
            list(pool.map(lambda _: all_started.wait(), range(threads)))
            pinning = elapsed(lambda: list(pool.map(pin, range(len(sizes)))))
        return pinning, elapsed(lambda: list(map(functools.partial(driver.call, unpin), starts)))

    def link(self) -> None:
        copies: dict[str, Any] = {"fill": NOTHING, "threads": 1, "arena": LARGEST, "last_first": 0}
        blocks = (256, 512, 1024, 2048, 4096, 16384)
        self.limit = max(self.rate(f"{kib} KiB", self.way(**copies, chunk=kib << 10)) for kib in blocks)
        for what, changes in LINKS:
            self.rate(f"1024 KiB, {what}", self.way(**{**copies, **changes}))
        into_page = self.way(**copies, device=self.device + 1176)
        self.rate("1024 KiB, 1176 bytes into a page of the device", into_page)
        for last_first, arena in ((1, ARENA), (0, LARGEST)):
            reads = self.way(kind="small", device=0, arena=arena, last_first=last_first)
            self.beside(self.way(**copies), reads)

    def beside(self, copies: Way, reads: Way) -> None:
        """Time copies while readers fill other slots."""
        is_over = threading.Event()

        def read() -> list[float]:
            rates: list[float] = []
            while not rates or not is_over.is_set():
                rates.append(reads.nbytes / self.driver.seconds("probe_load", reads) / 1e9)
            return rates

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            self.rate(f"1024 KiB, while readers fill other slots, {order(reads)}", copies)
            is_over.set()
            self.row("    the readers meanwhile", statistics.median(reading.result()), "GB/s")

    def loads(self) -> None:
        for what, changes in LOADS:
            self.rate(what, self.way(**changes))
        for threads in (2, 4, 6, 8, 12):
            if threads < self.threads:
                self.rate(f"{threads} readers", self.way(threads=threads))
        for chunk in (MIB // 2, MIB, 2 * MIB, 4 * MIB):
            for arena in sorted({16 * MIB, ARENA, self.largest // 2, self.largest}):
                for last_first in (1, 0):
                    way = self.way(chunk=chunk, arena=arena, last_first=last_first)
                    if way.slot_count > self.threads:
                        what = f"slots of {chunk >> 10} KiB, {arena // MIB} MiB of them"
                        self.rate(f"{what}, {order(way)}", way)

    def captures(self) -> None:
        driver, memory = self.driver, Memory(MIB)
        stream, other = (driver.made("cuStreamCreate", NON_BLOCKING) for _ in range(2))
        event = driver.made("cuEventCreate", WITHOUT_TIMES)
        driver.call("cuEventRecord", event, other)
        calls = [
            ("cuEventQuery", event),
            ("cuEventRecord", event, other),
            ("cuStreamWaitEvent", other, event, 0),
            ("cuMemcpyHtoDAsync_v2", self.device, self.arena("huge"), MIB, other),
            ("cuStreamSynchronize", other),
            ("cuMemHostRegister_v2", memory.start, MIB, PORTABLE),
            ("cuMemHostUnregister", memory.start),
        ]
        for is_relaxed in (True, False):
            for call in calls:
                driver.call("cuStreamSynchronize", other)
                self.captured(stream, call, is_relaxed)
        driver.call("cuStreamSynchronize", other)
        # A capture may have refused the last call. Otherwise this one fails, which is no fault.
        driver.code("cuMemHostUnregister", memory.start)

    def captured(self, stream: int, call: tuple[Any, ...], is_relaxed: bool) -> None:
        """Make a call on a thread of its own during a capture, and print whether the capture survives it."""
        driver, graph = self.driver, ctypes.c_uint64()

        def aside() -> int:
            driver.call("cuCtxSetCurrent", self.context)
            if is_relaxed:
                driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))
            return driver.code(*call)

        driver.call("cuStreamBeginCapture_v2", stream, 0)
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(aside).result()
        ended = driver.code("cuStreamEndCapture", stream, ctypes.byref(graph))
        if graph.value:
            driver.call("cuGraphDestroy", graph.value)
        what = f"{call[0]}, {'relaxed' if is_relaxed else 'global'} mode"
        self.row(what, "lost" if ended else "kept", note=f"the call returned {driver.words(code)}")

    def readers(self) -> None:
        for threads in (1, 4, 8, 16):
            for mib in (8, 16, 32, 64, 128):
                way = self.way(threads=threads, arena=mib * MIB, last_first=0, device=0)
                if threads <= min(way.slot_count, self.threads) and mib * MIB <= self.largest:
                    self.rate(f"readers: {threads}, {order(way)}", way)
        self.rate("the last slot first", self.way(device=0))
        for what, fill in (("memcpy from a mapping", MAPPED), ("non-temporal stores", NON_TEMPORAL)):
            for arena in (16 * MIB, LARGEST):
                way = self.way(fill=fill, arena=arena, last_first=0, device=0)
                self.rate(f"{what}, {order(way)}", way)

    def snapshots(self) -> None:
        self.driver.seconds("probe_load", self.way())
        for what, changes in SNAPSHOTS:
            base = {"held": 2, "fresh": 1, "arena": LARGEST, "piece_nbytes": 4 * MIB, "outward": 1}
            way, memory = self.way(**{**base, **changes}), Memory(self.nbytes)
            way.host, way.threads = memory.start, min(way.threads, self.threads, way.slot_count // way.held)
            memory.touch(0, self.nbytes)
            self.rate(what, way, "probe_save", memory.drop if way.fresh else None)

    def cold(self) -> None:
        try:
            direct = os.open(f"/proc/self/fd/{self.file}", os.O_RDONLY | os.O_DIRECT)
        except OSError as refusal:
            self.row("reads past the page cache", str(refusal))
            return
        for kind, memory in KINDS.items():
            slot = (ctypes.c_char * MIB).from_address(self.arena(kind))
            try:
                outcome = f"{os.preadv(direct, [slot], 0)} bytes"
            except OSError as refusal:
                outcome = str(refusal)
            self.row(f"one read of 1 MiB past the page cache, into {memory}", outcome)
        nbytes = min(self.nbytes, 1024 * MIB)
        for threads in (4, 8, 16):
            for chunk in (MIB, 4 * MIB):
                way = self.way(chunk=chunk, arena=LARGEST, device=0, file=direct, nbytes=nbytes)
                way.threads = threads
                self.rate(f"the disk: {threads} readers, {chunk // MIB} MiB", way, before=self.forget)
        for what, file in (("ingot: past the page cache", direct), ("through the page cache", self.file)):
            self.rate(f"{what}, to the device", self.way(file=file, nbytes=nbytes), before=self.forget)
        os.close(direct)

    def summary(self) -> None:
        """Print the best changes of section F, and all faults."""
        rates = {row["what"]: row["value"] for row in self.rows if row["section"] == "F" and row["unit"]}
        ingot = rates.get("ingot", 0.0)
        print(f"\nIn short   [{time.perf_counter() - self.begun:.0f} s]")
        for what, rate in sorted(rates.items(), key=lambda one: -one[1])[:8]:
            print(f"  {rate / ingot if ingot else 0:.3f} times ingot: {what}")
        for fault in self.faults:
            print(f"  failed: {fault}")

    def run(self) -> None:
        """Run the chosen sections. One that fails does not stop the others."""
        for letter, (title, section) in SECTIONS.items():
            if self.given.only and letter not in f"B{self.given.only}":
                continue
            self.section = letter
            print(f"\n{letter}. {title}   [{time.perf_counter() - self.begun:.0f} s]", flush=True)
            try:
                section(self)
            except Exception as fault:
                self.fault("section", repr(fault))
                if letter == "B":
                    return


#: The sections in the order of their worth: the last ones are left out if time is short.
SECTIONS: dict[str, tuple[str, Callable[[Probe], None]]] = {
    "A": ("The machine", Probe.machine),
    "B": ("The driver: its start, attributes of the device, first calls", Probe.start),
    "C": ("Pinning, which the first load of a process pays for", Probe.pinning),
    "D": ("The link: copies of pinned memory alone; the best rate is the limit of loads", Probe.link),
    "F": ("Loads from the page cache: ingot's settings, then one change at a time", Probe.loads),
    "I": ("Calls of another thread while a stream is captured in global mode", Probe.captures),
    "E": ("Readers alone: more slots in turn are slower if the caches are too small", Probe.readers),
    "M": ("Background saves: from the device to memory of the host", Probe.snapshots),
    "G": ("Cold reads: from the disk, past the page cache and through it", Probe.cold),
}


def order(way: Way) -> str:
    return "the last one done first" if way.last_first else f"{way.slot_count} slots in turn"


def opened(is_dry: bool, folder: str) -> Driver:
    """Return the driver of the GPU, or the simulated one."""
    path = "libcuda.so.1"
    if is_dry:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests.devices.simulator import built

        path = str(built())
    try:
        return Driver(path, folder)
    except OSError as fault:
        sys.exit(f"the driver or the C compiler is missing: {fault}; --dry-run needs no GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="letters of sections")
    parser.add_argument("--mib", type=int, default=4096, help="the size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=210, help="rows that would begin later are left out")
    parser.add_argument("--dir", help="a folder on the disk, for the file")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--dry-run", action="store_true", help="use the simulated driver, and small sizes")
    given = parser.parse_args()
    if given.dry_run:
        given.mib, given.rounds = min(given.mib, 48), 1
    with tempfile.TemporaryDirectory(prefix="ingot-bench-") as folder:
        probe = Probe(given, opened(given.dry_run, folder))
    probe.run()
    probe.summary()
    if given.json:
        record = {"date": time.strftime("%F"), "arguments": sys.argv[1:], "limit": probe.limit}
        record |= {"rows": probe.rows, "faults": probe.faults}
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(bool(probe.faults))


if __name__ == "__main__":
    main()
