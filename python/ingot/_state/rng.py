"""The state of random number generators."""

from __future__ import annotations

import random
import warnings
from sys import modules
from typing import Any

import torch


class RNG:
    """The random number generators of Python, NumPy, torch and its devices, as an object with a state.

    Put one into a tree that `save_state` saves and `load_state` loads. NumPy's legacy generator
    (``numpy.random.seed``) is included if NumPy is imported. Generators of devices are included if the
    process has used the device; `torch.Generator` objects and NumPy's own ``Generator`` objects are not.

    Examples
    --------
    >>> import torch
    >>> from ingot.torch import RNG
    >>> state = RNG().state_dict()
    >>> first = torch.rand(2)
    >>> RNG().load_state_dict(state)
    >>> bool((torch.rand(2) == first).all())
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators.

        Returns
        -------
        dict of str to object
            ``"python"``, ``"torch"``, ``"numpy"`` if it is imported, and the types of devices, such as
            ``"cuda"`` with a list of a state for each device.

        Examples
        --------
        >>> sorted(ingot.torch.RNG().state_dict())
        ['numpy', 'python', 'torch']
        """
        found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in modules:
            found["numpy"] = modules["numpy"].random.get_state(legacy=False)
        for name, module in _devices().items():
            if _is_used(module):
                # Only types of devices with several devices have this function.
                all_of = getattr(module, "get_rng_state_all", None)
                found[name] = [module.get_rng_state()] if all_of is None else all_of()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states of all generators.

        Parameters
        ----------
        state_dict : dict of str to object
            The result of `state_dict`.

        Warns
        -----
        UserWarning
            There are states of devices that do not exist here. They are left out.

        Examples
        --------
        >>> state = ingot.torch.RNG().state_dict()
        >>> first = torch.rand(2)
        >>> ingot.torch.RNG().load_state_dict(state)
        >>> bool((torch.rand(2) == first).all())
        True
        """
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if "numpy" in state_dict:
            import numpy

            numpy.random.set_state(state_dict["numpy"])
        here = _devices()
        for name, states in state_dict.items():
            if name not in ("python", "numpy", "torch"):
                _set(name, here.get(name), states)


def _set(name: str, module: Any, states: list[torch.Tensor]) -> None:
    count = 0 if module is None else module.device_count()
    if count < len(states):
        reason = f"the state has generators of {len(states)} devices, and this process has {count}"
        warnings.warn(f"{name}: {reason}: the others are ignored", stacklevel=4)
    if module is None:
        return
    for place, state in enumerate(states[:count]):
        which = (place,) if hasattr(module, "get_rng_state_all") else ()
        module.set_rng_state(state.cpu(), *which)


def _devices() -> dict[str, Any]:
    """Return torch's modules for the types of devices with random number generators."""
    names = ("cuda", "xpu", "mps", torch._C._get_privateuse1_backend_name())
    found = {name: getattr(torch, name, None) for name in names}
    # Modules of other vendors may have no generators.
    return {name: module for name, module in found.items() if hasattr(module, "get_rng_state")}


def _is_used(module: Any) -> bool:
    # Generators of CUDA do not exist before CUDA is initialised.
    is_initialized = getattr(module, "is_initialized", lambda: True)
    return bool(is_initialized()) and module.device_count() > 0
