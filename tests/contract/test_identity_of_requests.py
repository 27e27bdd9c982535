"""Every request that a call causes has the identity, the endpoint and the headers of the call.

The environment holds another identity and other endpoints, which lead to a server that must get no request.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy
import pytest
import torch

import ingot
import ingot.dcp
import ingot.numpy
import ingot.torch
from support import stores
from support.commands import run
from support.servers import Handler, Request, Server, serving

# Files on the server. --------------------------------------------------------------------------------------

WEIGHTS = {"weight": numpy.eye(2, dtype=numpy.float32), "bias": numpy.ones(2, numpy.float32)}
INDEX = "model.safetensors.index.json"


# The state of a dict with all weights.
STATE = json.dumps({"version": 1, "tree": {name: {"$tensor": name} for name in WEIGHTS}})


@cache
def files() -> dict[str, bytes]:
    """A model of one file and a sharded one, each with its configuration, by folder and name."""
    shards = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(WEIGHTS, 1)}
    config = json.dumps({"model_type": "test"}).encode()

    def saved(*names: str) -> bytes:
        file = io.BytesIO()
        # With digests, which `verify` compares.
        ingot.numpy.save_state({name: WEIGHTS[name] for name in names}, file, checksums="blake3")
        return file.getvalue()

    return {
        "single/model.safetensors": saved(*WEIGHTS),
        "single/config.json": config,
        f"sharded/{INDEX}": json.dumps(
            {"metadata": {"total_size": 24, "ingot.state": STATE}, "weight_map": shards}
        ).encode(),
        **{f"sharded/{shard}": saved(name) for name, shard in shards.items()},
        "sharded/config.json": config,
    }


def answer(handler: Handler, request: Request) -> None:
    handler.rfile.read(int(request.headers.get("content-length", 0)))
    if handler.command in ("PUT", "POST", "DELETE"):
        # A store that obeys conditions: the second conditional request for an object is refused.
        place = urlsplit(request.path).path
        seen = [one for one in handler.server.facts.requests if urlsplit(one.path).path == place]
        refused = (
            "if-none-match" in request.headers and sum("if-none-match" in one.headers for one in seen) > 1
        )
        body = WRITTEN.get(handler.command, b"") if not refused else b""
        handler.head(412 if refused else 200, Content_Length=len(body), ETag='"e"')
        handler.body(body)
        return
    path = unquote(urlsplit(request.path).path)
    # A repository has a revision in its paths.
    folder, _, name = path.rpartition("/")
    data = files().get(f"{folder.partition('/resolve/')[0].rpartition('/')[2]}/{name}")
    if data is None:
        handler.head(404, Content_Length=0, X_Error_Code="EntryNotFound")
    elif "range" in request.headers:
        handler.part(data, request, ETag=f'"{len(data)}"', X_Repo_Commit="c" * 40)
    else:
        handler.head(200, Content_Length=len(data), ETag=f'"{len(data)}"', X_Repo_Commit="c" * 40)
        handler.body(b"" if handler.command == "HEAD" else data)


#: The answers to a request that begins an upload, and to one that completes it.
WRITTEN = {"POST": b"<R><UploadId>1</UploadId></R></CompleteMultipartUploadResult>"}


# Kinds of stores. ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """The options of a kind of URL, and the Authorization header that they lead to."""

    url: str
    options: Mapping[str, object]
    shows: str


KEY = "c2VjcmV0LW9mLXRoZS1jYWxsPT0="
KEYS = {"access_key_id": "KEYOFTHECALL", "secret_access_key": "s", "region": "eu-west-1"}
#: `{0}` is the server, `{1}` the path of a file.
STORES = {
    "http": Store("{0}/{1}", {"token": "of-the-call"}, "Bearer of-the-call"),
    "s3": Store("s3://bucket/{1}", {"endpoint": "{0}", **KEYS}, "Credential=KEYOFTHECALL/"),
    "s3 anonymous": Store("s3://bucket/{1}", {"endpoint": "{0}", "anonymous": True}, ""),
    "hf": Store("hf://me/{1}", {"endpoint": "{0}", "token": "hf_of_the_call"}, "Bearer hf_of_the_call"),
    "gs": Store("gs://bucket/{1}", {"endpoint": "{0}", "token": "of-the-call"}, "Bearer of-the-call"),
    "az": Store(
        "az://box/{1}",
        {"endpoint": "{0}", "account": "ofthecall", "account_key": KEY},
        "SharedKey ofthecall:",
    ),
}

#: Another identity for each kind of store.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "KEYOFTHEENVIRONMENT",
    "AWS_SECRET_ACCESS_KEY": "e",
    "AWS_SESSION_TOKEN": "e",
    "AWS_REGION": "us-west-2",
    "HF_TOKEN": "hf_of_the_environment",
    "AZURE_STORAGE_ACCOUNT_NAME": "oftheenvironment",
    "AZURE_STORAGE_ACCOUNT_KEY": KEY,
    "NO_PROXY": "127.0.0.1",
}
ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "HF_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
    "AZURE_STORAGE_ENDPOINT",
    "http_proxy",
)
ALSO_KNOWN = (
    "AWS_PROFILE",
    "HF_HUB_OFFLINE",
    "HF_HUB_CACHE",
    "HUGGING_FACE_HUB_TOKEN",
    "no_proxy",
    "HTTP_PROXY",
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run the server that the environment names, which must get no request."""
    with serving(answer) as server:
        for name in ALSO_KNOWN:
            monkeypatch.delenv(name, raising=False)
        for name, value in {**ENVIRONMENT, **dict.fromkeys(ENDPOINTS, server.url(""))}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield server


# Calls. ----------------------------------------------------------------------------------------------------

Options = Mapping[str, Any]
Call = Callable[[str, Options, Path], object]


def open_and_read(url: str, options: Options, folder: Path) -> None:
    """Use all methods of a handle that send requests."""
    with ingot.safe_open(url, "np", storage_options=options) as file:
        assert sorted(file.keys()) == sorted(WEIGHTS)
        file.metadata(), file.shard_metadata(), file.parameter_count()
        assert file["weight"].tolist() == WEIGHTS["weight"].tolist()
        assert file.get_slice("weight")[1].tolist() == [0, 1]
        assert len(file.get_tensors()) == 2
        assert len([*file.prefetch()]) == 2
        file.warm()
        again = pickle.loads(pickle.dumps(file))
        assert again["bias"].tolist() == [1, 1]
        request_all(ingot.view(file, how="server"))
        assert ingot.view(file, how="page").url is None


def request_all(view: ingot.View) -> None:
    """Request everything that a page of the viewer can show."""
    address = urlsplit(str(view.url))
    headers = {"Authorization": "Bearer " + address.fragment.removeprefix("token=")}
    with view, closing(http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)) as connection:

        def get(path: str) -> bytes:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            assert response.status == 200
            return response.read()

        [model] = json.loads(get("/files"))["models"]
        assert "config.json" in [file["name"] for file in model["files"]]
        for file in model["files"]:
            assert len(get(f"/f/{file['number']}")) == file["size"]


def show(url: str, options: Options, folder: Path) -> None:
    request_all(ingot.view(url, how="server", storage_options=options))
    ingot.view(url, how="page", storage_options=options)
    with ingot.view(url, url, how="server", storage_options=options):
        pass


def load_into_model(url: str, options: Options, folder: Path) -> None:
    ingot.torch.load_into(torch.nn.Linear(2, 2), url, storage_options=options)


def load_state(module: str) -> Call:
    def load(url: str, options: Options, folder: Path) -> None:
        import_module(module).load_state(url, storage_options=options)

    return load


def load_model(url: str, options: Options, folder: Path) -> None:
    ingot.torch.load_model(torch.nn.Linear(2, 2), url, storage_options=options)


def load_by_dcp(url: str, options: Options, folder: Path) -> None:
    from torch.distributed import checkpoint

    state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    with warnings.catch_warnings(action="ignore"):
        # torch warns that there is one process only.
        checkpoint.load(state, storage_reader=ingot.dcp.Reader(url, storage_options=options), no_dist=True)
    assert state["bias"].tolist() == [1, 1]


def load_file(module: str) -> Call:
    def load(url: str, options: Options, folder: Path) -> None:
        loaded = import_module(module)
        assert len(loaded.load_file(url, storage_options=options)) == 2
        assert len(loaded.load_file(url, storage_options=options, verify=True)) == 2
        assert len(loaded.load_file(url, storage_options=options, slices={"weight": 1}, keys=["weight"])) == 1

    return load


def hash_all(url: str, options: Options, folder: Path) -> None:
    for algorithm in ("sha256", "blake2b", "blake3"):
        ingot.hash(url, algorithm, storage_options=options)


def inspect_both(url: str, options: Options, folder: Path) -> None:
    for count in ("logical", "stored"):
        found = ingot.inspect(url, count=count, storage_options=options)  # type: ignore[arg-type]
        assert found.parameter_total == 6
    found = ingot.inspect(url, shards=False, storage_options=options)
    assert sorted(found.weight_map) == sorted(WEIGHTS)


SINGLE, SHARDED = "single/model.safetensors", f"sharded/{INDEX}"
BOTH = (SINGLE, SHARDED)

#: Each public function that takes `storage_options`, the files that it reads, and a call of it.
CALLS: dict[str, tuple[tuple[str, ...], Call]] = {
    "ingot.safe_open": (BOTH, open_and_read),
    "ingot.view": (BOTH, show),
    "ingot.inspect": (BOTH, inspect_both),
    "ingot.inspect_async": (
        BOTH,
        lambda url, options, folder: asyncio.run(ingot.inspect_async(url, storage_options=options)),
    ),
    "ingot.open": (BOTH, lambda url, options, folder: ingot.open(url, storage_options=options)["bias"]),
    "ingot.modelspec.read": (
        BOTH,
        lambda url, options, folder: ingot.modelspec.read(url, storage_options=options),
    ),
    "ingot.modelspec.validate": (
        BOTH,
        lambda url, options, folder: ingot.modelspec.validate(url, storage_options=options),
    ),
    "ingot.hash": ((SINGLE,), hash_all),
    "ingot.verify": (BOTH, lambda url, options, folder: ingot.verify(url, storage_options=options)),
    "ingot.download": (
        BOTH,
        lambda url, options, folder: ingot.download(url, folder, storage_options=options),
    ),
    "ingot.convert": (
        (SINGLE,),
        lambda url, options, folder: ingot.convert(url, folder / "o.bt", storage_options=options),
    ),
    "ingot.merge": (
        BOTH,
        lambda url, options, folder: ingot.merge([url], folder / "o.safetensors", storage_options=options),
    ),
    "ingot.rewrite": (
        BOTH,
        lambda url, options, folder: ingot.rewrite(url, folder / "o.safetensors", storage_options=options),
    ),
    "ingot.split": (
        BOTH,
        lambda url, options, folder: ingot.split(url, folder / "o", 32, storage_options=options),
    ),
    "ingot.repair": (
        BOTH,
        lambda url, options, folder: ingot.repair(url, folder / "o.safetensors", storage_options=options),
    ),
    "ingot.cast": (
        BOTH,
        lambda url, options, folder: ingot.cast(
            url, folder / "o.safetensors", "F16", storage_options=options
        ),
    ),
    "ingot.check": (
        BOTH,
        lambda url, options, folder: ingot.check(url, values=True, storage_options=options),
    ),
    "ingot.diff": (
        BOTH,
        lambda url, options, folder: ingot.diff(url, url, values=True, storage_options=options),
    ),
    "ingot.stats": (BOTH, lambda url, options, folder: ingot.stats(url, storage_options=options)),
    "ingot.torch.load_into": (BOTH, load_into_model),
    "ingot.torch.load_model": (BOTH, load_model),
    "ingot.dcp.Reader": (BOTH, load_by_dcp),
    **{
        f"ingot.{module}.load_file": (BOTH, load_file(f"ingot.{module}"))
        for module in ("numpy", "torch", "flax", "tensorflow", "mlx", "paddle")
    },
    **{
        f"ingot.{module}.load_state": (BOTH, load_state(f"ingot.{module}"))
        for module in ("numpy", "torch", "flax")
    },
}
#: Writes of a file that is sent in parts, without an existing object.
LARGE = {"weight": numpy.zeros(17 << 20, numpy.uint8)}


def save_file(module: str) -> Call:
    def save(url: str, options: Options, folder: Path) -> None:
        saving = import_module(module)
        tensors = WEIGHTS if module == "ingot.numpy" else saving.load(files()[SINGLE])
        saving.save_file(tensors, url, storage_options=options)
        saving.save_file(tensors, url, storage_options=options, background=True).result()

    return save


def save_large(url: str, options: Options, folder: Path) -> None:
    save_file("ingot.numpy")(url, options, folder)
    for overwrite in (True, False):
        ingot.numpy.save_file(LARGE, url, storage_options=options, overwrite=overwrite)


def save_state(module: str) -> Call:
    def save(url: str, options: Options, folder: Path) -> None:
        import_module(module).save_state({"step": 1}, url, storage_options=options)

    return save


def save_sharded(url: str, options: Options, folder: Path) -> None:
    for overwrite in (True, False):
        ingot.torch.save_sharded(
            {"a": torch.zeros(2), "b": torch.zeros(2)}, url, 8, overwrite=overwrite, storage_options=options
        )


def rearrange(name: str) -> Call:
    def write(url: str, options: Options, folder: Path) -> None:
        path = folder / "source.safetensors"
        path.write_bytes(files()[SINGLE])
        source = [path] if name == "merge" else path
        for overwrite in (True, False):
            getattr(ingot, name)(source, url, overwrite=overwrite, storage_options=options)

    return write


def upload(url: str, options: Options, folder: Path) -> None:
    for path, data in files().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    for overwrite in (True, False):
        ingot.upload(folder / SINGLE, url, overwrite=overwrite, storage_options=options)
        ingot.upload(folder / "sharded", url, overwrite=overwrite, storage_options=options)


def checkpoints(url: str, options: Options, folder: Path) -> None:
    with ingot.Checkpoints(url, keep=1, storage_options=options) as made:
        for step in (1, 2):
            made.save(step, WEIGHTS)
            made.wait()
        made.load()
        assert made.latest(verify=True) == 2
        made.pin(2)
        made.delete(2)


def fill(url: str, options: Options, folder: Path) -> None:
    for overwrite in (True, False):
        with ingot.Writer(url, LARGE, overwrite=overwrite, storage_options=options) as writer:
            writer.write("weight", LARGE["weight"])
            writer.commit()


BUFFER = {"a": {"dtype": "U8", "shape": [1], "data": b"a"}}

#: Each public function that takes `storage_options` to write, and a call of it.
WRITES: dict[str, Call] = {
    "ingot.Checkpoints": checkpoints,
    "ingot.Writer": fill,
    "ingot.serialize_file": lambda url, options, folder: ingot.serialize_file(
        BUFFER, url, storage_options=options
    ),
    "ingot.torch.save_model": lambda url, options, folder: ingot.torch.save_model(
        torch.nn.Linear(2, 2), url, storage_options=options
    ),
    "ingot.torch.save_sharded": save_sharded,
    "ingot.upload": upload,
    **{f"ingot.{name}": rearrange(name) for name in ("merge", "rewrite", "split")},
    **{
        f"ingot.{module}.save_file": save_file(f"ingot.{module}")
        for module in ("torch", "flax", "tensorflow", "mlx", "paddle")
    },
    "ingot.numpy.save_file": save_large,
    **{f"ingot.{module}.save_state": save_state(f"ingot.{module}") for module in ("numpy", "torch", "flax")},
}
WRITTEN_KINDS = [kind for kind in STORES if kind.startswith(("s3", "az"))]
NEEDS = {"ingot.flax": "jax", "ingot.tensorflow": "tensorflow", "ingot.mlx": "mlx", "ingot.paddle": "paddle"}
MODULES = ("ingot", "ingot.numpy", "ingot.torch", "ingot.dcp", "ingot.modelspec", *NEEDS)


def is_installed(module: str) -> bool:
    return find_spec(NEEDS.get(module, "ingot")) is not None


def test_identity_table_has_every_function_with_storage_options() -> None:
    taking = set()
    for module in filter(is_installed, MODULES):
        loaded = import_module(module)
        for name in loaded.__all__:
            public = getattr(loaded, name)
            is_ours = callable(public) and not (isinstance(public, type) and issubclass(public, dict))
            if is_ours and "storage_options" in inspect.signature(public).parameters:
                taking.add(f"{module}.{name}")
    known = {*CALLS, *WRITES}
    assert taking == {name for name in known if is_installed(name.rpartition(".")[0])}


@pytest.mark.parametrize("name", [name for name in CALLS if is_installed(name.rpartition(".")[0])])
@pytest.mark.parametrize("kind", STORES)
def test_requests_use_the_options_of_the_call(
    kind: str, name: str, elsewhere: Server, tmp_path: Path
) -> None:
    store, (paths, call) = STORES[kind], CALLS[name]
    if kind == "hf":
        # The URL of a repository opens its model.
        paths = (*paths, *(path.partition("/")[0] for path in paths))
    with serving(answer) as server:
        home = server.url("")
        options = {
            option: value.format(home) if isinstance(value, str) else value
            for option, value in store.options.items()
        }
        options |= {"headers": {"X-Mine": "of-the-call"}, "retries": 0}
        for number, path in enumerate(paths):
            folder = tmp_path / str(number)
            folder.mkdir()
            server.requests.clear()
            call(store.url.format(home, path), options, folder)
            assert {request.headers.get("x-mine") for request in server.requests} == {"of-the-call"}
            for request in server.requests:
                shown = request.headers.get("authorization", "")
                assert store.shows in shown, request
                assert bool(store.shows) == bool(shown), request
                assert "environment" not in str(request.headers).lower(), request
    assert elsewhere.requests == []


def model_of(kind: str) -> stores.Store:
    """Return a store that accepts every identity."""
    of = stores.Azure if kind == "az" else stores.Store

    class Open(of):  # type: ignore[misc, valid-type]
        def _check(self, method: str, request: Request, body: bytes) -> None:
            pass

    return Open()


@pytest.mark.parametrize("name", [name for name in WRITES if is_installed(name.rpartition(".")[0])])
@pytest.mark.parametrize("kind", WRITTEN_KINDS)
def test_requests_that_write_use_the_options_of_the_call(
    kind: str, name: str, elsewhere: Server, tmp_path: Path
) -> None:
    store = STORES[kind]
    # Steps are listed, and read again.
    whole = model_of(kind).answer if name == "ingot.Checkpoints" else answer
    with serving(whole) as server:
        options = {**store.options, "endpoint": server.url(""), "headers": {"X-Mine": "of-the-call"}}
        WRITES[name](store.url.format("", "new/object"), options, tmp_path)
        assert server.requests
        for request in server.requests:
            assert request.headers.get("x-mine") == "of-the-call"
            shown = request.headers.get("authorization", "")
            assert store.shows in shown, request
            assert bool(store.shows) == bool(shown), request
            assert "environment" not in str(request.headers).lower(), request
    assert elsewhere.requests == []


#: Commands that read, each with its arguments after the URL. `{}` is a folder.
COMMANDS = {
    "info": ["weight"],
    "tree": [],
    "layers": [],
    "params": [],
    "stats": ["--all"],
    "cat": ["weight"],
    "hash": [],
    "verify": [],
    "check": [],
    "view": ["--html", "{}/report.html"],
    "download": ["{}/copy.safetensors"],
    "convert": ["{}/copy.bt"],
    "split": ["{}/shards", "--max-shard-size", "20"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_requests_of_commands_use_the_environment(command: str, elsewhere: Server, tmp_path: Path) -> None:
    arguments = [argument.format(tmp_path) for argument in COMMANDS[command]]
    ended = run(command, "hf://me/single/model.safetensors", *arguments)
    assert ended.code == 0, ended
    assert elsewhere.requests
    for request in elsewhere.requests:
        assert request.headers.get("authorization") == "Bearer hf_of_the_environment", request
