"""Callables for the option `progress`."""

from __future__ import annotations


class Stopped(Exception):
    """The error of `stop`."""


def stop(done: int, total: int) -> None:
    """Stop the operation at its first report."""
    raise Stopped("enough")


class Progress(list[tuple[int, int]]):
    """The reports of an operation."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def assert_complete(self, total: int) -> None:
        """Check that the reports grow up to `total`, which never changes."""
        assert self == sorted(self)
        assert {of for _, of in self} == {total}
        assert self[-1] == (total, total)
