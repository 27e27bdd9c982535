"""Compares two builds of ingot in each row of `main.py`, to find rows that became slower.

Each build runs in processes of its own. The two take turns within a row, so that both meet the same machine.
Each row has several pairs of processes: the addresses of one process alone change a row of microseconds by
several percent.
A row is slower if the upper bound of the median ratio (old / new, 95 %, by bootstrap) is below 0.97.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import options

SLOWER = 0.97
PROCESSES = 5
RESAMPLES = 10_000


class Build:
    """A process that measures one build, one figure at a time."""

    def __init__(self, name: str, package: Path, directory: Path, scale: float) -> None:
        self.name = name
        # Programs that a row starts inherit the path.
        path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", directory, str(scale), package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def begin(self, what: str, rounds: int) -> None:
        """Prepare a row: make its files, and check the bytes once."""
        self._send({"what": what, "rounds": rounds})
        self._answer()

    def measure(self) -> None:
        """Run the row once."""
        self._send("go")
        self._answer()

    def figures(self) -> list[float]:
        """Return all figures of the row."""
        self._send("figures")
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _send(self, message: object) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} build ended with {self._process.wait()}")
        return json.loads(line)


def compare(start: Callable[[str], Build], what: str, rounds: int) -> dict:
    """Measure a row on both builds in turn, in several pairs of processes."""
    each = [rounds // PROCESSES + (number < rounds % PROCESSES) for number in range(PROCESSES)]
    before, after, ratios = [], [], []
    for own in filter(None, each):
        builds = [start("old"), start("new")]
        for build in builds:
            build.begin(what, own)
        for round_ in range(own):
            for build in builds if round_ % 2 == 0 else reversed(builds):
                build.measure()
        old, new = (build.figures() for build in builds)
        for build in builds:
            build.close()
        before += old
        after += new
        ratios.append([a / b for a, b in zip(old, new, strict=True)])
    low, high = bounds(ratios)
    return {
        "what": what,
        "old": statistics.median(before),
        "new": statistics.median(after),
        "ratio": statistics.median(chain(*ratios)),
        "low": low,
        "high": high,
        "slower": high < SLOWER,
        "pairs": rounds,
    }


def bounds(ratios: list[list[float]]) -> tuple[float, float]:
    """Return the 95 % bounds of the median, by a bootstrap with a fixed seed.

    A sample draws pairs of processes, and all ratios of each pair, since ratios of one process are similar.
    """
    draw = random.Random(0)

    def sample() -> list[float]:
        return [one for own in draw.choices(ratios, k=len(ratios)) for one in draw.choices(own, k=len(own))]

    medians = sorted(statistics.median(sample()) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def unpacked(wheel: Path, directory: Path) -> Path:
    """Unpack a wheel into the directory. A directory that holds the package is used as it is."""
    if wheel.is_file():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        wheel = directory
    if not (wheel / "ingot").is_dir():
        raise SystemExit(f"{wheel} has no package ingot")
    return wheel.resolve()


def worker(directory: str, scale: str, package: str) -> None:
    """Measure rows for `Build`, which writes to standard input and reads standard output."""
    import ingot
    import turns
    from scenarios import SCENARIOS
    from workplace import Workplace

    if not Path(ingot.__file__).is_relative_to(package):
        raise SystemExit(f"expected ingot from {package}, found {ingot.__file__}")
    answers, sys.stdout = sys.stdout, sys.stderr
    rows = {scenario.what: scenario for scenario in SCENARIOS}

    def answer(message: object) -> None:
        print(json.dumps(message), file=answers, flush=True)

    def wait_for_turn() -> None:
        # The answer to `begin`, or to the turn before.
        answer("ready")
        assert json.loads(sys.stdin.readline()) == "go"

    turns.wait_for_turn = wait_for_turn
    place = Workplace(Path(directory), float(scale))
    for line in sys.stdin:
        asked = json.loads(line)
        found = rows[asked["what"]].measure(place, asked["rounds"]).ours
        # The answer to the last turn.
        answer("ready")
        assert json.loads(sys.stdin.readline()) == "figures"
        answer(found)


def main() -> None:
    parser = options.parser(__doc__, 15, room="7 GB", scaled=True, figures=True)
    parser.add_argument("old", type=Path, help="a wheel, or a directory that holds the package")
    parser.add_argument("new", type=Path, help="the other build")
    parser.add_argument("--only", metavar="TEXT", help="only the rows whose name contains this")
    given = parser.parse_args()
    from scenarios import SCENARIOS

    rows = [scenario.what for scenario in SCENARIOS if (given.only or "") in scenario.what]
    if not rows:
        raise SystemExit(f"no row has {given.only!r} in its name")
    found = []
    with options.place(given.dir) as directory:
        packages = {name: unpacked(vars(given)[name], directory / name) for name in ("old", "new")}

        def start(name: str) -> Build:
            return Build(name, packages[name], directory, given.scale)

        # Makes the files in another process, since a process that has made files has another heap.
        first = start("old")
        for what in rows:
            first.begin(what, 1)
            first.measure()
            first.figures()
            row = compare(start, what, given.rounds)
            found.append(row)
            print(
                f"{'SLOWER' if row['slower'] else 'ok':7}{row['ratio']:6.3f} "
                f"({row['low']:.3f} to {row['high']:.3f})  {row['old']:.6g} -> {row['new']:.6g}  {what}",
                flush=True,
            )
        first.close()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    slower = sum(row["slower"] for row in found)
    print(f"{len(found)} rows, {slower} slower")
    raise SystemExit(bool(slower))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
