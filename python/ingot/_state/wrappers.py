"""Names of modules' tensors without the prefixes of wrappers, so that states fit with and without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

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


class Naming:
    """Names of the tensors of a module, with and without the prefixes of the wrappers inside it."""

    def __init__(self, module: torch.nn.Module) -> None:
        named = module.named_modules(remove_duplicate=False)
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

    def without(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `state_dict` of the module under the names without wrappers."""
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
