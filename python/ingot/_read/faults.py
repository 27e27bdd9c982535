"""What is raised of a tensor that is loaded, and how messages about a file begin."""

from __future__ import annotations

from ingot._base.text import _escaped, _quoted
from ingot.errors import DestinationError, DtypeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import Checkpoint


def in_file(checkpoint: Checkpoint) -> str:
    """What messages about a file begin with."""
    return "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "


def misfit(name: str, reason: str, code: str = "destination") -> DestinationError:
    """The refusal to read the tensor `name` into memory of the caller."""
    return DestinationError(f"tensor {_quoted(name)}: {reason}", code=code, tensor=str(name))


def no_destination(name: str, expected: str, found: object) -> TypeError:
    """What is raised where `out` has another object than a tensor."""
    hint = ": several destinations need a list of as many indices in slices" if type(found) is list else ""
    return TypeError(f"tensor {_quoted(name)}: expected a {expected}, found {type(found).__name__}{hint}")


def about(checkpoint: Checkpoint, name: str, error: DtypeError) -> DtypeError:
    """What a framework says of a dtype, about a tensor of a file."""
    return DtypeError(
        f"{in_file(checkpoint)}tensor {_quoted(name)}: {error}",
        code=error.code,
        path=checkpoint.path,
        tensor=name,
        found=checkpoint.info(name).dtype if error.found is None else error.found,
    )
