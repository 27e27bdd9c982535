"""What upstream says of an argument of the wrong type, looked for once something has been refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from typing import Any

from ._tensor_spec import not_an_instance

TYPE_CHECKING = False
if TYPE_CHECKING:
    Check = Callable[[Any], str | None]


def words(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What upstream says of the first argument that is of another type than it takes; None where all fit."""
    try:
        given = signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        # Too few or too many, of which Python has spoken.
        return None
    for parameter, value in given.items():
        name, check = _CHECKS.get(parameter, ("", None))
        if name == "tensor_dict" and function.__name__.startswith("serialize"):
            check = _specs
        found = None if check is None else check(value)
        if found is not None:
            return f"argument {name!r}: {found}"
    return None


def _path(value: Any) -> str | None:
    try:
        os.fspath(value)
    except TypeError as error:
        return str(error)
    return None


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else not_an_instance(value, "str")


def _bytes(value: Any) -> str | None:
    return None if isinstance(value, bytes) else not_an_instance(value, "bytes")


def _names(value: Any) -> str | None:
    if not isinstance(value, dict):
        return not_an_instance(value, "dict")
    return next((found for found in map(_text, value) if found is not None), None)


def _texts(value: Any) -> str | None:
    if value is None or not isinstance(value, dict):
        return None if value is None else not_an_instance(value, "dict")
    both = (one for pair in value.items() for one in pair)
    return next((found for found in map(_text, both) if found is not None), None)


def _specs(value: Any) -> str | None:
    found = _names(value)
    if found is not None:
        return found
    from ._tensor_spec import TensorSpec

    others = (one for one in value.values() if not isinstance(one, (TensorSpec, dict)))
    return next((not_an_instance(one, "TensorSpec") for one in others), None)


# By the names that the parameters have here: that of upstream's own function below, and what it takes.
_CHECKS: dict[str, tuple[str, Check]] = {
    "filename": ("filename", _path),
    "framework": ("framework", _text),
    "backend": ("backend", lambda value: None if value is ... else _text(value)),
    "name": ("name", _text),
    "bytes": ("bytes", _bytes),
    "data": ("bytes", _bytes),
    "tensors": ("tensor_dict", _names),
    "arrays": ("tensor_dict", _names),
    "tensor_dict": ("tensor_dict", _names),
    "metadata": ("metadata", _texts),
}
