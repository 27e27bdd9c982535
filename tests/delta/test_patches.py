"""A patch makes the new version of the base, byte for byte.

``INGOT_DELTA_PAIRS=20000`` sets the number of random pairs, ``INGOT_DELTA_SEED`` the seed,
``INGOT_DELTA_KILLS`` the number of kills, and ``INGOT_DELTA_PATCHES`` the number of patches that become one.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import _native
from support.errors import raises

PAIRS = int(os.environ.get("INGOT_DELTA_PAIRS", "300"))
SEED = int(os.environ.get("INGOT_DELTA_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "U8": 8, "F8_E4M3": 8, "I16": 16, "F16": 16, "BF16": 16, "F32": 32,
    "I32": 32, "C64": 64, "F64": 64, "U64": 64,
}  # fmt: skip


def write(
    path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: Any, checksums: Any
) -> None:
    """Write a file of tensors, each a dtype, a shape and bytes."""
    views = {
        name: {"dtype": dtype, "shape": shape, "data": bytes(data)}
        for name, (dtype, shape, data) in tensors.items()
    }
    ingot.serialize_file(views, path, metadata, checksums=checksums, durable=False)


def random_tensor(dice: random.Random) -> tuple[str, list[int], bytes]:
    dtype = dice.choice(list(BITS))
    shape = dice.choice([[], [0], [8], [16, 4], [2, 3, 8], [4096], [33, 16], [1, 40_000]])
    if BITS[dtype] < 8 and math.prod(shape) % 4:
        shape = [8]
    return dtype, shape, dice.randbytes(math.prod(shape) * BITS[dtype] // 8)


def changed(dice: random.Random, tensor: tuple[str, list[int], bytes]) -> tuple[str, list[int], bytes]:
    dtype, shape, data = tensor
    width = max(BITS[dtype] // 8, 1)
    count = len(data) // width
    new = bytearray(data)
    kind = dice.random()
    if not count or kind < 0.3:
        return tensor
    if kind < 0.4:
        return random_tensor(dice)
    if kind < 0.45:
        return dtype, [math.prod(shape)], data
    if kind < 0.6:
        begin = dice.randrange(count)
        end = min(count, begin + dice.randint(1, max(count // 3, 1)))
        new[begin * width : end * width] = dice.randbytes((end - begin) * width)
    elif kind < 0.7:
        new = bytearray(dice.randbytes(len(data)))
    elif kind < 0.8 and dtype in ("F32", "F64"):
        # A NaN with other bits, and the sign of a zero.
        new[-1] ^= 0x80
    else:
        for at in dice.sample(range(count), max(1, int(count * dice.choice([0.001, 0.02, 0.1, 0.5])))):
            new[at * width] ^= dice.randint(1, 255)
    return dtype, shape, bytes(new)


def random_pair(dice: random.Random) -> list[dict[str, tuple[str, list[int], bytes]]]:
    names = ["a", "b/c", "gaps/a", 'ü"', "values/x", "model.layers.0.weight"]
    old = {name: random_tensor(dice) for name in dice.sample(names, dice.randint(0, 5))}
    new = {name: changed(dice, tensor) for name, tensor in old.items() if dice.random() < 0.9}
    if dice.random() < 0.3:
        new[dice.choice(names)] = random_tensor(dice)
    return [old, new]


def save_pair(dice: random.Random, folder: Path) -> list[Path]:
    """Write two versions, each a file or a directory of shards."""
    checksums = dice.choice([None, "xxh3", "blake3"])
    paths = []
    is_sharded = dice.random() < 0.2
    for name, tensors in zip(("old", "new"), random_pair(dice), strict=True):
        metadata = {"step": name} if dice.random() < 0.3 else None
        path = folder / f"{name}.safetensors"
        write(path, tensors, metadata, checksums)
        if is_sharded and len(tensors) > 1:
            path, single = folder / name, path
            ingot.split(single, path, max_shard_size=1)
            # Tensors without bytes are in one file, which has no index.
            path = path if len(list(path.iterdir())) > 1 else path / "model.safetensors"
        paths.append(path)
    return paths


def content(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {one.name: one.read_bytes() for one in path.iterdir()}
    return {"": path.read_bytes()}


def cleared(folder: Path) -> Path:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    return folder


def apply_to_random_pair(dice: random.Random, folder: Path, *, is_twice: bool) -> str | None:
    """Check the patch of a random pair. Return the code of the error in place."""
    old, new = save_pair(dice, cleared(folder))
    patch, result = folder / "patch.safetensors", folder / "result"
    ingot.delta.diff(old, new, patch, durable=False)
    assert ingot.delta.apply(old, patch, result, verify=True, durable=False)
    assert content(result) == content(new)
    if is_twice:
        again = folder / "again.safetensors"
        ingot.delta.diff(old, new, again, threads=1, durable=False)
        assert again.read_bytes() == patch.read_bytes()
    try:
        ingot.delta.apply(old, patch, in_place=True, durable=False)
    except ingot.SaveError as error:
        return error.code
    assert content(old) == content(new)
    assert not ingot.delta.apply(old, patch, in_place=True, durable=False)
    return None


def test_apply_makes_the_new_version_of_random_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nINGOT_DELTA_SEED={SEED}: {PAIRS} pairs", flush=True)
    dice, number = random.Random(SEED), 0
    codes = Counter[str | None]()
    try:
        for number in range(PAIRS):
            codes[apply_to_random_pair(dice, tmp_path, is_twice=number % 4 == 0)] += 1
    except BaseException:
        print(f"INGOT_DELTA_SEED={SEED}: pair {number} failed")
        raise
    assert codes.keys() == {None, "not-in-place"}
    with capsys.disabled():
        in_place = codes[None]
        print(f"INGOT_DELTA_SEED={SEED}: {PAIRS} pairs, {in_place} in place, 0 wrong", end=" ")


COMPOSED = r"""
import resource, sys
import ingot

resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
folder, count = sys.argv[1], int(sys.argv[2])
patches = [f"{folder}/patch-{step}.safetensors" for step in range(count)]
ingot.delta.compose(patches, f"{folder}/composed.safetensors", durable=False)
"""
PATCHES = int(os.environ.get("INGOT_DELTA_PATCHES", "200"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of open files")
def test_compose_opens_few_of_many_patches(tmp_path: Path) -> None:
    tensors = {"a": ("U16", [500], bytes(1000)), "b": ("U8", [9], bytes(9))}
    first, old, new = (tmp_path / f"{name}.safetensors" for name in ("first", "old", "new"))
    write(first, tensors, None, "xxh3")
    write(old, tensors, None, "xxh3")
    for step in range(PATCHES):
        data = bytearray(tensors["a"][2])
        data[step * 7 % 1000] += 1
        tensors["a"] = ("U16", [500], bytes(data))
        write(new, tensors, None, "xxh3")
        ingot.delta.diff(old, new, tmp_path / f"patch-{step}.safetensors", step=step, durable=False)
        new.replace(old)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPOSED, str(tmp_path), str(PATCHES)]
    subprocess.run(command, check=True, env=environment)
    ingot.delta.apply(first, tmp_path / "composed.safetensors", new, verify=True)
    assert new.read_bytes() == old.read_bytes()


def test_items_are_the_changes_in_bounded_parts(tmp_path: Path) -> None:
    old = {"a": numpy.zeros(1000, "f4"), "b": numpy.zeros((4, 5), "i2"), "c": numpy.ones(3, "u1")}
    new = {name: array.copy() for name, array in old.items()}
    new["a"][[0, 1, 400, 999]] = [1, 2, 3, -0.0]
    new["b"][:] = 7
    for name, arrays in (("old", old), ("new", new)):
        ingot.numpy.save_file(arrays, tmp_path / f"{name}.safetensors")
    patch = tmp_path / "patch.safetensors"
    ingot.delta.diff(tmp_path / "old.safetensors", tmp_path / "new.safetensors", patch)
    for max_nbytes in (1, 100, 16 << 20):
        found = {name: array.copy().reshape(-1) for name, array in old.items()}
        for item in ingot.delta.items(patch, max_nbytes=max_nbytes):
            values = numpy.frombuffer(item.values, found[item.name].dtype)
            positions: Any = item.positions
            if positions is None:
                positions = range(item.begin, item.begin + len(values))
            found[item.name][numpy.asarray(positions)] = values
        for name, array in new.items():
            assert found[name].tobytes() == array.tobytes()
    described = ingot.delta.info(patch)
    assert {name: one.codec for name, one in described.tensors.items()} == {"a": "gaps", "b": "whole"}


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Three versions, and the two patches between them."""
    paths = []
    array = numpy.random.default_rng(0).integers(0, 60_000, 100_000, dtype="u2")
    for step in range(3):
        paths.append(tmp_path / f"{step}.safetensors")
        ingot.numpy.save_file({"a": array, "b": array[:8]}, paths[-1], checksums="xxh3")
        array = array.copy()
        array[step :: 50 + step] += 1
    for step in range(2):
        paths.append(tmp_path / f"patch-{step}.safetensors")
        ingot.delta.diff(paths[step], paths[step + 1], paths[-1])
    return paths


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fault", ["order", "base", "data", "truncated", "digest", "no patch"])
def test_apply_refuses_before_a_byte_changes(versions: list[Path], fault: str, in_place: bool) -> None:
    base, other, _, patch, later = versions
    expected: tuple[type[Exception], str | None] = (ingot.IntegrityError, "wrong-base")
    verify = False
    if fault == "order":
        patch = later
    elif fault == "base":
        base = versions[2]
    elif fault == "data":
        # The header is the base's, but one byte of the data differs.
        data = bytearray(base.read_bytes())
        data[-5] ^= 1
        base.write_bytes(data)
        verify = True
    elif fault == "truncated":
        patch.write_bytes(patch.read_bytes()[:-3])
        expected = (ingot.HeaderError, "truncated")
    elif fault == "digest":
        data = bytearray(patch.read_bytes())
        data[-5] ^= 1
        patch.write_bytes(data)
        expected = (ingot.IntegrityError, "digest-mismatch")
    else:
        patch = other
        expected = (ingot.IntegrityError, "invalid-patch")
    before = base.read_bytes()
    destination = None if in_place else base.with_name("result.safetensors")
    with pytest.raises(expected[0]) as raised:
        ingot.delta.apply(base, patch, destination, in_place=in_place, verify=verify)
    assert getattr(raised.value, "code", None) == expected[1]
    assert base.read_bytes() == before
    assert destination is None or not destination.exists()


def forged(patch: Path, **changes: bytes) -> None:
    """Replace tensors of a patch, with digests that are right."""
    file = ingot.open(patch)
    views = {}
    for info in map(file.info, file):
        data = changes.get(info.name.partition("/")[0])
        if data is None:
            data = file[info.name].tobytes()
        views[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data": data}
        if info.name.partition("/")[0] in changes:
            views[info.name]["shape"] = [len(data) * info.shape[0] // max(info.nbytes, 1)]
    metadata = file.metadata()
    file.close()
    assert metadata is not None
    ingot.serialize_file(views, patch, checksums="xxh3")
    ingot.update_metadata(patch, {"ingot.delta": metadata["ingot.delta"]})


HOSTILE = {
    "width 0": b"\0",
    "width 33": b"\x21" + bytes(4),
    "no numbers": b"\x08",
    "beyond the end": b"\x20" + (1 << 30).to_bytes(4, "little"),
    "64 bits": b"\x20" + b"\xff" * 400,
    "too few": b"\x08" + bytes(10),
    "too many": b"\x08" + bytes(200_000),
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_apply_refuses_hostile_positions(versions: list[Path], name: str) -> None:
    base, _, _, patch, _ = versions
    assert ingot.delta.info(patch).tensors["a"].codec == "gaps"
    forged(patch, gaps=HOSTILE[name])
    before = base.read_bytes()
    for destination in (None, base.with_name("result.safetensors")):
        with pytest.raises(ingot.IntegrityError) as raised:
            ingot.delta.apply(base, patch, destination, in_place=destination is None)
        assert raised.value.code == "invalid-patch", raised.value
    assert base.read_bytes() == before


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("files", ["../a.safetensors", "b.safetensors"]),
        ("files", ["a.safetensors", "a.safetensors"]),
        ("files", ["model.safetensors.index.json", "b.safetensors"]),
        ("index", "../model.safetensors.index.json"),
        ("index", "/model.safetensors.index.json"),
        ("index", "."),
        ("index", ""),
    ],
)
def test_a_patch_with_hostile_names_of_files_is_rejected(tmp_path: Path, member: str, value: Any) -> None:
    old, new, patch = tmp_path / "old", tmp_path / "new", tmp_path / "patch.safetensors"
    for folder, number in ((old, 1), (new, 2)):
        array = numpy.full(100, number, "u2")
        ingot.numpy.save_file({"a": array, "b": array}, tmp_path / "one.safetensors", overwrite=True)
        ingot.split(tmp_path / "one.safetensors", folder, max_shard_size=200)
    ingot.delta.diff(old, new, patch)
    with ingot.open(patch) as file:
        record = json.loads((file.metadata() or {})["ingot.delta"])
    assert member in record
    ingot.update_metadata(patch, {"ingot.delta": json.dumps({**record, member: value})})
    before = content(old)
    for call in (
        lambda: ingot.delta.info(patch),
        lambda: ingot.delta.items(patch),
        lambda: ingot.delta.apply(old, patch, tmp_path / "result"),
        lambda: ingot.delta.apply(old, patch, in_place=True),
        lambda: ingot.delta.compose([patch], tmp_path / "composed.safetensors"),
    ):
        with raises(ingot.IntegrityError, "file of the result|files of the result", code="invalid-patch"):
            call()
    assert content(old) == before
    assert not (tmp_path / "result").exists()


def test_in_place_names_the_patch_that_was_not_finished(versions: list[Path]) -> None:
    base, new, _, patch, later = versions
    whole = base.read_bytes()
    ids = [ingot.delta.info(patch).id, ingot.delta.info(patch).base]
    short = [bytes.fromhex(one[:32]) for one in ids]
    (base.parent / "ids").write_bytes(short[1])
    short.append(bytes.fromhex(ingot.hash(base.parent / "ids", "blake3")[:32]))
    mark = b"\xffpatch\r\n" + bytes(4) + b"".join(short) + str(patch).encode() + b"\0"
    base.write_bytes(mark + whole[len(mark) :])
    with pytest.raises(ingot.HeaderError, match="ingot delta apply --in-place"):
        ingot.open(base)
    with raises(ingot.StorageError, code="unfinished-patch") as raised:
        ingot.delta.apply(base, later, in_place=True)
    assert f"{ids[0][:16]}… ({patch})" in str(raised.value)
    assert ingot.delta.apply(base, patch, in_place=True)
    assert base.read_bytes() == new.read_bytes()


def test_in_place_refuses_files_with_other_names(versions: list[Path]) -> None:
    base, *_, patch, _ = versions
    os.link(base, base.with_name("other.safetensors"))
    before = base.read_bytes()
    with raises(ingot.SaveError, code="not-in-place"):
        ingot.delta.apply(base, patch, in_place=True)
    assert base.read_bytes() == before


def test_apply_needs_one_destination(versions: list[Path]) -> None:
    base, *_, patch, _ = versions
    for options in ({}, {"destination": "x", "in_place": True}):
        with raises(ingot.OptionError, code="destination-or-in-place"):
            ingot.delta.apply(base, patch, **options)  # type: ignore[arg-type]


KILLED = r"""
import os, random, signal, sys, time
import ingot

for line in sys.stdin:
    base, patch, delay = line.rstrip("\n").split("\t")
    child = os.fork()
    if not child:
        try:
            ingot.delta.apply(base, patch, in_place=True)
        finally:
            os._exit(0)
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""
KILLS = int(os.environ.get("INGOT_DELTA_KILLS", "40"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_in_place_is_finished_by_the_next_call_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)
    array = numpy.zeros(1_000_000, "u2")
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, value in ((old, 0), (new, 1)):
        array[:: 37 + value] += value
        ingot.numpy.save_file({"a": array, "b": array[:9]}, tmp_path / "one.safetensors", checksums="xxh3")
        ingot.split(tmp_path / "one.safetensors", folder, max_shard_size=100)
    patch = tmp_path / "patch.safetensors"
    ingot.delta.diff(old, new, patch)
    expected, before = content(new), content(old)
    outcomes = dict.fromkeys(("base", "unreadable", "result"), 0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        longest = 0.02
        for _ in range(KILLS):
            for name, data in before.items():
                (old / name).write_bytes(data)
            process.stdin.write(f"{old}\t{patch}\t{dice.uniform(0, longest)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            found = content(old)
            outcome = "base" if found == before else "result" if found == expected else "unreadable"
            outcomes[outcome] += 1
            longest *= 0.8 if outcome == "result" else 1.1
            if outcome == "unreadable":
                with pytest.raises(ingot.SafetensorError):
                    ingot.numpy.load_file(old)
            assert ingot.delta.apply(old, patch, in_place=True) == (outcome != "result")
            assert content(old) == expected
        process.stdin.close()
    with capsys.disabled():
        print(f"\n{KILLS} kills: {outcomes}", end=" ")


def test_in_place_by_two_writers_at_once_is_one_result(versions: list[Path]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    base, new, _, patch, _ = versions
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(ingot.delta.apply, base, patch, in_place=True) for _ in range(2)]
    assert sorted(one.result() for one in found) == [False, True]
    assert base.read_bytes() == new.read_bytes()


def test_patches_of_buffers_and_open_files(versions: list[Path]) -> None:
    base, new, _, patch, _ = versions
    result = base.with_name("result.safetensors")
    with open(patch, "rb") as file:
        ingot.delta.apply(bytearray(base.read_bytes()), file, result)
    assert result.read_bytes() == new.read_bytes()


@pytest.mark.parametrize("side", [0, 1])
def test_diff_refuses_versions_with_one_header_of_which_one_is_corrupt(
    versions: list[Path], side: int
) -> None:
    base = versions[0]
    other, patch = base.with_name("other.safetensors"), base.with_name("patch.safetensors")
    other.write_bytes(base.read_bytes())
    assert ingot.delta.diff(base, other, patch) is None
    patch.unlink()
    corrupt = (base, other)[side]
    data = bytearray(corrupt.read_bytes())
    data[-1] ^= 1
    corrupt.write_bytes(data)
    with raises(ingot.IntegrityError, code="digest-mismatch") as raised:
        ingot.delta.diff(base, other, patch)
    assert str(corrupt) in str(raised.value)
    assert "tensor" in str(raised.value)
    assert not patch.exists()


def test_version_id_is_the_digest_of_the_header(versions: list[Path]) -> None:
    base, *_, patch, _ = versions
    checkpoint = _native.Checkpoint.open(base)
    assert _native.version_id(checkpoint) == ingot.delta.info(patch).base


@pytest.mark.parametrize("is_sharded", [False, True])
def test_versions_without_checksums_have_ids_of_their_data(tmp_path: Path, is_sharded: bool) -> None:
    paths = [tmp_path / name for name in ("0.safetensors", "1.safetensors", "2.safetensors")]
    for value, path in enumerate(paths):
        tensors = {"a": numpy.full(1000, value, "u2"), "b": numpy.full(1000, value, "u2")}
        ingot.numpy.save_file(tensors, path, checksums=None)
        if is_sharded:
            ingot.split(path, path.with_suffix(""), max_shard_size=2000)
            paths[value] = path.with_suffix("")
    patches = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for patch, base, new in zip(patches, paths, paths[1:], strict=False):
        ingot.delta.diff(base, new, patch)
    first, second = map(ingot.delta.info, patches)
    assert len({first.base, first.result, second.result}) == 3
    assert first.result == second.base
    for path, version in zip(paths, (first.base, first.result, second.result), strict=True):
        assert _native.version_id(_native.Checkpoint.open(path)) == version
    with raises(ingot.IntegrityError, code="wrong-base") as raised:
        ingot.delta.apply(paths[0], patches[1], in_place=True)
    assert f"expected {first.result}, found {first.base}" in str(raised.value)
    assert ingot.delta.apply(paths[0], patches[0], in_place=True)
    assert not ingot.delta.apply(paths[0], patches[0], in_place=True)
    assert content(paths[0]) == content(paths[1])


def test_diff_and_compose_refuse_names_of_another_format(tmp_path: Path) -> None:
    for number in range(2):
        ingot.numpy.save_file({"a": numpy.full(9, number)}, tmp_path / f"{number}.st")
    ingot.delta.diff(tmp_path / "0.st", tmp_path / "1.st", tmp_path / "patch.safetensors")
    with raises(ingot.OptionError, code="patch-name", path=str(tmp_path / "p.bt")):
        ingot.delta.diff(tmp_path / "0.st", tmp_path / "1.st", tmp_path / "p.bt")
    with raises(ingot.OptionError, code="patch-name"):
        ingot.delta.compose([tmp_path / "patch.safetensors"], os.fsencode(tmp_path / "p.bt"))
    assert not (tmp_path / "p.bt").exists()


@pytest.mark.parametrize("checksums", ["xxh3", None])
def test_apply_in_place_reports_the_bytes_of_the_changes(tmp_path: Path, checksums: Any) -> None:
    paths = [tmp_path / f"{number}.st" for number in range(2)]
    array = numpy.zeros(3_000_000, "u2")
    for path in paths:
        ingot.numpy.save_file({"a": array}, path, checksums=checksums)
        array[::90] = 1
    ingot.delta.diff(*paths, tmp_path / "patch.st")
    told: list[tuple[int, int]] = []
    ingot.delta.apply(
        paths[0], tmp_path / "patch.st", in_place=True, durable=True, progress=lambda *now: told.append(now)
    )
    assert len({total for _, total in told}) == 1
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
