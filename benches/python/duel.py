"""Two ways to do one thing, timed turn by turn."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from turns import in_turn

Action = Callable[[], object]


@dataclass
class Samples:
    """The measurements in the order of the rounds. `theirs` is empty without a peer."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    unit: str = "s"


@dataclass
class Duel:
    """Our action and the peer's, with a check that both have the same result."""

    ours: Action
    theirs: Action
    # Called with both results. Raises unless they are equal, byte by byte.
    assert_same: Callable[[object, object], None]
    # Called before every action, off the clock.
    reset: Callable[[], object] = lambda: None

    def run(self, rounds: int) -> Samples:
        """Compare once, which also warms both up, then time.

        They alternate in the process. The cyclic garbage collector stays on, as for users; earlier garbage
        is collected off the clock, so that no action pays for the one before. Freeing the
        result is off the clock too.
        """
        self._assert_same()
        actions = {"ours": self.ours, "theirs": self.theirs}
        return Samples(**in_turn(rounds, lambda side: self._timed(actions[side]), actions))

    def _timed(self, action: Action) -> float:
        self.reset()
        gc.collect()
        start = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def _assert_same(self) -> None:
        # A call of its own, so that both results are gone when the clock starts.
        self.reset()
        ours = self.ours()
        self.reset()
        self.assert_same(ours, self.theirs())
