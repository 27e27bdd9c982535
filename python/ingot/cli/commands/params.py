"""``ingot params``: how many parameters there are."""

from __future__ import annotations

from collections import Counter

from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, count, printing
from ingot.cli.sources import opened


@arguments.command()
@arguments.path
@printing
def command(screen: Screen, path: str) -> int:
    """Count the parameters, in total and by dtype.

    Counts all stored elements, including buffers. Several quantised weights that are packed into one integer
    count as one.
    """
    by_dtype = Counter(opened(path).handle.parameter_count())
    total = by_dtype.total()
    if screen.as_json:
        screen.answer({"total": total, "dtypes": dict(by_dtype.most_common())})
    elif screen.quiet:
        screen.result(str(total))
    else:
        human = screen.is_terminal
        rows = [(dtype, f"{number:,}" if human else str(number)) for dtype, number in by_dtype.most_common()]
        if not human:
            rows.append(("total", str(total)))
        screen.table((Column("dtype"), Column("parameters", right=True)), rows)
        if human:
            screen.say(f"Total parameters: {count(total)}")
    return 0
