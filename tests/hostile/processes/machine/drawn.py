"""Strategies for the random arguments of a step: names, contents, options."""

from __future__ import annotations

from hypothesis import strategies as st

from .content import DTYPES

# The last shape takes many pages.
SHAPES = [(), (0,), (3,), (2, 3), (5, 1, 2), (40, 50), (70_000,)]
NAMES = ["a", "b", "c.weight", 'quo"te', "ö"]
FILES = ["a.safetensors", "b.safetensors", "c.bt"]
# A save replaces files of its own pattern only, so that each folder has one pattern.
FOLDERS = {"s": "model{suffix}.safetensors", "t": "model{suffix}.bt"}

SPECS = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from(sorted(DTYPES.values())), st.sampled_from(SHAPES)),
    max_size=4,
)
TEXTS = st.sampled_from(["", "x", "ü" * 30, "long" * 700])
METADATA = st.dictionaries(st.sampled_from(["k", "step", "ö"]), TEXTS, max_size=2)
LAYOUT = st.fixed_dictionaries(
    {},
    optional={
        "checksums": st.sampled_from([True, "xxh3", ["sha256", "modelspec"]]),
        "write_options": st.fixed_dictionaries(
            {},
            optional={
                "reserve_header": st.sampled_from([0, 100, 5000]),
                "align": st.sampled_from([8, 64, 4096]),
            },
        ),
    },
)
# A choice among existing objects: the number modulo their count.
ANY = st.integers(0, 59)
FILE = st.sampled_from(FILES)
BACKEND = st.sampled_from(["auto", "mmap", "pread"])
