"""Rules that write a file step by step: by several processes, and with unknown tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

import ingot

from .drawn import FILE, FILES, SPECS
from .folder import Folder
from .helpers import Helper


class Writers(Folder):
    """Rules that write by `ingot.Writer`."""

    helpers: ClassVar[Sequence[Helper]]

    @rule(
        name=FILE, specs=SPECS, ends=st.sampled_from(["commit", "guest commits", "abandon", "abandon half"])
    )
    def write_by_several_processes(self, name: str, specs: Any, ends: str) -> None:
        tensors, path, first = self.made(specs), self.folder / name, self.number - len(specs) + 1
        shares: list[list[Any]] = [[] for _ in range(len(self.helpers) + 1)]
        for number, (key, array) in enumerate(tensors.items(), start=first):
            if array.ndim == 0:
                continue
            borders = [len(array) * part // len(shares) for part in range(len(shares) + 1)]
            for share, (begin, end) in zip(shares, pairwise(borders), strict=True):
                share.append((key, number, array.dtype.str, array.shape, begin, end))
        with ingot.Writer(path, tensors, {"k": "written"}, overwrite=True) as writer:
            for helper, share in zip(self.helpers, shares, strict=False):
                helper.write(path, share, commits=False)
                if ends == "abandon half":
                    break
            else:
                for key, *_, begin, end in shares[-1]:
                    writer.write(key, tensors[key][begin:end], slice(begin, end))
                for key, array in tensors.items():
                    if array.ndim == 0:
                        writer.write(key, array)
            if ends == "commit":
                writer.commit()
            elif ends == "guest commits":
                self.helpers[0].write(path, [], commits=True)
            else:
                writer.close()
        if "commit" in ends:
            self.settle(name, tensors, {"k": "written"})
        elif name in self.models:
            self.check(name)

    @rule(name=st.sampled_from(FILES[:2]), specs=SPECS, commits=st.booleans())
    def append(self, name: str, specs: Any, commits: bool) -> None:
        tensors = self.made(specs)
        with ingot.Writer(
            self.folder / name,
            metadata={"k": "appended"},
            write_options={"reserve_header": 1000},
            overwrite=True,
        ) as writer:
            for key, array in tensors.items():
                writer.write(key, array)
            if commits:
                writer.commit()
            else:
                writer.close()
        if commits:
            self.settle(name, tensors, {"k": "appended"})
        elif name in self.models:
            self.check(name)
