"""Names of modules' tensors without the prefixes of wrappers, so that states fit with and without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ingot._native import module_tensors

from .objects import TreePath

# The prefixes of torch.compile, activation checkpointing and FSDP. No other module has such names.
_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_VERSIONS = "_metadata"


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` and ``DistributedDataParallel`` wrap."""
    while True:
        is_parallel = isinstance(module, DistributedDataParallel)
        inner = module.module if is_parallel else getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


class Walked(NamedTuple):
    """What a walk through a module has found.

    Attributes
    ----------
    tensors : dict of str to tensor, optional
        The parameters and persistent buffers in the order of `state_dict`. None if hooks or methods of a
        module may change what `state_dict` returns.
    may_be_parallel : bool
        Whether a module in it may be a ``DistributedDataParallel``.
    """

    tensors: dict[str, torch.Tensor] | None
    may_be_parallel: bool


def walked(module: torch.nn.Module, versions: dict[str, Any] | None = None) -> Walked:
    """Walk through a module, which may have many modules: no function of Python is called for each.

    `versions` gets the versions of all modules by their paths.
    """
    kinds: list[type[torch.nn.Module]] = []

    def is_ordinary(kind: type[torch.nn.Module]) -> bool:
        kinds.append(kind)
        return _is_ordinary(kind)

    found = module_tensors(module, is_ordinary, versions)
    return Walked(found, found is None or any(issubclass(kind, DistributedDataParallel) for kind in kinds))


def _is_ordinary(kind: type[torch.nn.Module]) -> bool:
    """Return whether a class does not change the contents of `state_dict`."""
    # A scripted module stores its tensors elsewhere.
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    is_ours = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)
    return is_ours and not issubclass(kind, torch.jit.ScriptModule)


def namings_in(lives: Mapping[TreePath, Any]) -> dict[TreePath, Naming]:
    """Return the names of the modules among live objects, without the wrappers around them."""
    modules = {path: live for path, live in lives.items() if isinstance(live, torch.nn.Module)}
    return {path: Naming(unwrapped(module)) for path, module in modules.items()}


class Naming:
    """Names of the tensors of a module, with and without the prefixes of the wrappers inside it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._versions: dict[str, Any] = {}
        self.module = module
        self.walk = walked(module, self._versions)
        named = module.named_modules(remove_duplicate=False) if self.walk.may_be_parallel else ()
        parallel = [f"{path}.module." for path, one in named if isinstance(one, DistributedDataParallel)]
        # Wrappers within wrappers first, while the names still begin with the outer ones.
        self._parallel = sorted(parallel, key=len, reverse=True)

    def bare(self, name: str) -> str:
        """Return the name that a tensor has without the wrappers."""
        for prefix in self._parallel:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        for prefix in _PREFIXES:
            name = name.replace(prefix, "")
        return name

    def all_bare(self, names: Iterable[str]) -> list[str]:
        """Return the names that tensors have without the wrappers."""
        own = [*names]
        joined = "\n".join(own)
        # One look at all, since most modules have no wrappers and some have many tensors.
        if not self._parallel and not any(prefix in joined for prefix in _PREFIXES):
            return own
        return [*map(self.bare, own)]

    def state(self) -> Mapping[str, Any]:
        """Return the `state_dict` of the module under the names without wrappers.

        It has no view of each tensor, which DTensors make slowly.
        """
        module, tensors = self.module, self.walk.tensors
        if tensors is not None:
            found = OrderedDict(tensors)
            found._metadata = OrderedDict(self._versions)  # type: ignore[attr-defined]
            return self.without(found)
        takes_vars = type(module).state_dict is torch.nn.Module.state_dict
        return self.without(module.state_dict(keep_vars=True) if takes_vars else module.state_dict())

    def without(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a `state_dict` of the module under the names without wrappers."""
        names = self.all_bare(state)
        if names == [*state]:
            return state
        found = OrderedDict(zip(names, state.values(), strict=True))
        if len(found) < len(state):
            # A module of the user has such a name.
            return state
        versions = getattr(state, _VERSIONS, None)
        if versions is not None:
            # A wrapper comes before the module that it wraps, whose version stays.
            found._metadata = OrderedDict(  # type: ignore[attr-defined]
                (self._path(path), version) for path, version in versions.items()
            )
        return found

    def within(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a stored state under the names of `own`, the `state_dict` of the module."""
        names = {self.bare(name): name for name in own}
        if len(names) < len(own):
            return state
        found = OrderedDict((names.get(self.bare(name), name), value) for name, value in state.items())
        versions = getattr(state, _VERSIONS, None)
        if versions is not None:
            paths = [*getattr(own, _VERSIONS, ())]
            known = {path: versions[self._path(path)] for path in paths if self._path(path) in versions}
            found._metadata = OrderedDict({**versions, **known})  # type: ignore[attr-defined]
        return found

    def _path(self, path: str) -> str:
        return self.bare(f"{path}.").removesuffix(".")
