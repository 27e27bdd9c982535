"""Training states of jax: trees of arrays, named tuples and dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import ingot  # noqa: E402
from ingot import flax  # noqa: E402


class AdamState(NamedTuple):
    """Like the state of Adam in optax."""

    count: Any
    mu: Any
    nu: Any


@dataclass(frozen=True)
class TrainState:
    """Like `TrainState` of flax, with a static field."""

    step: int
    params: Any
    opt_state: Any
    apply: Any = field(metadata={"pytree_node": False})


def made(value: float, apply: Any = abs) -> TrainState:
    params = {"dense": {"kernel": jnp.full((4, 2), value), "bias": jnp.full(2, value, jnp.bfloat16)}}
    return TrainState(int(value), params, (AdamState(jnp.array(3), params, params), ()), apply)


def test_a_train_state_comes_back(path: Path) -> None:
    flax.save_state(
        {"state": made(1), "rng": jax.random.key_data(jax.random.key(0)), "at": np.arange(3)}, path
    )
    target = made(0, apply=max)
    found = flax.load_state(path, into={"state": target})
    assert isinstance(found["at"], np.ndarray)
    state = found["state"]
    assert (type(state), type(state.opt_state[0]), state.apply, state.step) == (TrainState, AdamState, max, 1)
    equal = jax.tree.map(
        lambda one, other: isinstance(one, jax.Array) and bool((one == other).all()),
        [state.params, state.opt_state],
        [made(1).params, made(1).opt_state],
    )
    assert all(jax.tree.leaves(equal))
    # jax arrays are immutable, so that they cannot be filled in place.
    assert float(target.params["dense"]["kernel"].sum()) == 0


def test_arrays_have_the_sharding_of_into(path: Path) -> None:
    flax.save_state({"w": jnp.arange(8.0)}, path)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    into = {"w": jax.device_put(jnp.zeros(8), sharding)}
    found = flax.load_state(path, into=into)["w"]
    assert found.sharding == sharding
    assert found.tolist() == [*range(8)]
    with pytest.raises(ingot.DestinationError, match=r"`w`: expected shape \[3\], found \[8\]"):
        flax.load_state(path, into={"w": jnp.zeros(3)})


def test_keys_of_random_generators_are_rejected_by_path(path: Path) -> None:
    with pytest.raises(ingot.SaveError, match=r"`state\.key`.*key_data"):
        flax.save_state({"state": {"key": jax.random.key(0)}}, path)
