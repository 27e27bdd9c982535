"""Random sequences of all functions that make a file from another one, compared with a dict of tensors.

The model of a file is the expected result of `load_file`: a dict of torch tensors, in which aliases
share memory. After every step the new file is loaded and verified. Its records must match its tensors. A
stale record would lose a name, bring one back, change its values, or make a valid file look corrupt.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import ingot

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

# `rewrite` warns if it renames and drops nothing.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:rewrite:UserWarning")]

SEEDS = 20
# 10,000 steps in total.
STEPS = 500
NAMES = ["a", "b", "c", "dec", "enc", "format", "head.weight", "ingot.shared", 'quo"te', "ö"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
ALGORITHMS = ["blake3", "xxh3"]

Tensors = dict[str, Any]


def geometry(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def twins(tensors: Tensors) -> set[frozenset[str]]:
    """Return the groups of names that are one tensor."""
    groups: dict[Any, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(geometry(tensor), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def values(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def apart(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass
class File:
    """A file or a directory, and its expected contents."""

    path: Path
    tensors: Tensors
    """As it was loaded: names that share a tensor share memory."""
    covered: dict[str, str] = field(default_factory=dict)
    """The names of tensors with a digest, each with the algorithm."""
    ties: set[frozenset[str]] | None = None
    """Which names have to share a tensor; those of `tensors` by default."""

    @property
    def is_file(self) -> bool:
        return self.path.is_file()


class Sequence:
    """One sequence of steps over a few files."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.numbers = count()
        self.done: list[str] = []
        self.files = [self.made(), self.made()]

    # --- choices ---

    def some(self, names: Any, least: int = 0) -> list[str]:
        names = sorted(names)
        return self.random.sample(names, self.random.randint(min(least, len(names)), len(names)))

    def path(self, *endings: str) -> Path:
        return self.folder / f"{next(self.numbers)}{self.random.choice(endings or ('.safetensors', '.bt'))}"

    def tensor(self) -> Any:
        shape = self.random.choice([(), (0,), (3,), (2, 3), (3, 2, 2)])
        dtype = self.random.choice(DTYPES)
        numel = torch.Size(shape).numel()
        return torch.tensor([self.random.randint(-90, 90) for _ in range(numel)], dtype=dtype).reshape(shape)

    def related(self, tensor: Any) -> Any:
        """Return the same tensor, or a part of it."""
        if not tensor.numel() or not tensor.dim() or self.random.random() < 0.6:
            return tensor
        dim = self.random.randrange(tensor.dim())
        return tensor.select(dim, self.random.randrange(tensor.shape[dim]))

    def digests(self) -> tuple[list[Any], str | None]:
        algorithm = self.random.choice([*ALGORITHMS, None])
        kept = [] if algorithm is None else [algorithm]
        return kept + self.random.choice([[], ["modelspec"]]), algorithm

    # --- steps: each returns the new file with its expected contents ---

    def saved(self, tensors: Tensors, metadata: dict[str, str] | None) -> File:
        """Save in one of the ways, with the given metadata."""
        path, (checksums, algorithm) = self.path(), self.digests()
        shared = "alias"
        try:
            ingot.torch.save_file(tensors, path, metadata, shared="alias", checksums=checksums)
        except ingot.SharedMemoryError:
            # Overlapping parts. None contains another.
            shared = "copy"
            ingot.torch.save_file(tensors, path, metadata, shared="copy", checksums=checksums)
        covered = {} if algorithm is None else dict.fromkeys(tensors, algorithm)
        return File(path, tensors, covered, ties=set() if shared == "copy" else None)

    def made(self) -> File:
        tensors: Tensors = {}
        for name in self.some(NAMES, 1):
            relative = self.random.choice(list(tensors.values())) if tensors else None
            tied = relative is not None and self.random.random() < 0.5
            tensors[name] = self.related(relative) if tied else self.tensor()
        return self.checked(self.saved(tensors, {"format": "pt", "step": "1"}))

    def save_again(self, file: File) -> File:
        """Save some of the loaded tensors and new ones, with the loaded metadata."""
        tensors = {name: file.tensors[name] for name in self.some(file.tensors)}
        for name in self.some(NAMES)[:2]:
            tensors[name] = self.tensor()
        pairs = ingot.inspect(file.path).metadata or {}
        way = self.random.choice(["save_file", "copy", "bytes", "stream", "writer", "sharded"])
        texts = {key: text for key, text in pairs.items() if isinstance(text, str)}
        for shard in ingot.safe_open(file.path, "pt").shard_metadata().values():
            texts |= shard or {}
        if way == "save_file":
            return self.saved(tensors, texts)
        path = self.path()
        if way == "copy":
            ingot.torch.save_file(tensors, path, texts, shared="copy")
        elif way == "bytes":
            format = "bintensors" if path.suffix == ".bt" else "safetensors"
            path.write_bytes(ingot.torch.save(tensors, texts, shared="copy", format=format))
        elif way == "stream":
            with path.open("wb") as out:
                ingot.torch.save_file(tensors, out, texts, shared="copy")
        elif way == "writer":
            with ingot.Writer(path, tensors, texts, overwrite=True) as writer:
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
                writer.commit()
        else:
            path = self.path("")
            size = self.random.choice([10, 10_000])
            ingot.torch.save_sharded(apart(tensors), path, size, metadata=texts)
        return File(path, tensors, ties=set())

    def renamed(self, file: File) -> File:
        names = self.some(file.tensors)
        new = dict(zip(names, self.random.sample(NAMES, len(names)), strict=True))
        by_name = [new.get(name, name) for name in file.tensors]
        if len(set(by_name)) < len(by_name):
            new = {}
        path = self.path()
        rename: Any = new if self.random.random() < 0.5 else lambda name: new.get(name, name)
        ingot.rewrite(file.path, path, rename=rename)
        tensors = {new.get(name, name): tensor for name, tensor in file.tensors.items()}
        covered = {new.get(name, name): how for name, how in file.covered.items()}
        return File(path, tensors, covered)

    def dropped(self, file: File) -> File:
        kept = self.some(file.tensors)
        path = self.path()
        metadata = self.random.choice([..., None, {"other": "text"}, ingot.inspect(file.path).metadata])
        if metadata is not None and metadata is not ...:
            metadata = {key: text for key, text in metadata.items() if isinstance(text, str)}
        if self.random.random() < 0.5:
            ingot.rewrite(file.path, path, keys=lambda info: info.name in kept, metadata=metadata)
        else:
            gone = [name for name in file.tensors if name not in kept]
            ingot.rewrite(file.path, path, drop=gone, metadata=metadata)
        covered = file.covered if metadata is ... else {}
        return File(path, {name: file.tensors[name] for name in kept}, covered)

    def merged(self, file: File) -> File:
        sources = [file, *self.random.choices(self.files, k=2)]
        rule: Any = self.random.choice(["first", "last", "error"])
        steps = {(ingot.inspect(one.path).metadata or {}).get("step") for one in sources} - {None}
        # Sources with conflicting metadata need an explicit choice.
        metadata: Any = ... if len(steps) < 2 and self.random.random() < 0.7 else {"step": "2"}
        path = self.path()

        def call() -> None:
            paths = [one.path for one in sources]
            ingot.merge(paths, path, on_duplicate=rule, metadata=metadata)

        owners: dict[str, File] = {}
        for one in reversed(sources) if rule == "first" else sources:
            owners |= dict.fromkeys(one.tensors, one)
        if rule == "error" and len(owners) < sum(len(one.tensors) for one in sources):
            with pytest.raises(ingot.SaveError) as caught:
                call()
            assert caught.value.code == "duplicate-tensor"
            assert not path.exists()
            return file
        call()
        covered, ties = {}, set()
        for number, one in enumerate(sources):
            # A file may occur twice, and contributes its tensors once.
            again = any(one is other for other in sources[:number])
            mine = {name for name, owner in owners.items() if owner is one and not again}
            covered |= {name: how for name, how in one.covered.items() if name in mine}
            ties |= {tie & mine for tie in twins(one.tensors) if len(tie & mine) > 1}
        tensors = {name: owner.tensors[name] for name, owner in owners.items()}
        return File(path, tensors, covered if metadata is ... else {}, ties)

    def split(self, file: File) -> File:
        path = self.path("")
        pattern = self.random.choice(["model{suffix}.safetensors", "model{suffix}.bt"])
        ingot.split(file.path, path, self.random.choice([1, 12, 10_000]), filename_pattern=pattern)
        return File(path, file.tensors, file.covered)

    def converted(self, file: File) -> File:
        if not (file.is_file and file.tensors):
            return self.renamed(file)
        kept = self.some(file.tensors, 1)
        shards = self.random.random() < 0.4
        path = self.path("/") if shards else self.path()
        dtype = self.random.choice([None, torch.float32, torch.float16])
        ingot.convert(
            file.path,
            f"{path}/" if shards else path,
            source_format="bintensors" if file.path.suffix == ".bt" else "safetensors",
            max_shard_size=self.random.choice([8, 1000]) if shards else None,
            dtype=dtype,
            keys=lambda info: info.name in kept,
            verify=self.random.random() < 0.5,
        )
        tensors = {name: file.tensors[name] for name in kept}
        ties = twins(tensors)
        if dtype is not None:
            tensors = {
                name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()
            }
        return File(path, tensors, ties=ties)

    def replaced(self, file: File) -> File:
        if not file.is_file or not file.tensors:
            return file
        name = self.random.choice(sorted(file.tensors))
        whole = file.tensors[name]
        new = torch.full_like(whole, 7, memory_format=torch.contiguous_format)
        with ingot.safe_open(file.path, "pt") as opened:
            is_part = opened._checkpoint.shared().get(name, (None, None))[1] is not None
        if is_part:
            with pytest.raises(ingot.SafetensorError, match="as a part of"):
                ingot.replace_tensor(file.path, name, new)
            return file
        ingot.replace_tensor(file.path, name, new)
        whole.copy_(new)
        return File(file.path, file.tensors, file.covered)

    def edited(self, file: File) -> File:
        if file.is_file:
            atomic = self.random.random() < 0.5
            pairs = {"step": str(self.random.randrange(3)) * self.random.choice([1, 1000])}
            ingot.update_metadata(file.path, pairs | {"format": None}, atomic=atomic)
        return file

    # --- checks ---

    def checked(self, file: File) -> File:
        """Check the contents, and return the file as found."""
        found = ingot.torch.load_file(file.path, backend="pread")
        assert found.keys() == file.tensors.keys()
        for name, tensor in file.tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert values(found[name]) == values(tensor), name
        expected = twins(file.tensors) if file.ties is None else file.ties
        expected = {tie for tie in expected if found[next(iter(tie))].numel()}
        assert {tie for tie in expected if any(tie <= group for group in twins(found))} == expected
        if file.ties == set():
            assert not twins(found)
        covered = self.vouched_for(file)
        return File(file.path, found, covered)

    def vouched_for(self, file: File) -> dict[str, str]:
        """Check that the digests are right and were kept where possible. Return the stored ones."""
        report = ingot.verify(file.path, raises=False)
        covered: dict[str, str] = {}
        with ingot.safe_open(file.path, "pt") as opened:
            stored, shared = opened.keys(), opened._checkpoint.shared()
            where = {name: Path(opened._checkpoint.shard_of(name) or "").name for name in stored}
        for shard, one in (report.shards or {file.path.name: report}).items():
            assert not one.bad
            assert not one.missing
            assert one.modelspec is None or one.modelspec.same
            if one.algorithm is not None:
                here = [name for name in stored if where[name] == shard or not report.shards]
                covered |= {name: one.algorithm for name in here if name not in one.unchecked}
        if len(set(file.covered.values())) == 1:
            assert not file.covered.keys() & set(stored) - covered.keys()
        return covered | {name: covered[of] for name, (of, _) in shared.items() if of in covered}

    def step(self) -> None:
        number = self.random.randrange(len(self.files))
        file = self.files[number]
        steps: list[Callable[[File], File]] = [
            self.save_again,
            self.renamed,
            self.renamed,
            self.dropped,
            self.merged,
            self.split,
            self.converted,
            self.replaced,
            self.edited,
        ]
        act = self.random.choice(steps)
        if len(file.tensors) < 2 and self.random.random() < 0.5:
            act = lambda _: self.made()  # noqa: E731
        self.done.append(f"{getattr(act, '__name__', 'made')} {file.path.name}")
        self.files[number] = self.checked(act(file))
        for path in self.folder.iterdir():
            if path not in {file.path for file in self.files}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_metadata_of_tensors_follows_random_changes(tmp_path: Path, seed: int) -> None:
    sequence = Sequence(tmp_path, seed)
    for _ in range(STEPS):
        try:
            sequence.step()
        except BaseException:
            print("seed", seed, "after", *sequence.done[-8:], sep="\n")
            raise
