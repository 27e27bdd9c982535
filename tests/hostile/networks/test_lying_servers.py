"""Thousands of random wrong answers: a client gets right bytes or an error, soon, and leaks no secret.

`INGOT_ANSWERS` sets the number of answers. A failure names its seed and its number.
"""

from __future__ import annotations

import base64
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from support import lies
from support.lies import FILES, INDEX, SHARDS, TENSORS, Case
from support.record import note
from support.servers import Handler, Request, Server, serving

ANSWERS_OF_ONE_SEED = 3000
#: The longest time of a read in seconds: much more than the options below allow, since a machine may be busy.
LONGEST = 60
OPTIONS = {
    "retries": 2,
    "stall_timeout": 0.25,
    "timeout": 2,
    "connect_timeout": 2,
    "min_rate": 1000,
    "allow_private_redirects": True,
}
CLIENTS = 8


#: The start of every secret, and a password as it is sent.
MARK = "s3cret"
SENT = base64.b64encode(f"me:{MARK}".encode()).decode()


def shown(text: str) -> list[str]:
    """Return the secrets in a text, plain or encoded."""
    return re.findall(rf"(?:{MARK}|{SENT})\w*", text, re.IGNORECASE)


@dataclass
class Client:
    """One client: the file that it reads, its options and its secrets."""

    case: Case
    home: Server
    folder: Path

    def secret(self, kind: str) -> str:
        return f"{MARK}{kind}{self.case.number}"

    def url(self, name: str) -> str:
        path = f"/{self.case.number}/{name}"
        way = self.case.number % 4
        if way == 0:
            return self.home.url(path).replace("//", f"//me:{self.secret('password')}@")
        if way == 1:
            return self.home.url(f"{path}?sig={self.secret('query')}")
        return self.home.url(path)

    def options(self) -> dict[str, Any]:
        headers = {"X-Api-Key": self.secret("key"), "Cookie": f"session={self.secret('cookie')}"}
        way = self.case.number % 4
        return {**OPTIONS, "headers": headers, "token": self.secret("token") if way == 2 else False}


def tensors(found: dict[str, np.ndarray]) -> bytes:
    """Return the bytes read, which identify their version."""
    return b"".join(name.encode() + found[name].tobytes() for name in sorted(found))


def read_all(client: Client) -> bytes:
    with ingot.safe_open(client.url("m.safetensors"), "np", storage_options=client.options()) as file:
        assert not shown(f"{file!r} {file.path}")
        return (file.metadata() or {})["k"][:1].encode() + tensors(file.get_tensors())


def read_rows(client: Client) -> bytes:
    with ingot.safe_open(client.url("m.safetensors"), "np", storage_options=client.options()) as file:
        part = file.get_slice("b")
        return b"".join(part[rows].tobytes() for rows in (slice(3), slice(290, None), [0, 150, 299]))


def load_some(client: Client) -> bytes:
    url = client.url("m.safetensors")
    return tensors(ingot.numpy.load_file(url, keys=["a", "c"], storage_options=client.options()))


def fetch_ahead(client: Client) -> bytes:
    with ingot.safe_open(client.url("m.safetensors"), "np", storage_options=client.options()) as file:
        return tensors(dict(file.prefetch()))


def load_model(client: Client) -> bytes:
    return tensors(ingot.numpy.load_file(client.url(INDEX), storage_options=client.options()))


def download(client: Client) -> bytes:
    path = client.folder / "m.safetensors"
    try:
        ingot.download(client.url("m.safetensors"), path, storage_options=client.options())
    except BaseException:
        assert not path.exists()
        raise
    return path.read_bytes()


def download_model(client: Client) -> bytes:
    ingot.download(client.url(INDEX), f"{client.folder}/", storage_options=client.options())
    return b"".join((client.folder / shard).read_bytes() for shard in SHARDS)


def hashed(client: Client) -> bytes:
    return ingot.hash(client.url("m.safetensors"), storage_options=client.options()).encode()


def merged(client: Client) -> bytes:
    path = client.folder / "merged.safetensors"
    try:
        ingot.merge([client.url("m.safetensors")], path, storage_options=client.options())
    except BaseException:
        assert not os.listdir(client.folder)
        raise
    return tensors(ingot.numpy.load_file(path))


def described(client: Client) -> bytes:
    found = ingot.inspect(client.url("m.safetensors"), storage_options=client.options())
    assert not shown(repr(found))
    return repr(found.parameter_count).encode()


def of(*names: str) -> list[bytes]:
    return [tensors({name: version[name] for name in names or version}) for version in TENSORS]


def rows(version: int) -> bytes:
    array = TENSORS[version]["b"]
    return b"".join(array[which].tobytes() for which in (slice(3), slice(290, None), [0, 150, 299]))


# The possible results of each client: the bytes of one version, for a model a version of each file.
WHOLE = [version["m.safetensors"] for version in FILES]
RIGHT: dict[Callable[[Client], bytes], list[bytes]] = {
    read_all: [letter + found for letter, found in zip((b"A", b"B"), of(), strict=True)],
    read_rows: [rows(0), rows(1)],
    load_some: of("a", "c"),
    fetch_ahead: of(),
    load_model: [tensors({**one, "a": other["a"]}) for one in TENSORS for other in TENSORS],
    download: WHOLE,
    download_model: [one[SHARDS[0]] + other[SHARDS[1]] for one in FILES for other in FILES],
    hashed: [sha256(data).hexdigest().encode() for data in WHOLE],
    merged: of(),
    described: [],
}
USES = list(RIGHT)


@dataclass
class Outcome:
    case: Case
    use: str
    took: float
    #: "right", or the code of the error.
    verdict: str
    wrong: list[str] = field(default_factory=list)


def attempt(client: Client) -> Outcome:
    use = USES[client.case.number % len(USES)]
    begun, wrong = time.monotonic(), []
    try:
        found = use(client)
        verdict = "right"
        if RIGHT[use] and found not in RIGHT[use]:
            wrong.append(f"other bytes, {len(found)} of them")
    except (ingot.SafetensorError, OSError) as fault:
        verdict = getattr(fault, "code", None) or type(fault).__name__
        parts = [
            str(fault),
            repr(fault),
            repr(vars(fault)),
            repr(fault.args),
            *traceback.format_exception(fault),
        ]
        wrong += [f"{secret} stands in the error: {fault}" for secret in shown("\n".join(parts))]
        if not str(fault):
            wrong.append("an error that says nothing")
    except BaseException as fault:
        verdict = type(fault).__name__
        wrong.append("".join(traceback.format_exception(fault)))
    took = time.monotonic() - begun
    if took > LONGEST:
        wrong.append(f"took {took:.0f} seconds")
    return Outcome(client.case, use.__name__, took, verdict, wrong)


@dataclass
class World:
    """Two servers on two hosts. The path of a request has the number of a case."""

    cases: dict[int, Case] = field(default_factory=dict)
    home: Server = field(init=False)
    away: Server = field(init=False)

    def answer(self, handler: Handler, request: Request, elsewhere: str) -> None:
        number = re.match(r"/(\d+)/", request.path)
        if number is None:
            # The target of a bad redirect.
            handler.head(404, Content_Length=0)
        else:
            lies.send(lies.reply_to(self.cases[int(number[1])], request, elsewhere), handler)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()

    def at_home(handler: Handler, request: Request) -> None:
        world.answer(handler, request, world.away.url(""))

    def away(handler: Handler, request: Request) -> None:
        world.answer(handler, request, world.home.url(""))

    with serving(at_home) as world.home, serving(away, host="127.0.0.2") as world.away:
        yield world


def outcomes(world: World, folder: Path, seed: int, numbers: Iterator[int]) -> Iterator[Outcome]:
    """Return the results of these clients, several at a time."""

    def one(number: int) -> Outcome:
        place = folder / str(number)
        place.mkdir()
        case = world.cases[number] = Case(seed, number)
        outcome = attempt(Client(case, world.home, place))
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        return outcome

    with ThreadPoolExecutor(CLIENTS) as pool:
        yield from pool.map(one, numbers)


@dataclass
class Found:
    """The results of the answers of one seed."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    longest: float = 0.0


def tried(world: World, folder: Path, seed: int, least: int = ANSWERS_OF_ONE_SEED) -> Found:
    """Let clients read until the servers have sent `least` answers."""
    found, numbers = Found(), count()
    while found.answers < least:
        for outcome in outcomes(world, folder, seed, islice(numbers, 20 * CLIENTS)):
            found.verdicts[outcome.verdict] += 1
            found.longest = max(found.longest, outcome.took)
            about = f"seed {seed}, case {outcome.case.number}, {outcome.use}, {outcome.case.lies}: "
            found.wrong += [about + fault for fault in outcome.wrong]
        told = "\n".join(f"{request.path} {request.headers}" for request in world.away.requests)
        found.wrong += [f"seed {seed}: {secret} was sent to another host" for secret in shown(told)]
        found.answers += len(world.home.requests) + len(world.away.requests)
        world.home.requests.clear()
        world.away.requests.clear()
        world.cases.clear()
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("INGOT_ANSWERS", "3000")) // ANSWERS_OF_ONE_SEED))
def test_lies_are_refused_or_harmless(world: World, tmp_path: Path, seed: int) -> None:
    found = tried(world, tmp_path, seed)
    note("lying server, answers", found.answers, len(found.wrong), slowest=round(found.longest, 1))
    print(dict(found.verdicts.most_common()))
    assert not found.wrong, "\n".join(found.wrong[:20])
    # Some reads succeed and some fail.
    right, total = found.verdicts["right"], found.verdicts.total()
    assert total // 10 < right < total - total // 10


def test_world_finds_a_planted_lie(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both versions get the same version headers, which is an undetectable lie.
    monkeypatch.setattr(lies, "TAGS", ['"one"', '"one"'])
    monkeypatch.setattr(lies, "DATES", lies.DATES[:1] * 2)
    assert any("other bytes" in wrong for wrong in tried(world, tmp_path, 0).wrong)
