"""Measures ingot against its peers and records the figures.

`make bench` runs it; benches/README.md explains.
"""

import argparse
import importlib.metadata
from pathlib import Path

import options
import record
import table
from scenarios import SCENARIOS
from workplace import Workplace

RECORDS = Path(__file__).parents[1] / "record"


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, None, room="3 GB", scaled=True)
    parser.add_argument("--peer-version", help="stop unless safetensors has this version")
    parser.add_argument(
        "--peer", choices=("safetensors", "bintensors", "ingot"), help="only the rows against this one"
    )
    parser.add_argument("--only", metavar="TEXT", help="only the rows whose name contains this")
    parser.add_argument("--record", type=Path, help="where to put the record (default: benches/record)")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    installed = importlib.metadata.version("safetensors")
    if given.peer_version not in (None, installed):
        raise SystemExit(f"expected safetensors {given.peer_version}, found {installed}")
    chosen = [
        scenario
        for scenario in SCENARIOS
        if given.peer in (None, scenario.peer) and (given.only or "") in scenario.what
    ]
    if not chosen:
        raise SystemExit(f"no row has {given.only!r} in its name")
    with options.place(given.dir) as directory:
        place = Workplace(directory, given.scale)
        found = record.conditions(place.directory, given.scale)
        print(*record.sentences(found), "", sep="\n", flush=True)
        found |= {"peer": "safetensors", "rows": []}
        for scenario in chosen:
            row = table.row(scenario, scenario.measure(place, given.rounds or scenario.rounds))
            found["rows"].append(row)
            print(
                f"{scenario.what}\n   ",
                *(
                    f"{head} {cell};"
                    for head, cell in zip(table.HEAD[1:], table.cells(row)[1:], strict=True)
                    if cell
                ),
                f"{row['rounds']} rounds\n    {scenario.result}",
                flush=True,
            )
    # A partial or scaled table is recorded only if the caller requests it.
    whole = given.scale == 1 and given.only is None and given.rounds is None
    if given.record or whole:
        print(f"\nrecorded in {table.write(found, given.record or RECORDS)}")


if __name__ == "__main__":
    main()
