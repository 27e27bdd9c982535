"""The table of measurements: the functions, the peers, and the required ratios."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import checkpoints
import editing
import importing
import load_rows
import long_header
import opening
import save_rows
import slice_rows
from duel import Samples
from goal import Goal
from workplace import Workplace


@dataclass(frozen=True)
class Scenario:
    """One row."""

    what: str
    peer: Literal["safetensors", "bintensors", "ingot"]
    measure: Callable[[Workplace, int], Samples]
    # What the two results are worth: writable? outlives the file? a copy?
    result: str
    goal: Goal | None = None
    rounds: int = 15


VIEWS = "both: views of a private mapping, writable, outlive the handle; nothing is read before it is touched"
VIEW_AND_COPY = "ours: views of a private mapping, writable, nothing read before it is touched; peer: copies"
COPIES = "both: copies in memory of their own, writable"
FLUSHED_BY_NOBODY = "neither flushes; ours is renamed into place, so is the peer's"
LISTS = "both: a list of str"
SCENARIOS = [
    Scenario(
        "open + keys(), 10,000 tensors",
        "safetensors",
        opening.names_of_safetensors(10_000),
        LISTS,
        Goal(10, 15),
    ),
    Scenario(
        "open + keys(), 100,000 tensors",
        "safetensors",
        opening.names_of_safetensors(100_000),
        LISTS,
        Goal(12, 20),
        rounds=7,
    ),
    *(
        Scenario(
            f"open 163 shards + keys(), 91,000 tensors, index {order}",
            "safetensors",
            checkpoints.names_of_experts(91_000, by_name=by_name),
            "ours: one list, sorted, of what the index says, every shard found; peer: the list of each shard",
            Goal(10, 15),
            rounds=9,
        )
        for order, by_name in (("by name", True), ("by shard", False))
    ),
    Scenario(
        "open 163 shards + keys(), 91,000 tensors, every shard held against the index",
        "safetensors",
        checkpoints.proven_names_of_experts(91_000),
        "ours: one list, sorted, true of every shard; peer: the list of each shard",
        Goal(10, 15),
        rounds=9,
    ),
    *(
        Scenario(
            f"read an index of 497,000 tensors {order}; peer: json.load",
            "safetensors",
            checkpoints.index(497_000, by_name=by_name),
            "ours: an index of its own, every rule checked; peer: a dict, the last of two equal keys",
            Goal(5, 20),
            rounds=7,
        )
        for order, by_name in (("by name", True), ("by shard", False))
    ),
    Scenario(
        "memory for an index of 497,000 tensors; peer: json.load",
        "safetensors",
        checkpoints.index_memory(497_000),
        "as above",
        Goal(2, 4),
        rounds=3,
    ),
    Scenario(
        "torch.load_file, 8 shards, 1 GiB, owned",
        "safetensors",
        checkpoints.loaded_shards(1 << 30),
        "memory of their own; peer: one shard after the other, cloned; a fresh process each",
        Goal(1.5, 3),
        rounds=5,
    ),
    Scenario(
        "open + keys(), .bt, 20,000 tensors",
        "bintensors",
        opening.names_of_bintensors(20_000),
        LISTS,
        Goal(4, 8),
    ),
    Scenario(
        "torch.load_file, 20,000 small bf16",
        "safetensors",
        load_rows.torch_small(20_000),
        VIEWS,
        Goal(15, 25),
        rounds=11,
    ),
    *(
        Scenario(
            f'torch.{what}, 20,000 small bf16; peer: load_file(backend="pread")',
            "ingot",
            load_rows.filled(20_000, fill),
            "ours: tensors that were there; peer: copies in memory of their own",
            Goal(owed, 1),
        )
        for what, fill, owed in (
            ("load_into a dict", load_rows.into_dict, 1 / 2),
            ("load_into a module", load_rows.into_module, 1 / 2),
            ("load_file(out=)", load_rows.into_out, 1 / 1.5),
        )
    ),
    Scenario(
        "torch.load_file under ingot.compat, 20,000 small f32",
        "ingot",
        load_rows.through_compat(20_000),
        VIEWS,
        Goal(1 / 1.1, 1),
    ),
    Scenario(
        "numpy.load_file, 1 GiB in 8 f32",
        "safetensors",
        load_rows.numpy_large,
        VIEW_AND_COPY,
        Goal(50, 1000),
        rounds=7,
    ),
    Scenario(
        "numpy.load_file, 1 GiB in 8 f32, every byte then read",
        "safetensors",
        load_rows.numpy_large_touched,
        "the sum of each array",
        rounds=7,
    ),
    Scenario(
        'numpy.load_file(backend="pread"), 1 GiB in 8 f32',
        "safetensors",
        load_rows.numpy_large_owned,
        COPIES,
        rounds=7,
    ),
    Scenario(
        "numpy.load_file, 20,000 small f32",
        "safetensors",
        load_rows.numpy_small(20_000),
        VIEW_AND_COPY,
        Goal(4, 8),
        rounds=11,
    ),
    Scenario(
        "torch.save_file(durable=False), 20,000 small bf16",
        "safetensors",
        save_rows.torch_small(20_000),
        FLUSHED_BY_NOBODY,
        Goal(5, 15),
        rounds=11,
    ),
    Scenario(
        "open, header of 94 MiB (1.75 million empty tensors): memory",
        "safetensors",
        long_header.memory,
        "peak resident memory over what the process had; a fresh process each",
        Goal(4, 2, of="figure"),
        rounds=5,
    ),
    Scenario(
        "open, header of 94 MiB (1.75 million empty tensors): time",
        "safetensors",
        long_header.seconds,
        "a fresh process each",
        Goal(1, 0.3, of="figure"),
        rounds=5,
    ),
    Scenario(
        "import, without numpy and torch",
        "safetensors",
        importing.measure,
        "a fresh interpreter each, compiled modules cached",
        Goal(0.030, 0.010, of="figure"),
    ),
    Scenario("torch.load_file, real model of 90.9 MB", "safetensors", load_rows.torch_model, VIEWS),
    Scenario("numpy.load_file, real model", "safetensors", load_rows.numpy_model, VIEW_AND_COPY),
    Scenario(
        "torch.save_file(durable=False), real model",
        "safetensors",
        save_rows.torch_model,
        FLUSHED_BY_NOBODY,
        rounds=9,
    ),
    Scenario(
        "torch.save_file(durable=True), real model",
        "safetensors",
        save_rows.torch_model_durable,
        "ours: flushed to the disk; peer: not",
        rounds=9,
    ),
    Scenario(
        "numpy.save_file(durable=False), real model",
        "safetensors",
        save_rows.numpy_model,
        FLUSHED_BY_NOBODY,
        rounds=9,
    ),
    Scenario("torch.load_file, .bt, real model", "bintensors", load_rows.torch_model_bt, VIEWS),
    Scenario(
        "torch.save_file(durable=False), .bt, real model",
        "bintensors",
        save_rows.torch_model_bt,
        FLUSHED_BY_NOBODY,
        rounds=9,
    ),
    Scenario(
        "get_slice, 64 rows of 32,768 × 1,024 f32, cloned",
        "safetensors",
        slice_rows.rows,
        COPIES,
    ),
    Scenario(
        "get_slice, 64 columns of 32,768 × 1,024 f32, cloned",
        "safetensors",
        slice_rows.columns,
        COPIES,
    ),
    Scenario(
        "update_metadata, 2 GiB with room",
        "safetensors",
        editing.updated(room=True, durable=True),
        "ours: in place, flushed; peer: all loaded and saved to another file, not flushed",
        Goal(200, 1000),
        rounds=7,
    ),
    Scenario(
        "update_metadata(durable=False), 2 GiB with room",
        "safetensors",
        editing.updated(room=True, durable=False),
        "as above, neither flushed",
        Goal(200, 1000),
        rounds=7,
    ),
    Scenario(
        "update_metadata(durable=False), 2 GiB without room",
        "safetensors",
        editing.updated(room=False, durable=False),
        "both: a new file, not flushed; with reflinks (--dir on XFS or Btrfs) 20 is owed",
        Goal(1.5, 20),
        rounds=7,
    ),
    Scenario(
        "update_metadata, 2 GiB without room",
        "safetensors",
        editing.updated(room=False, durable=True),
        "as above, ours flushed",
        rounds=5,
    ),
    Scenario(
        "merge(durable=False), 8 files of 256 MiB",
        "safetensors",
        editing.merged(durable=False),
        "both: one file of 2 GiB, neither flushed",
        Goal(3, 6),
        rounds=7,
    ),
    Scenario(
        "merge, 8 files of 256 MiB",
        "safetensors",
        editing.merged(durable=True),
        "as above, ours flushed",
        rounds=5,
    ),
    Scenario(
        "merge, 8 files of 256 MiB: memory",
        "safetensors",
        editing.merged_memory,
        "peak resident memory over what the process had; a fresh process each",
        Goal(64, 16, of="figure"),
        rounds=3,
    ),
    Scenario(
        "Writer, 4 GiB in 16 tensors: memory over one tensor",
        "safetensors",
        editing.streamed_memory,
        "ours: each tensor made when it is written; peer: all made, then saved; a fresh process each",
        Goal(64, 16, of="figure"),
        rounds=3,
    ),
]
