"""Every function reports a background save that fails."""

from __future__ import annotations

from pathlib import Path

from support.processes import run
from support.public_api import parameters, public_api

# Saves of 80,000 bytes, where files may have 1,000.
PROGRAM = """
import warnings
import torch, ingot.torch
from ingot._adapters.face import Whole
from ingot.numpy import mover, payload, wrap
folder = sys.argv[1]
arrays = {"a": numpy.ones(10_000)}
tensors = {"a": torch.ones(10_000, dtype=torch.float64)}
model = torch.nn.Module()
model.register_buffer("a", tensors["a"])
buffers = {"a": {"dtype": "F64", "shape": [10_000], "data": bytes(80_000)}}
SAVES = {
    "ingot.serialize_file": (ingot.serialize_file, buffers),
    "ingot.numpy.save_file": (ingot.numpy.save_file, arrays),
    "ingot.<framework>.save_file": (Whole(wrap, mover, None, payload).save_file, arrays),
    "ingot.torch.save_file": (ingot.torch.save_file, tensors),
    "ingot.torch.save_model": (ingot.torch.save_model, model),
    "ingot.torch.save_sharded": (ingot.torch.save_sharded, tensors),
    "ingot.torch.save_state": (ingot.torch.save_state, {"model": model, "step": 3}),
    "ingot.numpy.save_state": (ingot.numpy.save_state, arrays),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
found = {}
for number, (name, (save, what)) in enumerate(SAVES.items()):
    future = save(what, f"{folder}/{number}", background=True)
    while not future.done(): time.sleep(0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ingot.numpy.save_file({}, f"{folder}/next")
    found[name] = [[one.category.__name__, str(one.message)] for one in caught]
say(found)
"""


def test_background_save_that_fails_warns_and_is_printed_at_exit(tmp_path: Path) -> None:
    ended = run(PROGRAM, tmp_path)
    found = ended.said()
    begun = {name for name, function in public_api().items() if "background" in parameters(function)}
    # These raise the error at their next save, or when they are closed.
    raising = {"ingot.engines.lightning.CheckpointIO", "ingot.Checkpoints.save"}
    assert found.keys() == begun - raising
    printed = ended.err.splitlines()
    for number, ((category, message),) in enumerate(found.values()):
        assert category == "RuntimeWarning"
        assert f"{tmp_path}/{number}" in message
        assert sum(f"{tmp_path}/{number}" in line for line in printed) == 1
    assert ended.code == 0
