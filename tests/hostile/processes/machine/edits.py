"""Rules that make files from files, that change files, and that act like other programs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import ingot

from .content import DTYPES, Tensors
from .drawn import ANY, FILE, FILES, FOLDERS, LAYOUT, METADATA, NAMES
from .folder import Folder, has_any, has_file


class Edits(Folder):
    """Rules that edit, rewrite, merge, split, convert and move."""

    @precondition(has_file)
    @rule(
        number=ANY,
        pairs=METADATA,
        gone=st.sampled_from([[], ["k"], ["step", "nope"]]),
        atomic=st.booleans(),
    )
    def update_metadata(self, number: int, pairs: Any, gone: list[str], atomic: bool) -> None:
        name = self.pick(number, FILES)
        model = self.models[name]
        assert model.metadata is not None
        before = (self.folder / name).stat().st_ino
        done = ingot.update_metadata(self.folder / name, pairs | dict.fromkeys(gone), atomic=atomic)
        assert done != "in-place" or not atomic
        assert ((self.folder / name).stat().st_ino == before) == (done != "rewritten")
        if done == "in-place":
            self.written_into(name, into_data=False)
        left = {key: text for key, text in (model.metadata | pairs).items() if key not in gone}
        assert done != "unchanged" or left == model.metadata
        self.settle(name, model.tensors, left)

    @precondition(has_file)
    @rule(number=ANY, which=ANY)
    def replace_tensor(self, number: int, which: int) -> None:
        name = self.pick(number, FILES)
        model = self.models[name]
        if model.tensors:
            key = sorted(model.tensors)[which % len(model.tensors)]
            old = model.tensors[key]
            tensors = self.made({key: (old.dtype.str, old.shape)})
            ingot.replace_tensor(self.folder / name, key, tensors[key])
            self.settle(name, model.tensors | tensors, model.metadata)

    @precondition(has_any)
    @rule(
        number=ANY,
        name=FILE,
        kept=st.sets(st.sampled_from(NAMES)),
        turned=st.booleans(),
        layout=LAYOUT,
    )
    def rewrite(self, number: int, name: str, kept: set[str], turned: bool, layout: Any) -> None:
        source = self.pick(number)
        model = self.models[source]
        new = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)) if turned else {}
        options = {key: value for key, value in layout.items() if key != "checksums" and name != "c.bt"}
        if model.metadata is None:
            options["metadata"] = {"k": "rewritten"}
        ingot.rewrite(
            self.folder / source,
            self.folder / name,
            rename=lambda key: new.get(key, key),
            keys=lambda info: info.name in kept,
            overwrite=True,
            **options,
        )
        tensors = {new.get(key, key): array for key, array in model.tensors.items() if key in kept}
        self.settle(name, tensors, options.get("metadata", model.metadata))

    @precondition(has_any)
    @rule(
        numbers=st.lists(ANY, min_size=1, max_size=3),
        name=FILE,
        wins=st.sampled_from(["first", "last", "error"]),
        says=st.booleans(),
    )
    def merge(self, numbers: list[int], name: str, wins: Any, says: bool) -> None:
        sources = [self.pick(number) for number in numbers]
        models = [self.models[source] for source in sources]
        options: dict[str, Any] = {"overwrite": True, "on_duplicate": wins}
        if says or any(model.metadata is None for model in models):
            options["metadata"] = {"k": "merged"}

        def call() -> None:
            ingot.merge([self.folder / source for source in sources], self.folder / name, **options)

        pairs = [pair for model in models for pair in (model.metadata or {}).items()]
        tensors: Tensors = {}
        for model in models if wins == "last" else reversed(models):
            tensors |= model.tensors
        twice = wins == "error" and len(tensors) < sum(len(model.tensors) for model in models)
        at_odds = "metadata" not in options and len(set(pairs)) > len(dict(pairs))
        if twice or at_odds:
            self.refused(["duplicate-tensor"] * twice + ["metadata-conflict"] * at_odds, call, name)
        else:
            call()
            self.settle(name, tensors, options.get("metadata", dict(pairs)))

    @precondition(has_any)
    @rule(number=ANY, name=st.sampled_from(sorted(FOLDERS)), size=st.sampled_from([1, 5000, "1MB"]))
    def split(self, number: int, name: str, size: Any) -> None:
        source = self.pick(number)
        tensors, path = self.models[source].tensors, self.folder / name
        self.written_into(name, into_data=False)
        ingot.split(self.folder / source, path, size, filename_pattern=FOLDERS[name], overwrite=True)
        self.settle(name, tensors, None)

    @precondition(has_file)
    @rule(number=ANY, name=FILE, dtype=st.sampled_from([None, "F32", "F16"]), verify=st.booleans())
    def convert(self, number: int, name: str, dtype: str | None, verify: bool) -> None:
        source = self.pick(number, FILES)
        model = self.models[source]
        if not model.tensors:
            return
        ingot.convert(
            self.folder / source,
            self.folder / name,
            source_format="bintensors" if source == "c.bt" else "safetensors",
            dtype=dtype,
            verify=verify,
            overwrite=True,
        )
        tensors = {
            key: array.astype(DTYPES[dtype]) if dtype and array.dtype.kind == "f" else array
            for key, array in model.tensors.items()
        }
        self.settle(name, tensors, model.metadata)

    @precondition(has_file)
    @rule(number=ANY, name=st.sampled_from(FILES[:2]), gone=st.booleans())
    def move(self, number: int, name: str, gone: bool) -> None:
        """Act like another program: remove a file, or rename it over another one."""
        source = self.pick(number, FILES[:2]) if self.models.keys() & set(FILES[:2]) else None
        if source is None:
            return
        if gone:
            (self.folder / source).unlink()
            del self.models[source]
        else:
            (self.folder / source).replace(self.folder / name)
            self.settle(name, *vars(self.models.pop(source)).values())
