"""The defects of the peers that their wheels can be made to show, shown.

When upstream has mended one, its case fails, and the entry goes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Each lists its own in DEFECTS.
import test_defects_of_opening
import test_defects_of_reading
import test_defects_of_saving
from defects import DEFECTS, Measure

from support.processes import NOBODY, run

MODULES = {
    module.__name__ for module in (test_defects_of_opening, test_defects_of_reading, test_defects_of_saving)
}


def test_each_module_lists_some() -> None:
    assert {case.values[0].__module__ for case in DEFECTS} == MODULES


@pytest.mark.parametrize(("measure", "expected"), DEFECTS)
def test_upstream_still_does_this(measure: Measure, expected: Any, tmp_path: Path) -> None:
    assert measure(tmp_path) == expected, "upstream has changed: take the entry out, or correct it"


def test_nobody_is_who_the_programs_become() -> None:
    assert run("become_nobody(); say(os.geteuid())").said() == (NOBODY if os.geteuid() == 0 else os.geteuid())
