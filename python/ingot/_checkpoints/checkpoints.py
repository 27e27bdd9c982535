"""A folder of checkpoints of a training run."""

from __future__ import annotations

import gc
import os
import signal as signals
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from secrets import token_hex
from sys import modules
from threading import RLock
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Unpack
from warnings import warn
from weakref import finalize

from ingot._base.checks import checked_mapping, counted, one_of
from ingot._base.frameworks import adapter, module_of, owner
from ingot._base.options import Loading, Saving, argument, checked, takes
from ingot._base.text import _escaped, located
from ingot._base.waits import settled
from ingot._native import destination, is_url
from ingot._ranks.alone import Together
from ingot._read.digest import verify as verified
from ingot._read.moves import placed
from ingot._state.commit import SAVE_KEY, Commit, StoredFile, check_save, is_committed
from ingot._state.face import States, checked_types, read_by
from ingot._state.objects import is_live, is_tensor, within
from ingot._state.sections import Kept
from ingot._write.background import SAVES, SaveFuture
from ingot.errors import (
    CheckpointError,
    HeaderError,
    IntegrityError,
    OptionError,
    RankError,
)
from ingot.typing import Device, Framework, Keys, NoOptions, Path, StorageOptions

from .disk import DiskSteps
from .ranks import Ranks
from .retention import Best, Rules
from .steps import Steps
from .store import StoreSteps

T = TypeVar("T")

_counted_step = partial(counted, "step")

#: Frameworks with training states. A state with objects of several is of the first of them.
_WITH_STATES = ("torch", "flax", "numpy")
_PACKAGES = {"flax": "jax"}


class _Begun(NamedTuple):
    """The folder of a new save, and the steps that training has gone back from."""

    folder: str
    later: list[int]


class _Before(NamedTuple):
    """The step that was saved or loaded before a save, and the steps that were set aside for it."""

    step: int | None
    renamed: list[str]


class _Choice(NamedTuple):
    """A step that was chosen, the result of the work on it, and the later steps that are damaged."""

    step: int
    result: Any
    damaged: dict[int, Exception]


class _Tried(NamedTuple):
    """What a rank has found: the save of a step, whether the step is gone, and its damage."""

    save: str | None
    is_gone: bool
    damage: str | None


@takes()
class Checkpoints:
    """Save, keep and find the checkpoints of a training run in a directory, or in a folder of a store.

    Parameters
    ----------
    directory : str, bytes or os.PathLike
        The directory, which the first save makes. Each step is a directory in it, such as ``step-00000700``.
        Or the URL of a folder of ``s3://`` or ``az://``, such as ``"s3://bucket/run"``.
    keep : int, optional
        How many of the last steps stay, 1 or more. None keeps all.
    keep_every : int, optional
        Steps that are multiples of this number stay.
    best : tuple of (str, {"min", "max"}, int), optional
        ``("loss", "min", 2)`` keeps the two steps with the smallest metric ``"loss"``.
    framework : {"torch", "flax", "numpy"}, optional
        The framework whose functions save and load the states. By default the framework of the objects in the
        state. For a state without objects, the framework that saved the step if it is imported, else NumPy.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that use the directory together: by default all, if torch.distributed is initialised before
        the first call. Each of them makes every call, with the same arguments.
    storage_options : dict, optional
        How a store is reached (`ingot.StorageOptions`).

    Raises
    ------
    CheckpointError
        The directory contains checkpoints of another program (``code`` is ``"foreign-checkpoints"``).
    NotADirectoryError, FileNotFoundError
        `directory` is a file, or a link to a directory that does not exist.
    OSError, StorageError
        The store refuses a request, or cannot be reached.
    OptionError, TypeError
        An option has a wrong value, or `directory` is a URL that cannot be written to.

    Notes
    -----
    A step is saved as one file, which never changes, and a commit file, which is written last and removed
    first. A step without a commit file does not exist. After a kill at any moment, `latest` finds the last
    step that was complete (FORMAT.md, "Folders of checkpoints").

    One process at a time saves to a directory, on any machine that shares it. The first save takes a lease,
    which ends with the ``with`` block or the program. Any number of processes may load meanwhile.

    In a **store**, the folder of a step has the number of the lease and the id of the save in its name, such
    as ``step-00000700-3-40ee05e2db63e242``, so that no late request of another process meets a newer object.
    The store has to list objects and to obey conditional requests.

    A background save copies the state to the host first, so it needs the memory for one copy. The next save
    waits for the one before. A failure is raised by the next `save` or `wait`, or at the end of the ``with``
    block. The interpreter waits for pending saves at exit, and prints a failure on standard error.

    Several threads may use one object. It cannot be pickled: make one in each process.

    **Ranks** of torch.distributed make the same calls. Each writes a file with its parts of DTensors and of
    tensors with the attributes of ``CheckpointableTensor``. A plain tensor is stored once, after all ranks
    that have it have compared their values. A buffer that ``DistributedDataParallel`` broadcasts is stored by
    the sending rank, without a comparison. The state of another object than a module or an optimizer, such as
    a random number generator, is stored once if it is the same on all ranks, and otherwise for each rank.
    The first rank chooses steps, holds the lease and deletes. Ranks use connections of their own, and none
    of the program's process groups. If one fails, all raise: it raises its own error, and the others raise
    `RankError` with the rank and the error.

    Examples
    --------
    >>> import ingot
    >>> import numpy
    >>> with ingot.Checkpoints("run", keep=2) as checkpoints:
    ...     for step in range(1, 5):
    ...         checkpoints.save(step, {"weights": numpy.full(3, step), "step": step})
    >>> checkpoints.steps(), checkpoints.load()["step"]
    ([3, 4], 4)
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"], int] | None = None,
        *,
        framework: Framework | None = None,
        process_group: Any = None,
        storage_options: StorageOptions | None = None,
        **options: Unpack[NoOptions],
    ) -> None:
        given = checked(
            Checkpoints,
            locals(),
            directory=destination,
            keep=partial(counted, "keep", least=1, or_none=True),
            keep_every=partial(counted, "keep_every", least=1, or_none=True),
            best=checked_best,
            framework=checked_framework,
        )
        self._steps = _steps_at(given["directory"], given["storage_options"])
        self._steps.check_directory()
        self._directory = self._steps.directory
        self._rules = Rules(given["keep"], given["keep_every"], given["best"])
        self._framework: str | None = given["framework"]
        self._ranks = Ranks(process_group)
        # For the next save of the same structure.
        self._kept = Kept()
        # For several threads of the caller. The thread of background saves does not take it.
        self._lock = RLock()
        self._pending: list[SaveFuture] = []
        # The step that was saved or loaded last.
        self._step: int | None = None
        # The steps that this object has saved, or that were there when it loaded one.
        self._seen: set[int] = set()
        self._is_stopping = self._is_stopping_everywhere = False
        self._handlers: dict[int, Any] = {}
        finalize(self, self._steps.lease.release)

    def __repr__(self) -> str:
        return f"ingot.Checkpoints({self._directory!r})"

    def __reduce__(self) -> Any:
        way_out = "make one in each process"
        raise TypeError(f"Checkpoints cannot be pickled, since one process saves to a directory: {way_out}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for pending saves, restore the handlers of signals and release the lease."""
        try:
            if error is None:
                self.wait()
            else:
                # A failure of a save is printed at exit, so that it does not replace this error.
                for pending in self._pending:
                    settled(pending)
        finally:
            self._end()
            self._ranks.end(is_failed=error is not None)
            for number, previous in self._handlers.items():
                signals.signal(number, signals.SIG_DFL if previous is None else previous)
            self._handlers.clear()

    @takes()
    def save(
        self,
        step: int,
        state: Any,
        *,
        background: bool = True,
        metrics: Mapping[str, float] | None = None,
        **options: Unpack[NoOptions],
    ) -> None:
        """Save a step, and delete the steps that need not stay.

        Parameters
        ----------
        step : int
            The number of the step, 0 or more.
        state : object
            The state, as for `ingot.torch.save_state`.
        background : bool
            Return when the state is copied, and write in a thread. False returns when the step is on disk.
        metrics : dict of str to float, optional
            Metrics to store with the step, for `best`.

        Raises
        ------
        StorageError
            Writing failed, or another process saves to the directory (``code`` is ``"busy"``,
            ``"lease-lost"``), or the directory cannot be locked (``"lease"``). Also for a failure of the
            background save before.
        CheckpointError
            The directory has a step that another program has saved, and this program has not loaded since
            (``"not-resumed"``); or the step exists with other metrics (``"step-exists"``); or a later version
            of ingot has saved a step that would be renamed (``"later-checkpoint"``).
        SaveError, OSError, TypeError, OptionError
            As for `ingot.torch.save_state`. Nothing has been written.

        Warns
        -----
        RuntimeWarning
            Later steps were renamed, since training continues from an earlier one.

        Notes
        -----
        Steps are deleted in the background, after the new one is durable. So the disk needs room for one step
        more than those that stay.

        If training went back to an earlier step, by `load` or by saving one, later steps are renamed to
        ``abandoned-...``, and none of the functions returns them. Saving the step that was saved or loaded
        last does nothing, so that a training run may end with a save.

        Examples
        --------
        >>> with ingot.Checkpoints("run") as checkpoints:
        ...     checkpoints.save(100, {"weights": numpy.ones(3), "step": 100}, metrics={"loss": 0.5})
        """
        given = {**locals()}

        def prepare() -> dict[str, Any]:
            return checked(self.save, given, step=_counted_step, metrics=checked_metrics)

        with self._lock:
            self.wait()
            with _uncollected() if background else nullcontext():
                renamed = self._save(prepare, state, background)
        if renamed:
            what = f"{self._steps.setting_aside} {', '.join(renamed)}"
            reason = f"training continues from an earlier step, so later ones were {what}"
            warn(f"{_escaped(self._directory)}: {reason}", RuntimeWarning, stacklevel=2)

    def _save(self, prepare: Callable[[], dict[str, Any]], state: Any, background: bool) -> list[str]:
        """Save a step. Returns the new names of the steps that training has gone back from."""
        ranks = self._ranks.calls()
        step, metrics, called = self._same(prepare, ranks)
        begun = ranks.first(partial(self._begun, step, metrics, called), "preparing the step")
        if begun is None:
            return []
        folder, later = begun
        framework = self._framework_of(state) if ranks.size == 1 else self._framework or "torch"
        tree = f"state-{called}.safetensors"
        commit = Commit(step, called, framework, tree, metrics or {}, {})
        how = Saving(
            metadata={SAVE_KEY: commit.save},
            overwrite=True,
            checksums=["blake3"],
            background=background,
            storage_options=self._steps.options,
        )
        write = _states(framework).prepared(state, ranks, self._kept)
        file = tree if ranks.rank == 0 else f"state-{called}-{ranks.rank:05d}.safetensors"
        renamed = ranks.first(
            lambda: self._set_aside(one for one in later if one == step), "renaming the step"
        )
        try:
            path = self._steps.path(folder, file)
            writing = self._written(ranks, partial(write, path, how), folder, called)
        except BaseException:
            if ranks.rank == 0:
                self._steps.put_back(renamed)
            raise
        renamed += ranks.first(
            lambda: self._set_aside(one for one in later if one != step), "renaming later steps"
        )
        together = self._ranks.background()
        before, self._step = _Before(self._step, renamed), step
        end = partial(self._commit, together, writing, folder, commit, file, before)
        if writing is None:
            end()
        else:
            self._put(end, folder)
        self._seen.add(step)
        self._put(partial(self._clear, together), self._directory)
        return renamed

    def _same(
        self, prepare: Callable[[], dict[str, Any]], ranks: Together
    ) -> tuple[int, dict[str, float] | None, str]:
        """Return the step, the metrics and the id of a save, which are the first rank's."""

        def compared() -> tuple[dict[str, Any], Any]:
            given = prepare()
            own = {"directory": self._steps.identity(), "step": given["step"]}
            rules = {"keep and best": tuple(self._rules), "background": given["background"]}
            return {**own, **rules}, (given["step"], given["metrics"], token_hex(8))

        found = ranks.same(compared, "comparing the arguments of save")
        step, metrics, called = found[0]
        for rank, (_, other, _) in enumerate(found):
            if other is not None and _spelled(other) != _spelled(metrics or {}):
                reason = f"has other metrics than rank 0: expected {metrics}, found {other}"
                way_out = "reduce them over the ranks, or pass them on rank 0 only"
                raise RankError(
                    f"rank {rank} of {ranks.size} {reason}: {way_out}", code="ranks-differ", rank=rank
                )
        return step, metrics, called

    def _begun(self, step: int, metrics: dict[str, float] | None, called: str) -> _Begun | None:
        """Begin a save with this id. Returns None if the step is there already."""
        self._steps.take_lease()
        if step == self._step and self._has(step, metrics):
            return None
        later = self._later(step)
        return _Begun(self._steps.new_folder(step, called), later)

    def _written(
        self, ranks: Together, write: Callable[[], SaveFuture | None], folder: str, called: str
    ) -> SaveFuture | None:
        """Write this rank's file to the directory of the step, which the first rank makes."""
        writing: SaveFuture | None = None
        with ExitStack() as made:
            with ranks.step("making the directory"):
                if ranks.rank == 0:
                    made.enter_context(self._steps.making(folder))
            try:
                with ranks.step("writing"):
                    self._steps.enter(folder)
                    writing = write()
                    if writing is not None:
                        # Its failure is raised by `_commit`, or after the failure of another rank by none.
                        writing._outcome.is_asked = True
            except BaseException:
                if writing is not None and not writing.cancel():
                    settled(writing)
                self._steps.discard(folder, called)
                raise
        return writing

    def steps(self) -> list[int]:
        """Return the numbers of the steps in ascending order.

        Returns
        -------
        list of int
            All steps with a commit file. Their other files are not looked at.

        Raises
        ------
        OSError
            The directory cannot be read.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.wait()
        >>> checkpoints.steps()
        [100]
        """
        return self._chosen(self._steps.numbers, "listing the steps")

    def _chosen(self, prepare: Callable[[], T], doing: str) -> T:
        """Return what `prepare` returns on the first rank."""
        ranks = self._ranks.calls()
        if ranks.size == 1:
            return prepare()
        with self._lock:
            return ranks.first(prepare, doing)

    @takes()
    def latest(self, *, verify: bool = False, **options: Unpack[NoOptions]) -> int | None:
        """Return the newest step that is whole.

        Parameters
        ----------
        verify : bool
            Read all bytes and compare them with their digests. By default only the sizes and the headers of
            files are compared with the commit file.

        Returns
        -------
        int or None
            The number of the step. None if the directory has no steps.

        Raises
        ------
        CheckpointError
            All steps are damaged (``code`` is ``"no-valid-step"``), or a later version of ingot wrote a step
            (``"later-checkpoint"``), or another program did (``"foreign-checkpoints"``).
        OSError
            A file cannot be opened.

        Warns
        -----
        RuntimeWarning
            A newer step is damaged.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.wait()
        >>> checkpoints.latest(), checkpoints.latest(verify=True)
        (100, 100)
        """
        checked(self.latest, locals())

        def prove(folder: str, commit: Commit) -> None:
            for name in self._share_of(commit) if verify else ():
                verified(self._steps.path(folder, name), storage_options=self._steps.options)

        found = self._first(lambda commits: sorted(commits, reverse=True), prove)
        if found is None:
            return None
        self._warn_of_damage(found.damaged, f"step {found.step} is the latest that is whole")
        return found.step

    def best(self) -> int | None:
        """Return the step with the best value of the metric that `Checkpoints` was made with.

        Returns
        -------
        int or None
            The number of the step, or None if no step has the metric. The later of two equal steps.

        Raises
        ------
        OptionError
            `Checkpoints` was made without `best` (``code`` is ``"no-metric"``).
        CheckpointError, OSError
            As for `latest`.

        Warns
        -----
        RuntimeWarning
            A better step is damaged.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run", best=("loss", "min", 1))
        >>> checkpoints.save(100, {"step": 100}, metrics={"loss": 0.5})
        >>> checkpoints.save(200, {"step": 200}, metrics={"loss": 0.7})
        >>> checkpoints.wait()
        >>> checkpoints.best()
        100
        """
        rule = self._rules.best
        if rule is None:
            message = 'best() needs the name of a metric: Checkpoints(..., best=("loss", "min", 1))'
            raise OptionError(message, code="no-metric")

        def ranked(steps: Iterable[int]) -> list[int]:
            commits = self._steps.commits()
            return rule.ranked(commits[step] for step in steps if step in commits)

        found = self._first(ranked, lambda folder, commit: None)
        if found is None:
            return None
        self._warn_of_damage(found.damaged, f"step {found.step} is the best that is whole")
        return found.step

    @takes()
    def load(
        self,
        step: int | None = None,
        device: Device = None,
        *,
        into: Any = None,
        types: Iterable[type] = (),
        keys: Keys | None = None,
        drop: Keys | None = None,
        **options: Unpack[NoOptions],
    ) -> Any:
        """Load the state of a step, and compare all bytes with their digests.

        Parameters
        ----------
        step : int, optional
            The number of the step. By default the newest one that is whole.
        device, types, keys, drop
            Where new tensors are placed, classes of the state, and which tensors are loaded, as for
            `ingot.torch.load_state`.
        into : object, optional
            A tree with live objects and tensors that are filled, as for `ingot.torch.load_state`.

        Returns
        -------
        object
            The state, with the objects of `into` in their places.

        Raises
        ------
        CheckpointError
            There is no such step, or none at all (``code`` is ``"no-step"``), or none that is whole
            (``"no-valid-step"``). Or `latest` would not accept the step, or the step does not fit `into`.
        IntegrityError
            The given step is damaged.
        OSError, HeaderError, StorageError, DestinationError, DtypeError
            As for `ingot.torch.load_state`.

        Warns
        -----
        RuntimeWarning
            The newest step is damaged, and an earlier one was loaded. Or other than the saving ranks load,
            and each of these had a state for itself.

        Notes
        -----
        Any number of ranks may load a step, on any mesh: each reads the parts of tensors that it has. An
        object in `into` of which each saving rank had a state for itself, such as a random number generator,
        is only restored by the same number of ranks. Otherwise a list of the states of all ranks takes its
        place in the result, and a warning names it.

        The next save renames steps that are later than the loaded one to ``abandoned-...``.

        If another process deletes the step meanwhile, the newest is chosen again.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.load()
        {'step': 100}
        """
        given = {**locals()}

        def prepare() -> dict[str, Any]:
            checks: dict[str, Any] = {"step": partial(counted, "step", or_none=True), "types": checked_types}
            return checked(self.load, given, **checks)

        with self._lock:
            found, unfit = self._load(prepare)
        self._warn_of_damage(found.damaged, f"step {found.step} was loaded")
        if unfit:
            what = f"{', '.join(unfit)} had a state on each rank that saved step {found.step}"
            reason = f"{what}, and other ranks load it: the result has lists of the states"
            warn(f"{_escaped(self._directory)}: {reason}", RuntimeWarning, stacklevel=2)
        return found.result

    def _load(self, prepare: Callable[[], dict[str, Any]]) -> tuple[_Choice, list[str]]:
        """Load a step, or the newest one that is whole. Returns the paths of states that do not fit too."""
        self.wait()
        ranks, asked = self._ranks.calls(), []

        def compared() -> tuple[dict[str, Any], None]:
            asked.append(prepare())
            return {"directory": self._steps.identity(), "step": asked[0]["step"]}, None

        ranks.same(compared, "comparing the arguments of load")
        work = self._loading(ranks, asked[0])
        seen, step = self.steps(), asked[0]["step"]
        if step is not None:
            found = self._given(step, work, ranks)
        else:
            newest = self._first(lambda commits: sorted(commits, reverse=True), work)
            if newest is None:
                raise self._no_step(None)
            found = newest
        with ranks.step(f"restoring step {found.step}"):
            result, unfit = found.result()
        self._seen.update(seen)
        self._step = found.step
        return found._replace(result=result), unfit

    def _given(self, step: int, work: Callable[[str, Commit], Any], ranks: Together) -> _Choice:
        """Return the result of `work` on a step that the caller has chosen."""
        found: list[Any] = []
        folder = self._chosen(partial(self._steps.find, step), "looking for the step")

        def prepare() -> tuple[dict[str, Any], None]:
            if folder is None:
                raise self._no_step(step)
            try:
                commit = self._steps.read(folder)
                self._steps.check(folder, commit, self._share_of(commit))
                found.append(work(folder, commit))
                return {"save": commit.save}, None
            except OSError as error:
                if self._steps.has(folder):
                    raise
                # Another process has deleted it.
                raise self._no_step(step) from error

        ranks.same(prepare, f"reading step {step}")
        return _Choice(step, found[0], {})

    def _loading(self, ranks: Together, given: Mapping[str, Any]) -> Callable[[str, Commit], Any]:
        """Return a function that reads a step, and returns a function that restores it."""
        options = self._steps.options
        how = Loading(verify=True, keys=given["keys"], drop=given["drop"], storage_options=options)
        into, types, device = given["into"], given["types"], given["device"]
        if ranks.size > 1:
            loader = _states(self._framework or "torch").loader(into, types, how, device, ranks)
            return partial(_read_by, loader)

        def read_alone(folder: str, commit: Commit) -> Any:
            states = _states(self._framework_of(into, _imported(commit.framework)))
            if len(commit.files) > 1 or states.has_parts(into):
                of_parts = _states(self._framework or commit.framework)
                return _read_by(of_parts.loader(into, types, how, device, ranks), folder, commit)
            move = placed(self.load, states.whole.mover, device)
            path, compare = self._steps.path(folder, commit.tree), partial(check_save, commit)
            found, _ = states.loaded(path, how, move, into, types, check=compare)
            return lambda: (found, [])

        return read_alone

    def pin(self, step: int) -> None:
        """Keep a step until `delete`, or until the file ``pinned`` in its directory is removed.

        Parameters
        ----------
        step : int
            The number of the step. Any process may pin it, also while another one saves.

        Raises
        ------
        CheckpointError
            There is no such step (``code`` is ``"no-step"``).
        OSError, StorageError
            The file cannot be written.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.pin(100)
        """
        self._by_first(partial(argument, self.pin, "step", step, _counted_step), self._pin, "pinning a step")

    def _by_first(self, prepare: Callable[[], int], work: Callable[[int], None], doing: str) -> None:
        """Call `work` with the step that `prepare` returns, on the first rank."""
        with self._lock:
            self.wait()
            ranks = self._ranks.calls()

            def compared() -> tuple[dict[str, Any], int]:
                step = prepare()
                return {"directory": self._steps.identity(), "step": step}, step

            step = ranks.same(compared, doing)[0]
            with ranks.step(doing):
                if ranks.rank == 0:
                    work(step)

    def _pin(self, step: int) -> None:
        folder = self._steps.find(step)
        if folder is None or not self._steps.pin(folder):
            raise self._no_step(step)

    def delete(self, step: int) -> None:
        """Delete a step, pinned or not.

        Parameters
        ----------
        step : int
            The number of the step.

        Raises
        ------
        CheckpointError
            There is no such step (``code`` is ``"no-step"``), or a later version of ingot has saved it
            (``"later-checkpoint"``).
        StorageError
            Another process saves to the directory, or it cannot be locked, as for `save`.
        OSError
            A file cannot be removed.

        Notes
        -----
        Files that the user has put into the directory of the step stay.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.delete(100)
        >>> checkpoints.steps()
        []
        """
        prepare = partial(argument, self.delete, "step", step, _counted_step)
        self._by_first(prepare, self._delete, "deleting a step")

    def _delete(self, step: int) -> None:
        folder = self._steps.find(step)
        if folder is None:
            raise self._no_step(step)
        self._steps.take_lease()
        self._steps.known(folder)
        self._steps.unpin(folder)
        self._steps.delete(folder)

    def wait(self) -> None:
        """Wait for pending saves and deletions.

        Raises
        ------
        StorageError, OSError
            A save in the background has failed. The message has the path. Each failure is raised once.

        Examples
        --------
        >>> checkpoints = ingot.Checkpoints("run")
        >>> checkpoints.save(100, {"step": 100})
        >>> checkpoints.wait()
        """
        with self._lock:
            # All, so that none is under way when the failure of one is raised.
            for pending in [*self._pending]:
                settled(pending)
            for pending in [*self._pending]:
                # A signal handler may have waited for it meanwhile.
                if pending in self._pending:
                    self._pending.remove(pending)
                    pending.result()

    def save_on_signal(self, signal: int) -> None:
        """Have `stopping` return True after a signal, such as ``SIGTERM`` before a machine is taken away.

        Parameters
        ----------
        signal : int
            The signal, until the end of the ``with`` block. Its handler does nothing but remember the signal.

        Raises
        ------
        ValueError, OSError
            As for `signal.signal`: it is called in another than the main thread, or the signal cannot be
            handled.

        Examples
        --------
        >>> import signal
        >>> with ingot.Checkpoints("run") as checkpoints:  # doctest: +SKIP
        ...     checkpoints.save_on_signal(signal.SIGTERM)
        ...     for step in range(first, last):
        ...         train(state)
        ...         is_last = checkpoints.stopping()
        ...         if is_last or step % 100 == 0:
        ...             checkpoints.save(step, state)
        ...         if is_last:
        ...             break
        """
        number = argument(self.save_on_signal, "signal", signal, partial(counted, "signal", least=1))
        previous = signals.signal(number, self._note)
        self._handlers.setdefault(number, previous)

    def stopping(self) -> bool:
        """Return whether a signal of `save_on_signal` has arrived: save the step and leave the loop.

        Returns
        -------
        bool
            True from the signal on. Of several ranks, all return True if one has got a signal; they exchange
            a short message if `save_on_signal` was called.

        Examples
        --------
        >>> ingot.Checkpoints("run").stopping()
        False
        """
        if self._handlers and not self._is_stopping_everywhere:
            with self._lock:
                found = self._ranks.calls().gather(self._is_stopping, "asking for signals")
            self._is_stopping_everywhere = any(found)
            return self._is_stopping_everywhere
        return self._is_stopping

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True

    def _end(self) -> None:
        """Release the lease, after the saves that are still pending if an exception has ended the wait."""
        with self._lock:
            if all(pending.done() for pending in self._pending):
                self._pending.clear()
                self._steps.lease.release()
            else:
                self._put(self._steps.lease.release, self._directory)

    def _has(self, step: int, metrics: dict[str, float] | None) -> bool:
        """Return whether a step exists. Raise if it has other metrics."""
        folder = self._steps.find(step)
        if folder is None:
            return False
        known = self._steps.read(folder).metrics
        if metrics is not None and _spelled(metrics) != _spelled(known):
            reason = f"the step exists with the metrics {known}: pass them when the step is saved first"
            raise located(
                CheckpointError, reason, code="step-exists", path=folder, expected=metrics, found=known
            )
        return True

    def _later(self, step: int) -> list[int]:
        """Return the steps that training has gone back from.

        Raises
        ------
        CheckpointError
            There is a step that this object has not seen (``code`` is ``"not-resumed"``), or one of a later
            version of ingot (``"later-checkpoint"``) or another program (``"foreign-checkpoints"``).
        """
        steps = self._steps.numbers()
        unseen = [one for one in steps if one not in self._seen]
        # A damaged step cannot be loaded.
        unseen = [one for one in unseen if self._steps.known(self._steps.folder(one))]
        if unseen:
            last = "none" if self._step is None else f"step {self._step} last"
            since = f"this program has saved or loaded {last}"
            reason = f"step {step} cannot be saved: another program saved step {unseen[-1]}, and {since}"
            way_out = (
                f"call load() to continue after it, or choose another directory to begin anew{_of_ranks()}"
            )
            raise located(
                CheckpointError,
                f"{reason}: {way_out}",
                code="not-resumed",
                path=self._directory,
                found=unseen[-1],
            )
        first = step if self._step is None else min(step, self._step + 1)
        later = [one for one in steps if one >= first]
        for one in later:
            self._steps.known(self._steps.folder(one))
        return later

    def _set_aside(self, steps: Iterable[int]) -> list[str]:
        """Abandon steps, and return the names of their folders."""
        return [self._steps.set_aside(self._steps.folder(one)) for one in steps]

    def _commit(
        self,
        ranks: Together,
        writing: SaveFuture | None,
        folder: str,
        commit: Commit,
        file: str,
        before: _Before,
    ) -> None:
        """Write the commit file after the files of all ranks, which it names.

        If that fails, the directory gets the steps again that it had before.
        """

        def prepare() -> tuple[dict[str, Any], tuple[str, StoredFile]]:
            if writing is not None:
                writing.result()
            return {}, (file, self._steps.stored(folder, file))

        try:
            files = dict(ranks.same(prepare, f"writing step {commit.step}"))
            with ranks.step(f"committing step {commit.step}"):
                if ranks.rank == 0:
                    self._steps.write_commit(folder, commit._replace(files=files))
        except BaseException:
            with suppress(OSError):
                if not self._steps.may_have(folder, commit):
                    self._step = before.step
                    if ranks.rank == 0:
                        self._discard(folder, commit, before.renamed)
            raise

    def _discard(self, folder: str, commit: Commit, renamed: list[str]) -> None:
        """Remove the files of a save that has failed, and put back the steps that were set aside for it."""
        self._steps.discard(folder, commit.save)
        if self._steps.lease.is_held():
            self._steps.put_back(renamed)

    def _put(self, call: Callable[[], None], path: str) -> None:
        """Queue a call whose failure the next save raises. Without a next one it is printed at exit."""
        future = SaveFuture(path)
        future._outcome.is_warned = True
        self._pending.append(SAVES.put(call, future))

    def _clear(self, ranks: Together) -> None:
        """Delete the steps that need not stay. Without the lease, the next save raises."""
        if ranks.is_lost:
            # The failure of the save has been reported.
            return
        with ranks.step("deleting old steps"):
            if ranks.rank == 0 and self._steps.lease.is_held():
                self._steps.apply(self._rules)

    def _share_of(self, commit: Commit) -> list[str]:
        """Return the files that this rank checks for all."""
        ranks = self._ranks.calls()
        return [*commit.files][ranks.rank :: ranks.size]

    def _framework_of(self, tree: Any, default: str = "numpy") -> str:
        """Return the caller's framework, or else the framework of the objects in a state."""
        if self._framework is not None:
            return self._framework
        found = {owner(value) for _, value in within(tree) if is_live(value) or is_tensor(value)}
        return next((name for name in _WITH_STATES if name in found), default)

    def _first(
        self, order: Callable[[Iterable[int]], list[int]], work: Callable[[str, Commit], Any]
    ) -> _Choice | None:
        """Return the first step in `order` that is whole and that `work` accepts. None without steps.

        Raises
        ------
        CheckpointError
            All steps are damaged.
        """
        ranks = self._ranks.calls()
        damaged: dict[int, Exception] = {}
        vanished: set[int] = set()

        def choose() -> tuple[int, str] | None:
            steps = [step for step in self._steps.numbers() if step not in damaged]
            step = next(iter(order(steps)), None)
            return None if step is None else (step, self._steps.folder(step))

        while True:
            chosen = self._chosen(choose, "choosing a step")
            if chosen is None:
                break
            step, folder = chosen
            found: list[Any] = []
            errors: list[Exception] = []
            prepare = partial(self._tried, folder, work, found, errors, step in vanished)
            tried = ranks.same(prepare, f"reading step {step}")
            vanished.add(step)
            if any(one.is_gone for one in tried):
                continue
            bad = next((rank for rank, one in enumerate(tried) if one.damage is not None), None)
            if bad is not None:
                other = RankError(f"rank {bad}: {tried[bad].damage}", code="rank-failed", rank=bad)
                damaged[step] = errors[0] if errors else other
            elif len({one.save for one in tried}) == 1:
                return _Choice(step, found[0], damaged)
        if damaged:
            first = next(iter(damaged.values()))
            way_out = "restore the directory from a copy, or choose another one to begin anew"
            reason = f"none of the steps {', '.join(map(str, damaged))} is whole: {first}: {way_out}"
            raise located(CheckpointError, reason, code="no-valid-step", path=self._directory) from first
        return None

    def _tried(
        self,
        folder: str,
        work: Callable[[str, Commit], Any],
        found: list[Any],
        errors: list[Exception],
        has_vanished: bool,
    ) -> tuple[dict[str, Any], _Tried]:
        """Work on a step. Errors about its bytes are recorded, and others are raised."""
        commit = None
        try:
            commit = self._steps.read(folder)
            self._steps.check(folder, commit, self._share_of(commit))
            found.append(work(folder, commit))
            return {}, _Tried(commit.save, False, None)
        except (CheckpointError, HeaderError, IntegrityError, OSError) as error:
            # A step may vanish once. The second time it is damaged.
            if not has_vanished and not self._steps.is_there(folder, commit):
                return {}, _Tried(None, True, None)
            if not self._steps.is_damage(error):
                raise
            errors.append(error)
            return {}, _Tried(None, False, f"{type(error).__name__}: {error}")

    def _warn_of_damage(self, damaged: dict[int, Exception], outcome: str) -> None:
        if damaged:
            steps = "step " if len(damaged) == 1 else "steps "
            steps += f"{', '.join(map(str, damaged))} {'is' if len(damaged) == 1 else 'are'} damaged"
            first = next(iter(damaged.values()))
            warn(f"{_escaped(self._directory)}: {steps}, so {outcome}: {first}", RuntimeWarning, stacklevel=3)

    def _no_step(self, step: int | None) -> CheckpointError:
        steps = self._steps.numbers()
        shown = f"the last of {len(steps)} is {steps[-1]}" if steps else "it has no steps"
        reason = "the directory has no step" if step is None else f"there is no step {step}: {shown}"
        if is_committed(self._directory):
            reason += ": it is a step itself, so pass the directory that contains it"
        return located(CheckpointError, reason, code="no-step", path=self._directory, expected=step)


def _steps_at(directory: str | bytes, options: StorageOptions | None) -> Steps:
    """Return the steps of a directory, or of a folder of a store."""
    path = os.fsdecode(directory)
    # The program may change the current directory.
    return StoreSteps(path, options) if is_url(path) else DiskSteps(os.path.join(os.getcwd(), path))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Return a context in which the garbage collector does not run.

    A save makes containers for each of perhaps 100,000 tensors, which would start it again and again, and
    each time it looks at all objects of the program.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_by(loader: Any, folder: str, commit: Commit) -> Any:
    """Return a function that restores a step of several files."""
    return read_by(loader, folder, commit).finish


def _of_ranks() -> str:
    """Return a hint if a launcher has started several processes, and torch.distributed is not initialised."""
    torch: Any = modules.get("torch")
    has_ranks = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if has_ranks or os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    world = os.environ["WORLD_SIZE"]
    return f"; the {world} processes of torchrun save together after torch.distributed.init_process_group"


def _states(framework: str) -> States:
    module: Any = adapter(framework)
    found: States = module.states
    return found


def _imported(framework: str) -> str:
    """Return the framework that saved a step if the program has imported it, else NumPy."""
    is_known = framework in _WITH_STATES and _PACKAGES.get(framework, framework) in modules
    return framework if is_known else "numpy"


def _spelled(metrics: Mapping[str, float]) -> str:
    """Return a text that is equal for equal metrics in any order, also for NaN."""
    return repr(sorted(metrics.items()))


def checked_best(best: Any) -> Best | None:
    """Return the rule of the best steps, after checking its parts."""
    if best is None:
        return None
    if not isinstance(best, tuple) or len(best) != 3 or not isinstance(best[0], str):
        raise TypeError(f'best must be a tuple such as ("loss", "min", 2) or None, found {best!r}')
    metric, mode, count = best
    return Best(metric, one_of("best", mode, ("min", "max")), counted("best", count, least=1))  # type: ignore[arg-type]


def checked_framework(framework: Any) -> str | None:
    """Return the module of a framework, which must have training states."""
    if framework is None:
        return None
    found = module_of(framework)
    if found not in _WITH_STATES:
        message = f"framework {framework!r} has no training states: expected one of {', '.join(_WITH_STATES)}"
        raise OptionError(message, code="unknown-framework", expected=_WITH_STATES, found=framework)
    return found


def checked_metrics(metrics: Any) -> dict[str, float] | None:
    """Return metrics as floats, which may be numbers of any type, and tensors of one element."""
    given = checked_mapping("metrics", metrics)
    if given is None:
        return None
    try:
        return {name: _number(value) for name, value in given.items()}
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise TypeError(f"metrics must be a dict of str to float: {error}") from None


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"found {value!r}")
    # `float` warns about a tensor of torch that requires gradients.
    return float(value.item() if hasattr(value, "item") else value)


__all__ = ["Checkpoints"]
