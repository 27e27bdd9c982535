"""`save_state` and `load_state` for each framework."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, Unpack, overload
from warnings import warn

import ingot
from ingot._adapters.face import Whole
from ingot._base import frameworks
from ingot._base.options import Loading, Saving, checked, takes
from ingot._base.report import Report
from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint
from ingot._ranks.alone import ALONE
from ingot._read import door, moves
from ingot._read.door import Reads
from ingot._read.load import chosen, proven
from ingot._read.moves import Moving, Placement
from ingot._read.select import Label, Selected, Wanted
from ingot._write.save import write_file
from ingot.errors import CheckpointError, DestinationError, OptionError
from ingot.typing import Device, Path, SaveOptions, Source, StateOptions, Writable

from . import commit as commits
from .commit import Commit
from .encoder import Encoder, Raw
from .objects import TreePath, lives_in, spelled
from .restoring import Contents, Live, Restoring, Stored, selected
from .sections import Kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.options import AtOnce, InBackground

# The frames between the caller of `load_state` and the warning.
_ABOVE_LOAD_STATE = 3
_NO_MODULES: Mapping[TreePath, Any] = {}


@dataclass(frozen=True, repr=False)
class StateReport(Report):
    """The values that `load_state` did not restore with their original type.

    Attributes
    ----------
    plain : dict of str to str
        The paths of values that were returned as dicts or other plain values, since their class or framework
        is not known here. Each has the name of the class or framework.
    missing : list of str
        The paths of values that only `into` has.

    Examples
    --------
    >>> ingot.numpy.save_state({"step": 3}, "state.safetensors")
    >>> into = {"step": 0, "epoch": 1}
    >>> state, report = ingot.numpy.load_state("state.safetensors", into=into, return_report=True)
    >>> state, report.missing
    ({'step': 3, 'epoch': 1}, ['epoch'])
    """

    plain: dict[str, str]
    missing: list[str]


#: Writes a state to a destination.
Prepared: TypeAlias = Callable[[Path | Writable, Saving], "ingot.SaveFuture | None"]


def payload(name: str, value: Any) -> Any:
    """Return the dtype, the shape and the bytes of a tensor, or of numbers of Python."""
    if type(value) is Raw:
        return value.dtype, (len(value.data),), value.data
    return frameworks.payload(name, value)


class States:
    """Training states with one framework's tensors. Its methods are functions of that framework's module.

    Parameters
    ----------
    framework : str
        The name of the module.
    whole : Whole
        How tensors of the framework are saved and loaded.
    """

    # Live objects of these classes are restored after all others.
    last: tuple[type, ...] = ()

    def __init__(self, framework: str, whole: Whole[Any]) -> None:
        self.framework = framework
        self.whole = whole

    @overload
    def save_state(
        self,
        state: Any,
        destination: Path,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[InBackground],
    ) -> ingot.SaveFuture: ...

    @overload
    def save_state(
        self,
        state: Any,
        destination: Path | Writable,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[AtOnce],
    ) -> None: ...

    @takes(SaveOptions, overwrite=True)
    def save_state(
        self,
        state: Any,
        destination: Path | Writable,
        metadata: Mapping[str, str] | None = None,
        *,
        background: bool = False,
        **options: Unpack[SaveOptions],
    ) -> ingot.SaveFuture | None:
        """Save a training state to one file, without pickle.

        Parameters
        ----------
        state : object
            A tree of dicts, lists, tuples, sets, numbers, texts, tensors and the other types that the guide
            lists (docs/guides/training-state.md). Objects with ``state_dict`` and ``load_state_dict``, such
            as modules, optimizers, schedulers and data loaders, are saved by their state. An optimizer's
            state is stored under the names of its parameters if their module is in the same tree.
        destination : str, bytes, os.PathLike, or an object with a ``write``
            Where to write. An existing file is replaced.
        metadata : dict of str to str, optional
            Text to store beside the state.
        background : bool
            Return an `ingot.SaveFuture` and write in a thread, as `save_file` does.
        **options
            How the file is written: `ingot.typing.SaveOptions`.

        Returns
        -------
        None or ingot.SaveFuture
            The future of a background save. Its result is None.

        Raises
        ------
        SaveError
            A value cannot be stored without pickle (``code`` is ``"not-plain"``), the tree is too deep or has
            too many values (``"state-too-large"``), several optimizers in a list have equal integers as keys
            (``"equal-keys"``), or a tensor cannot be stored. The message has the path in the tree. Nothing
            has been written.
        SharedMemoryError
            Tensors of torch share memory, and no tensor covers all of it.
        OSError, StorageError, TypeError, OptionError
            As for `save_file`.

        Examples
        --------
        >>> save_state({"step": 3, "losses": [0.5, 0.25]}, "state.safetensors")
        >>> load_state("state.safetensors")
        {'step': 3, 'losses': [0.5, 0.25]}
        """
        return self.saved(state, destination, Saving.of(self.save_state, locals()))

    def saved(
        self,
        state: Any,
        destination: Path | Writable,
        how: Saving,
        named_by: Mapping[TreePath, Any] = _NO_MODULES,
    ) -> ingot.SaveFuture | None:
        """Do the work of `save_state`. The modules in `named_by` are not saved, and name parameters."""
        return self.saved_tree(state, destination, how, self.states_of({**lives_in(state), **named_by}))

    def prepared(self, state: Any, ranks: Any, kept: Kept) -> Prepared:
        """Return a function that writes `state` to a path. All `ranks` call it.

        `kept` is of the save before, and then of this one.
        """
        if ranks.size > 1:
            message = f"{self.framework} has no ranks: save by a Checkpoints of one rank only"
            raise OptionError(message, code="not-by-ranks", found=self.framework)
        return self._encoded(state, self.states_of(lives_in(state)), kept)

    def has_parts(self, tree: Any) -> bool:
        """Return whether `tree` has tensors that are divided among ranks."""
        return False

    def saved_tree(
        self, tree: Any, destination: Path | Writable, how: Saving, states: Mapping[int, Any]
    ) -> ingot.SaveFuture | None:
        """Save a tree, in which `states` replaces live objects, by id."""
        return self._encoded(tree, states, Kept())(destination, how)

    def _encoded(self, tree: Any, states: Mapping[int, Any], kept: Kept) -> Prepared:
        encoder = Encoder(self.framework, states, kept.sections)
        record = encoder.metadata(tree)
        kept.sections = encoder.sections
        return partial(self.write, encoder.tensors, record)

    def states_of(self, lives: Mapping[TreePath, Any]) -> dict[int, Any]:
        """Return the states of live objects by their ids."""
        return {id(live): live.state_dict() for live in lives.values()}

    def write(
        self, stored: dict[str, Any], record: dict[str, str], destination: Path | Writable, how: Saving
    ) -> ingot.SaveFuture | None:
        """Write a file of tensors of any framework, with the record of their tree."""
        return write_file(destination, stored, payload, how, export=self.whole.export, records=record)

    @takes(StateOptions)
    def load_state(
        self,
        source: Source,
        device: Device = None,
        *,
        into: Any = None,
        types: Iterable[type] = (),
        return_report: bool = False,
        **options: Unpack[StateOptions],
    ) -> Any:
        """Load a training state that `save_state` saved. No code in the file is run.

        Parameters
        ----------
        source : str, bytes, os.PathLike, or an object to read from
            As for `load_file`; or the directory of a step that one process or many ranks saved by
            `ingot.Checkpoints`. Of tensors that ranks share, torch loads the whole.
        device : str, int, the framework's device, dict or callable, optional
            Where tensors are placed that `into` does not have, as for `load_file`. By default on the CPU, or
            on the framework's default device.
        into : object, optional
            A tree like the saved one with live objects and tensors. Modules and tensors are filled in place
            (arrays of jax are replaced, with the same sharding); ``load_state_dict`` of other objects is
            called. Arrays of another framework come from the file. Optimizers need not have made a step.
            Dataclasses, named tuples and enums get the classes of the objects in `into`. Plain values that
            the file lacks are taken from `into`; tensors and live objects that it lacks raise
            (``"state-missing"``).
        types : iterable of class, optional
            Dataclasses, named tuples, enums and tensor subclasses of the state whose objects are not in
            `into`. They are matched by ``__qualname__``. Objects without a class are returned as dicts.
        return_report : bool
            Return an `ingot.StateReport` too.
        **options
            Which values are loaded and how: `ingot.typing.StateOptions`.

        Returns
        -------
        object
            The tree, which contains the live objects and tensors of `into`. Other tensors have memory of
            their own. With `return_report`, a tuple of the tree and the report.

        Raises
        ------
        CheckpointError
            The file has no state (``code`` is ``"no-state"``), a state of a later version of ingot
            (``"later-state"``), or an invalid one (``"invalid-state"``, ``"state-too-large"``); or the state
            does not fit `into` (``"state-missing"``, ``"state-names"``, ``"optimizer-state"``), or needs a
            class in `types` (``"unknown-class"``).
        DestinationError
            A tensor of `into` has another shape than in the file, or another dtype (torch converts floats to
            floats), or cannot be filled.
        OptionError
            `keys` or `drop` select a part of the state of an object other than a module; or several ranks
            saved the step, and the framework is not torch (``code`` is ``"not-by-ranks"``).
        OSError, HeaderError, DtypeError, StorageError, IntegrityError
            As for `load_file`.

        Warns
        -----
        RuntimeWarning
            Each of the ranks that saved the step had a state for itself, such as of a random number
            generator: the result has a list of them.

        Notes
        -----
        Everything is checked, and all tensors are read that are not filled in place, before the first live
        object changes. ``load_state_dict`` is called at the end, in the order of the tree, for random number
        generators last.

        Examples
        --------
        >>> save_state({"step": 3, "losses": [0.5, 0.25]}, "state.safetensors")
        >>> load_state("state.safetensors", into={"step": 0, "losses": []})
        {'step': 3, 'losses': [0.5, 0.25]}
        """
        # Each tensor may have its own device, which `placed` checks.
        arguments = {name: value for name, value in locals().items() if name != "device"}
        given = checked(self.load_state, arguments, types=checked_types)
        how = Loading.among(given)
        move = moves.placed(self.load_state, self.whole.mover, device)
        step = step_of_ranks(source)
        if step is not None:
            found, restoring = self._loaded_step(step, how, device, into, given["types"])
        else:
            found, restoring = self.loaded(source, how, move, into, given["types"])
        return (found, StateReport(restoring.plain, restoring.missing)) if return_report else found

    def _loaded_step(
        self, folder: str, how: Loading, device: Any, into: Any, types: Iterable[type]
    ) -> tuple[Any, Restoring]:
        """Load a step of many ranks in one process."""
        if how.expected_sha256 is not None:
            message = f"{_escaped(folder)}: expected_sha256 is of one file, and the step has several"
            raise OptionError(f"{message}, which are compared with their digests", code="many-files")
        commit = commits.read(folder)
        commits.check(folder, commit)
        reading = read_by(self.loader(into, types, how, device, ALONE), folder, commit)
        found, unfit = reading.finish()
        if unfit:
            what = f"{', '.join(unfit)} had a state on each rank that saved the step"
            reason = f"{what}, and one process loads it: the result has lists of the states"
            warn(f"{_escaped(folder)}: {reason}", RuntimeWarning, stacklevel=_ABOVE_LOAD_STATE)
        return found, reading.restoring

    def loaded(
        self,
        source: Source,
        how: Loading,
        move: Moving,
        into: Any = None,
        types: Iterable[type] = (),
        check: Callable[[Checkpoint], None] | None = None,
        named_by: Mapping[TreePath, Any] = _NO_MODULES,
    ) -> tuple[Any, Restoring]:
        """Load a state. Returns the tree, and how it was restored.

        `check` is called with the open file before it is read, and raises to reject it. The modules in
        `named_by` name the parameters of optimizers, and are not in the tree.
        """
        # A state outlives its file, which training replaces.
        how = how._replace(backend="pread") if how.backend == "auto" else how

        def work(checkpoint: Checkpoint, reads: Reads) -> tuple[Any, Restoring]:
            if check is not None:
                check(checkpoint)
            return self._read(checkpoint, reads, how, move, into, types, named_by)

        found, restoring = door.loaded(source, how, work)
        self.apply_all(restoring)
        return found, restoring

    def apply_all(self, restoring: Restoring) -> None:
        """Call `load_state_dict` of the live objects."""
        for live in sorted(restoring.lives, key=lambda live: isinstance(live.value, self.last)):
            try:
                self.apply(live)
            except Exception as error:
                error.add_note(f"ingot: in load_state_dict of `{spelled(live.path)}`")
                raise

    def loader(self, into: Any, types: Iterable[type], how: Loading, device: Any, ranks: Any) -> Any:
        """Return an object that loads the files of several ranks. All `ranks` call it."""
        reason = f"ranks of torch saved parts of tensors, which {self.framework} does not put together"
        way_out = 'load the step by ingot.torch.load_state, or by ingot.Checkpoints(..., framework="torch")'
        raise OptionError(f"{reason}: {way_out}", code="not-by-ranks", found=self.framework)

    def _read(
        self,
        checkpoint: Checkpoint,
        reads: Reads,
        how: Loading,
        move: Moving,
        into: Any,
        types: Iterable[type],
        named_by: Mapping[TreePath, Any],
    ) -> tuple[Any, Restoring]:
        is_partial = how.keys is not None or how.drop is not None
        # Live objects only get bytes that have been compared.
        source, reads = proven(checkpoint, checkpoint.all_names(), reads)
        contents = Contents(checkpoint, source)
        node = contents.tree()
        node = selected(node, contents, how) if is_partial else node
        restoring = Restoring(contents, self, into, types, is_partial)
        restoring.known = self.prepare(restoring, named_by)
        return self._restored(node, contents, restoring, move, reads), restoring

    def value_of(self, node: Any, contents: Contents, reads: Reads, types: Iterable[type] = ()) -> Any:
        """Return the value of a part of the tree of an open file."""
        restoring = Restoring(contents, self, None, types, is_partial=False)
        restoring.known = self.prepare(restoring, _NO_MODULES)
        return self._restored(node, contents, restoring, self.whole.mover(None), reads)

    def _restored(
        self, node: Any, contents: Contents, restoring: Restoring, move: Moving, reads: Reads
    ) -> Any:
        restoring.planned(node)
        return restoring.restored(node, self._loaded(contents, restoring, move, reads))

    def _loaded(self, contents: Contents, restoring: Restoring, move: Moving, reads: Reads) -> dict[str, Any]:
        """Read the planned tensors: first the new ones, then the caller's tensors."""
        groups = restoring.fresh()
        filled = [name for _, name in restoring.filled.values()]
        sizes = (partial(_nbytes, contents.checkpoint, names) for names in (*groups.values(), filled))
        *shares, last = reads.shares(*sizes)
        loaded: dict[str, Any] = {}
        for (framework, names), share in zip(groups.items(), shares, strict=True):
            if framework == self.framework:
                loaded |= self.load(contents, names, self._placed(restoring.devices, move), share)
            else:
                other = frameworks.adapter(framework)
                some: Selected[Any] = Selected(keys=(*names,))
                loaded |= chosen(contents.source, some, other.wrap, other.mover(None), share, other.at)
        if filled:
            self.fill(contents.source, restoring.filled, last)
        return loaded

    def _placed(self, devices: Mapping[str, Any], move: Moving) -> Moving:
        """Return a move that takes the tensors in `devices` to their own device."""

        def choose(checkpoint: Checkpoint, name: str) -> Any:
            if name in devices:
                return self.whole.mover(devices[name])
            return move.of(checkpoint, name) if isinstance(move, Placement) else move

        return Placement(choose) if devices else move

    def load(self, contents: Contents, names: list[str], move: Moving, reads: Reads) -> dict[str, Any]:
        """Load tensors of the framework."""
        some: Selected[Any] = Selected(keys=(*names,))
        return chosen(contents.source, some, self.whole.wrap, move, reads, self.whole.at)

    def fill(self, checkpoint: Checkpoint, filled: Mapping[TreePath, tuple[Any, str]], reads: Reads) -> None:
        """Read into tensors of the caller."""
        assert self.whole.into is not None  # `place` has checked it.
        tensors: dict[str, Any] = {Label(spelled(path)): tensor for path, (tensor, _) in filled.items()}
        self.whole.into(checkpoint, Wanted([name for _, name in filled.values()]), tensors, reads)

    def prepare(self, restoring: Restoring, named_by: Mapping[TreePath, Any]) -> Any:
        """Return facts about the caller's live objects that `plan` and `state_for` need."""
        return None

    def shape_of(self, info: ingot.TensorInfo) -> tuple[int, ...]:
        return info.shape

    def place(self, own: Any, stored: Stored, path: TreePath, restoring: Restoring) -> None:
        if tuple(own.shape) != stored.shape:
            raise other_shape(restoring.shown, path, own.shape, stored.shape)
        if self.whole.into is not None:
            restoring.filled[path] = own, stored.name
        elif hasattr(own, "sharding"):
            restoring.devices[stored.name] = own.sharding

    def plan(self, live: Live, restoring: Restoring) -> None:
        if restoring.is_partial:
            kind = type(live.value).__name__
            reason = f"keys and drop select a part of the state of a {kind}, which is only loaded whole"
            place = spelled(live.path)
            message = f"{restoring.shown}: {_quoted(place)}: {reason}"
            raise OptionError(message, code="partial-state", tensor=place, found=kind)

    def state_for(self, live: Live, restoring: Restoring) -> Any:
        return live.state

    def apply(self, live: Live) -> None:
        """Call `load_state_dict` of a live object."""
        live.value.load_state_dict(live.state)


def step_of_ranks(source: Any) -> str | None:
    """Return the directory of a step that several ranks saved, if `source` is one."""
    if not isinstance(source, str | bytes | os.PathLike):
        return None
    folder = os.path.abspath(os.fsdecode(source))
    if commits.is_committed(folder):
        return folder if len(commits.read(folder).files) > 1 else None
    steps = commits.committed(folder) if os.path.isdir(folder) else []
    if steps:
        reason = f"expected a step, found a directory of the steps {', '.join(map(str, steps))}"
        way_out = f"call ingot.Checkpoints(...).load(), or pass {commits.folder_of('', steps[-1])} in it"
        facts: dict[str, Any] = {"path": folder, "found": steps}
        raise located(CheckpointError, f"{reason}: {way_out}", code="ambiguous-checkpoint", **facts)
    return None


def read_by(loader: Any, folder: str, commit: Commit) -> Any:
    """Return the state of a step of several files, which is read and not restored yet."""
    others = [name for name in commit.files if name != commit.tree]
    return loader.read(folder, [commit.tree, *others], partial(commits.check_save, commit))


def other_shape(
    shown: str, path: TreePath, expected: Iterable[int], found: Iterable[int]
) -> DestinationError:
    """Return the error for a tensor that has another shape than the caller's."""
    place, shapes = spelled(path), ([*expected], [*found])
    message = f"{shown}: {_quoted(place)}: expected shape {shapes[0]}, found {shapes[1]} in the file"
    return DestinationError(
        message, code="destination-shape", tensor=place, expected=shapes[0], found=shapes[1]
    )


def checked_types(types: Any) -> tuple[type, ...]:
    """Return the classes in `types`, after checking their kinds and that their names differ."""
    if isinstance(types, type) or not hasattr(types, "__iter__"):
        raise TypeError(f"types must be an iterable of classes, found {types!r}")
    found = (*types,)
    for kind in found:
        if not isinstance(kind, type) or not _is_stored(kind):
            expected = "dataclasses, named tuples, enums and tensor subclasses"
            raise TypeError(f"types must have {expected}, found {kind!r}")
    names = [kind.__qualname__ for kind in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        message = f"types has two classes with the name {twice!r}: pass objects of them in into="
        raise OptionError(message, code="equal-types", found=twice)
    return found


def _is_stored(kind: Any) -> bool:
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_tuple or is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "__tensor_unflatten__")


def _nbytes(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(checkpoint.info(name).nbytes for name in names)
