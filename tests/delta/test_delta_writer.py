"""`DeltaWriter` writes a chain of versions, and its base is never ahead of a durable patch.

``INGOT_DELTA_WRITER_KILLS=1000`` sets the number of kills, ``INGOT_DELTA_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ingot  # noqa: E402
from ingot.torch import DeltaWriter, load_file, load_into  # noqa: E402
from support.errors import raises  # noqa: E402

KILLS = int(os.environ.get("INGOT_DELTA_WRITER_KILLS", "4"))
SEED = int(os.environ.get("INGOT_DELTA_SEED", "0")) or random.SystemRandom().randrange(1 << 32)


def at(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors after a step."""
    found = {"a": torch.zeros(60_000, dtype=torch.int16), "b": torch.full((9,), step)}
    for number in range(step + 1):
        found["a"][number :: 90 + number % 7] += 1
    return found


def followed(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the last step in the directory, and its tensors, as a server makes them."""
    [*_, whole] = sorted(folder.glob("whole-*.safetensors"))
    tensors, step = load_file(whole), int(whole.stem[-8:])
    version = load_into(tensors, whole).version
    for patch in sorted(folder.glob("patch-*.safetensors")):
        if int(patch.stem[-8:]) > step:
            version = load_into(tensors, version, patch=patch).version
            step = int(patch.stem[-8:])
            assert ingot.delta.info(patch).step == step
    return step, tensors


def is_at(tensors: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(tensors[name], tensor) for name, tensor in at(step).items())


def test_delta_writer_writes_a_chain_of_versions(tmp_path: Path) -> None:
    tensors = at(0)
    with DeltaWriter(tensors, tmp_path / "new" / "weights") as writer:
        assert writer.version is None
        for step in range(4):
            tensors.update(at(step))
            writer.save(step)
            # The tensors may change at once.
            tensors["a"].zero_()
    names = sorted(path.name for path in (tmp_path / "new" / "weights").iterdir())
    assert names == [
        *(f"patch-0000000{step}.safetensors" for step in (1, 2, 3)),
        "whole-00000000.safetensors",
    ]
    step, found = followed(tmp_path / "new" / "weights")
    assert step == 3
    assert is_at(found, 3)
    last = ingot.delta.info(tmp_path / "new" / "weights" / names[2])
    assert writer.version == last.result
    assert last.tensors["a"].codec == "gaps"


def test_delta_writer_writes_tied_parameters_of_a_module_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False))
    model[1].weight = model[0].weight
    with DeltaWriter(model, tmp_path) as writer:
        writer.save(0)
        with torch.no_grad():
            model[0].weight[3, 4] = 7
        writer.save(1)
    [whole] = tmp_path.glob("whole*")
    assert list(load_file(whole)) == ["0.weight"]
    [patch] = tmp_path.glob("patch*")
    assert ingot.delta.info(patch).tensors["0.weight"].changed == 1


def test_delta_writer_raises_a_failure_and_keeps_the_base(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    tensors = at(0)
    writer = DeltaWriter(tensors, folder)
    writer.save(0)
    writer.commit()
    base = writer.version
    shutil.move(folder, tmp_path / "moved")
    tensors.update(at(1))
    writer.save(1)
    with pytest.raises(FileNotFoundError):
        writer.commit()
    writer.save(2)
    with pytest.raises(FileNotFoundError):
        writer.save(3)
    assert writer.version == base
    shutil.move(tmp_path / "moved", folder)
    tensors.update(at(3))
    writer.save(3)
    writer.commit()
    step, found = followed(folder)
    assert step == 3
    assert is_at(found, 3)


def test_delta_writer_raises_the_last_failure_at_the_end_of_the_block(tmp_path: Path) -> None:
    def failing() -> None:
        with DeltaWriter(at(0), tmp_path / "weights") as writer:
            (tmp_path / "weights").rmdir()
            writer.save(0)

    with pytest.raises(FileNotFoundError):
        failing()
    with raises(ZeroDivisionError), DeltaWriter(at(0), tmp_path / "weights") as writer:
        writer.save(0)
        raise ZeroDivisionError
    assert followed(tmp_path / "weights")[0] == 0


def test_delta_writer_reset_writes_all_tensors(tmp_path: Path) -> None:
    tensors = at(0)
    with DeltaWriter(tensors, tmp_path) as writer:
        for step in range(3):
            tensors.update(at(step))
            if step == 2:
                writer.reset()
                assert writer.version is None
            writer.save(step)
    assert is_at(load_file(tmp_path / "whole-00000002.safetensors"), 2)
    step, found = followed(tmp_path)
    assert step == 2
    assert is_at(found, 2)


def test_a_server_notices_a_missing_patch(tmp_path: Path) -> None:
    tensors = at(0)
    with DeltaWriter(tensors, tmp_path) as writer:
        for step in range(3):
            tensors.update(at(step))
            writer.save(step)
    (tmp_path / "patch-00000001.safetensors").unlink()
    with raises(ingot.IntegrityError, code="wrong-base"):
        followed(tmp_path)


def test_delta_writer_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"tensors must be .*, found list"):
        DeltaWriter([torch.zeros(3)], tmp_path)  # type: ignore[arg-type]
    writer = DeltaWriter({"a": torch.zeros(3, device="meta")}, tmp_path)
    with raises(ingot.SaveError, tensor="a"):
        writer.save(0)
    with raises(ingot.OptionError, match="step"):
        writer.save(-1)
    writer.commit()
    assert not list(tmp_path.iterdir())


TRAINER = r"""
import os, signal, sys, time
import torch
from delta.test_delta_writer import DeltaWriter, at

for line in sys.stdin:
    folder, delay = line.rstrip("\n").split("\t")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        tensors = at(0)
        with DeltaWriter(tensors, folder) as writer:
            for step in range(10_000):
                tensors.update(at(step))
                writer.save(step)
                writer.commit()
                os.write(writing, b".")
    os.close(writing)
    # The first step has the number 0, and is not counted below.
    os.read(reading, 1)
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    committed = 0
    while data := os.read(reading, 1 << 16):
        committed += len(data)
    os.close(reading)
    print(committed, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_delta_writer_is_never_ahead_of_a_durable_patch_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    steps = 0
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(KILLS):
            folder = tmp_path / str(number)
            process.stdin.write(f"{folder}\t{dice.uniform(0, 0.1)}\n")
            process.stdin.flush()
            committed = int(process.stdout.readline())
            step, found = followed(folder)
            # A step more may be durable, if the kill came before the base moved.
            assert step in (committed, committed + 1), (SEED, number)
            assert is_at(found, step), (SEED, number)
            steps += step
            shutil.rmtree(folder)
        process.stdin.close()
    with capsys.disabled():
        print(f"\n{KILLS} kills in {time.monotonic() - begin:.0f} s, after {steps} patches", end=" ")
