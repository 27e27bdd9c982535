"""The names of arguments in all public functions: one name for one thing."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from support.doors import MODULES, parameters, public_functions

FUNCTIONS = public_functions()
INSTALLED = {name.rpartition(".")[0] for name in FUNCTIONS}

# Names that no argument may have, and the names to use instead.
WORDS = {
    # Sources and destinations.
    "source": "src file files file_path filepath fname path paths url uri input inputs",
    "destination": "dst dest directory folder out_dir output output_path outfile save_directory fileobj",
    # Options.
    "progress": "callback on_progress progress_callback show_progress verbose tqdm",
    "threads": "thread num_threads n_threads workers max_workers num_workers concurrency",
    "dtype": "torch_dtype data_type cast_to",
    "storage_options": "token headers credentials client_kwargs",
    "durable": "fsync sync flush",
    "overwrite": "force exist_ok replace clobber",
    "align": "alignment",
    "max_shard_size": "max_size shard_size",
    "keys": "keep where order prefix predicate filter include only tensor_names",
    "drop": "exclude skip",
    "metadata": "meta info attrs",
    "expected_sha256": "sha256 checksum digest",
    "tensor": "array value",
    "name": "key tensor_name",
    "strict": "allow_missing",
}
INSTEAD = {word: instead for instead, words in WORDS.items() for word in words.split()}
# Functions that have such a name nevertheless.
ADMITTED = {
    ("ingot.Checkpoints", "directory"): "it is read and written",
    ("ingot.Checkpoints", "keep"): "how many steps stay, not which tensors",
    ("ingot.Ranges", "path"): "where an object is in its store, as obstore and fsspec say it",
}

# Argument names of upstream, which only its functions use.
UPSTREAMS = {
    "filename": "ingot.safe_open ingot.serialize_file *.load_file *.save_file *.load_model *.save_model",
    "tensor_dict": "ingot.serialize ingot.serialize_file *.save *.save_file",
    "force_contiguous": "*.save_model",
}
# Takes the place of both `source` and `destination`.
IN_PLACE = ("ingot.update_metadata", "ingot.replace_tensor")

# Arguments that differ in functions that match a pattern, with the reason.
OTHERWISE = {
    "atomic": {
        "ingot.update_metadata": "a change within one page is written in place",
    },
    "overwrite": {
        "*.save_file": "upstream replaces the file",
        "ingot.serialize_file": "upstream replaces the file",
        "*.save_model": "upstream replaces the file",
        "*.save_state": "training replaces its last state, as with torch.save",
    },
    "background": {
        "ingot.Checkpoints.save": "training goes on while a step is written",
    },
    "framework": {
        "ingot.Checkpoints": "None is the framework of the objects in the state",
    },
    "step": {
        "ingot.Checkpoints.load": "None is the newest step",
        "ingot.delta.diff": "by its name only: a note in the patch, and None is no note",
    },
    "destination": {
        "ingot.delta.apply": "None with in_place=True, which changes the source",
        "ingot.upload": "a URL and nothing else",
        "*.save_state": "what is written to has a `write`, as for save_file",
    },
    "device": {
        "ingot.safe_open.prefetch": "None is the device of the handle, by its name only as upstream has it",
        "ingot.flax.*": "None is jax's default device",
        "ingot.tensorflow.*": "None is the device that TensorFlow is on",
        "ingot.mlx.*": "mlx has one memory",
        "ingot.paddle.*": "None is the CPU, as upstream has it",
        "*.load_state": "None is the CPU or the default device of jax: one function serves all frameworks",
        "ingot.Checkpoints.load": "as for load_state",
    },
    "dtype": {
        "ingot.cast": "there is no default",
    },
    "into": {
        "*.load_into": "what is filled is required: a module or a dict",
    },
    "keys": {
        "ingot.safe_open.get_tensors": "positional: nothing else is given",
        "ingot.safe_open.warm": "positional: nothing else has to be given",
    },
    "other": {
        "ingot.view": "None is no second file",
    },
    "filename": {
        "*.save_*": "what is written to has a `write`, what is read from a `read`",
        "ingot.serialize_file": "as for save_file",
        "ingot.update_metadata": "a file is edited where it is",
        "ingot.replace_tensor": "a file is edited where it is",
    },
    "format": {
        "ingot.convert": "it writes .npz too",
        "*.save": "bytes have no name that decides the format",
        "ingot.serialize": "bytes have no name that decides the format",
    },
    "max_nbytes": {
        "ingot.delta.items": "of each item: there is a default for every patch",
    },
    "max_shard_size": {
        "ingot.convert": "None is one file",
    },
    "metadata": {
        "ingot.convert": "added to that of the source, since formats have some that no tensor file has",
        "ingot.cast": "by default that of the source",
        "ingot.merge": "by default that of the source",
        "ingot.rewrite": "by default that of the source",
        "ingot.split": "by default that of the source",
        "ingot.torch.save_sharded": "an option, as for split",
        "ingot.update_metadata": "the changes: None removes a key",
    },
    "name": {
        "ingot.safe_open.get": "positional, as in collections.abc.Mapping",
    },
    "process_group": {
        "ingot.Checkpoints": "without torch there is no class to name",
    },
    "shared": {
        "*.save_model": "upstream drops the other names of a tensor, and notes them",
        "*.save*": "what becomes of tensors that share memory",
    },
    "source": {
        "ingot.warm": "the page cache has files of this machine only",
        "ingot.download": "a URL and nothing else",
        "ingot.upload": "a file of this machine and nothing else",
        "ingot.modelspec.read": "the metadata of a file will do",
        "ingot.modelspec.validate": "the metadata of a file will do, and what `read` gives of them",
        "ingot.torch.load_into": "with a patch, the version of the tensors, which may be unknown",
    },
    "patch": {
        "ingot.torch.load_into": "None loads a whole file",
    },
    "strict": {
        "ingot.torch.load_into": "as in torch.nn.Module.load_state_dict",
        "ingot.torch.load_model": "as in torch.nn.Module.load_state_dict, and positional as upstream has it",
    },
    "tensor_dict": {
        "ingot.serialize*": "dicts of buffers in place of tensors",
    },
    "verify": {
        "ingot.convert": "of another format nothing is to be trusted",
    },
}

# A framework's own name for its tensors, devices and modules.
TENSORS = re.compile(r"\b(torch\.Tensor|jax\.Array|tf\.Tensor|mx\.array|paddle\.Tensor|Array|Tensor|Any)\b")


class Form(NamedTuple):
    """The kind, the default and the annotation of a parameter."""

    kind: str
    default: str
    annotation: str


def form(parameter: inspect.Parameter) -> Form:
    annotation = TENSORS.sub("Tensor", str(parameter.annotation))
    return Form(parameter.kind.description, repr(parameter.default), annotation)


def taken() -> dict[str, dict[str, Form]]:
    """Return the form of each argument in each function."""
    found: dict[str, dict[str, Form]] = defaultdict(dict)
    for name, function in FUNCTIONS.items():
        for parameter in parameters(function).values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                found[parameter.name][name] = form(parameter)
    return found


TAKEN = taken()


def pattern_of(argument: str, function: str) -> str | None:
    """Return the entry of `OTHERWISE` for this function."""
    return next((one for one in OTHERWISE.get(argument, {}) if fnmatchcase(function, one)), None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vocabulary_has_one_word_per_argument(name: str) -> None:
    for argument in parameters(FUNCTIONS[name]):
        assert argument not in INSTEAD or (name, argument) in ADMITTED, f"expected {INSTEAD[argument]!r}"


@pytest.mark.parametrize(("argument", "patterns"), UPSTREAMS.items())
def test_vocabulary_keeps_upstream_names_to_its_functions(argument: str, patterns: str) -> None:
    admitted = [*patterns.split(), *(IN_PLACE if argument == "filename" else ())]
    for name in TAKEN[argument]:
        assert any(fnmatchcase(name, pattern) for pattern in admitted), name


@pytest.mark.parametrize("argument", sorted(TAKEN))
def test_vocabulary_uses_one_kind_per_argument(argument: str) -> None:
    groups: dict[str | None, dict[Form, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, found in TAKEN[argument].items():
        groups[pattern_of(argument, name)][found].append(name)
    for forms in groups.values():
        assert len(forms) == 1, forms
    # Without torch, an exception may be the only function that is left.
    plain = groups.pop(None, {})
    for pattern, forms in groups.items():
        assert forms.keys() != plain.keys(), f"{pattern} is as everywhere: no word of it is needed"


@pytest.mark.parametrize(
    ("argument", "pattern"), [(argument, one) for argument, patterns in OTHERWISE.items() for one in patterns]
)
def test_vocabulary_exceptions_name_existing_functions(argument: str, pattern: str) -> None:
    module = pattern.rpartition(".")[0].replace("*", "ingot.torch")
    if module not in INSTALLED:
        pytest.skip(f"{module} needs a framework that is not installed")
    assert pattern in {pattern_of(argument, name) for name in TAKEN[argument]}


READ_OR_WRITTEN = ("source", "sources", "destination")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if TAKEN["destination"].get(name)])
def test_vocabulary_puts_sources_before_destinations(name: str) -> None:
    given = [argument for argument in parameters(FUNCTIONS[name]) if argument in READ_OR_WRITTEN]
    assert given in (["destination"], ["source", "destination"], ["sources", "destination"])


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name.endswith("metadata") and name != "ingot.update_metadata"]
)
def test_vocabulary_uses_metadata_for_texts_only(name: str) -> None:
    # The metadata of an index may be any JSON.
    value = "Any" if name == "ingot.safe_open.metadata" else "str"
    assert f"dict[str, {value}]" in str(inspect.signature(FUNCTIONS[name]).return_annotation)


# Words that public docstrings and pages of docs avoid, with the usual words.
PHRASES = {
    r"shall": "is, or an imperative",
    r"whoever|nobody|somebody": "the caller, a reader, another process",
    r"behind a URL": "remote",
    r"cut short": "truncated",
    r"broken off": "interrupted",
    r"next to no": "a number",
    r"will do": "may be given",
}
ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "crates/format/FORMAT.md")),
]


def docstrings() -> dict[str, str]:
    """Return the docstrings of modules, of their public names, and of the public members of classes."""
    found = {module: sys.modules[module] for module in MODULES if module in sys.modules}
    for module in list(found.values()):
        names = {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
        members = {
            f"{name}.{member}": value
            for name, one in names.items()
            if isinstance(one, type)
            for member, value in vars(one).items()
            if not member.startswith("_")
        }
        found |= names | members
    return {
        name: one.__doc__ for name, one in found.items() if isinstance(getattr(one, "__doc__", None), str)
    }


@pytest.mark.parametrize(("phrase", "instead"), PHRASES.items())
def test_vocabulary_of_help_and_docs_is_the_fields(phrase: str, instead: str) -> None:
    said = re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE)
    assert not [name for name, text in docstrings().items() if said.search(text)], f"expected {instead!r}"
    assert not [page for page in PAGES if said.search(page.read_text("utf-8"))], f"expected {instead!r}"
