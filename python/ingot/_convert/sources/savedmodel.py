"""TensorFlow's SavedModels, of which only the variables are read. The graph is left out, never run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ingot._base.text import _escaped
from ingot._convert.limits import refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Options

from .tensorflow import contents

GRAPH = "saved_model.pb"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The variables, by their paths in the objects."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    prefix = os.path.join(folder, "variables", "variables")
    if not os.path.isfile(prefix + ".index"):
        raise refused(
            path,
            f"a SavedModel without variables: there is no {_escaped(prefix)}.index",
            code="no-tensors",
            expected=prefix + ".index",
        )
    found = contents(prefix)
    yield Contents(found.entries, [*found.left_out, LeftOut(GRAPH, "graph")], found.metadata)
