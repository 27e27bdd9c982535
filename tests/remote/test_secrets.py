"""No output contains a secret of a URL, of the options or of the environment.

The tests call every public function of the package and every command of the program with URLs full of
secrets, and with servers that repeat the whole request in every part of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import inspect
import io
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import numpy
import pytest
from obstore.store import MemoryStore

import ingot
import ingot.numpy
from ingot.cli import screen
from ingot.cli.program import program
from support.commands import run
from support.servers import Answer, Handler, Request, Server, good, serving

# Every secret contains this. The search ignores case.
MARK = "s3cret"
USER = f"{MARK}-user:{MARK}-pass%2Fword"
QUERY = f"sig={MARK}-signature%2Bx&X-Amz-Signature={MARK}-amazon&token={MARK}-token"
OPTIONS = {
    "token": f"{MARK}-bearer",
    "headers": {"X-Key": f"{MARK}-header-of-the-caller"},
    "access_key_id": f"{MARK}-id",
    "secret_access_key": f"{MARK}-key",
    "session_token": f"{MARK}-session",
    "account": "me",
    "sas_token": f"sv=2021&sig={MARK}-shared-access",
    "connection_string": f"AccountName=me;AccountKey={MARK}-of-a-string",
    "client_id": "app",
    "tenant_id": "directory",
    "client_secret": f"{MARK}-of-an-application",
    "retries": 0,
}
ENVIRONMENT = {
    "HF_TOKEN": f"{MARK}-hub",
    "AWS_ACCESS_KEY_ID": f"{MARK}-id",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}-key",
    "AWS_SESSION_TOKEN": f"{MARK}-session",
    "GOOGLE_OAUTH_ACCESS_TOKEN": f"{MARK}-google",
    "AZURE_STORAGE_ACCOUNT_NAME": "me",
    "AZURE_STORAGE_SAS_TOKEN": f"sig={MARK}-shared-access",
    "AWS_EC2_METADATA_DISABLED": "true",
}
ENDPOINTS = ("HF_ENDPOINT", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT")

FILE = ingot.numpy.save({"a": numpy.ones((2, 3), numpy.float32)}, {"format": "pt"})


def urls(server: Server) -> dict[str, Any]:
    host = f"{server.host}:{server.port}"
    http = f"http://{USER}@{host}/model.safetensors?{QUERY}#{MARK}"
    return {
        "http": http,
        "index": f"http://{USER}@{host}/model.safetensors.index.json?{QUERY}",
        "unencoded": f"http://{MARK}:{MARK}/?{MARK}@{host}/x?{QUERY}",
        "s3": f"s3://{MARK}:{MARK}/+{MARK}@bucket/model.safetensors",
        "s3-query": f"s3://bucket/model.safetensors?{QUERY}",
        "az": f"az://container/model.safetensors?{QUERY}",
        "gs": f"gs://{MARK}@bucket/model.safetensors?{QUERY}",
        "hf": f"hf://me:hf_{MARK}@me/gpt/model.safetensors?{QUERY}",
        "unknown": f"ftp://{USER}@{host}/model.safetensors?{QUERY}",
        "other-name": f"s3a://{USER}@bucket/model.safetensors?{QUERY}",
        "chained": f"simplecache::http://{USER}@{host}/x?{QUERY}",
        "file": f"file://{USER}@{host}/model.safetensors?{QUERY}",
        "path": Path(http),
        "bytes": http.encode(),
        # A URL without secrets: they are only in the options and in the environment.
        **{
            f"clean-{scheme}": f"{scheme}://bucket/gpt/model.safetensors"
            for scheme in ("s3", "az", "gs", "hf")
        },
    }


KINDS = tuple(urls(Server(1)))
# The kinds that reach a server.
ASKED = tuple(kind for kind in KINDS if kind.startswith(("http", "index", "s3", "az", "gs", "hf", "clean")))


# Answers of servers that repeat the request. -----------------------------------------------------


def sent(request: Request) -> str:
    """Return the whole request, unchanged and decoded, as one line for a header."""
    skipped = ("range", "if-", "accept", "user-agent", "connection")
    values = [value for name, value in request.headers.items() if not name.startswith(skipped)]
    return " ".join([request.path, *values, unquote(request.path)])


def _reason(handler: Handler, request: Request, said: str) -> None:
    handler.raw(f"HTTP/1.1 403 {said}\r\nContent-Length: 0\r\n\r\n".encode())


def _long_reason(handler: Handler, request: Request, said: str) -> None:
    # A text cut at some length must not leave a part of a secret.
    handler.raw(f"HTTP/1.1 401 {'x' * 60} {said}\r\nContent-Length: 0\r\n\r\n".encode())


def _header(handler: Handler, request: Request, said: str) -> None:
    handler.head(403, X_Error_Message=said, Content_Length=0)


def _long_header(handler: Handler, request: Request, said: str) -> None:
    handler.head(404, X_Error_Message="x" * 180 + said, Content_Length=0)


def _code(handler: Handler, request: Request, said: str) -> None:
    body = f"<Error><Code>{said}</Code><Message>{said}</Message></Error>".encode()
    handler.head(403, Content_Length=len(body))
    handler.body(body)


def _shouted(handler: Handler, request: Request, said: str) -> None:
    _code(handler, request, said.upper())


def _range(handler: Handler, request: Request, said: str) -> None:
    handler.head(206, Content_Range=f"bytes {said}", Content_Length=0)


def _encoding(handler: Handler, request: Request, said: str) -> None:
    handler.head(206, Content_Range="bytes 0-0/1", Content_Encoding=said, Content_Length=1)
    handler.body(b"x")


def _location(handler: Handler, request: Request, said: str) -> None:
    word = re.sub(r"[^\w./-]", "_", said)
    handler.head(302, Location=f"http://{handler.headers['Host']}/{word}x?{MARK}", Content_Length=0)


def _scheme(handler: Handler, request: Request, said: str) -> None:
    # A part of the request that is a valid scheme of a URL.
    words = [word for word in re.findall(rf"{MARK}[\w+-]*", said) if len(word) <= 16]
    word = words[0] if words else "gopher"
    handler.head(302, Location=f"{word}://x", Content_Length=0)


def _region(handler: Handler, request: Request, said: str) -> None:
    handler.head(400, X_Amz_Bucket_Region=said, ETag=said, X_Repo_Commit=said, Content_Length=0)


def _page(handler: Handler, request: Request, said: str) -> None:
    body = f"<html>{said}</html>".encode()
    handler.head(200, Content_Length=len(body), Content_Type=said)
    handler.body(body)


def echoing(say: Callable[[Handler, Request, str], None]) -> Answer:
    return lambda handler, request: say(handler, request, sent(request))


ANSWERS: dict[str, Answer] = {
    "good": good(FILE),
    **{
        say.__name__.strip("_"): echoing(say)
        for say in (
            _reason,
            _long_reason,
            _header,
            _long_header,
            _code,
            _shouted,
            _range,
            _encoding,
            _location,
            _scheme,
            _region,
            _page,
        )
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ANSWERS["good"]) as facts:
        yield facts


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ENDPOINTS:
        monkeypatch.setenv(name, server.url(""))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    # `view` ends once it has printed its address, and opens no browser.
    monkeypatch.setattr("ingot.cli.commands.view._wait", lambda: None)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


# Outputs. --------------------------------------------------------------------------------------------


def told_by(error: BaseException | None) -> Iterator[str]:
    """Yield every text of an exception, and of its causes."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield from (str(one), repr(one), repr(one.args), repr(vars(one)))
        for name in dir(one):
            if not name.startswith("_") and not callable(getattr(one, name, None)):
                yield repr(getattr(one, name, None))
        yield "".join(traceback.format_exception_only(one))
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def told_of(result: object) -> Iterator[str]:
    """Return every text of a result."""
    if result is None or isinstance(result, (bytes, numpy.ndarray)):
        return
    yield from (repr(result), str(result))
    for name in dir(result):
        if not name.startswith("_"):
            with contextlib.suppress(Exception):
                value = getattr(result, name)
                if not callable(value):
                    yield repr(value)


def reported(call: Callable[[], object], folder: Path) -> list[str]:
    """Return every text that `call` leaves behind, except its arguments."""
    texts: list[str] = []
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        try:
            result = call()
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            texts += told_of(result)
            if isinstance(result, ingot.Writer):
                result.close()
            if isinstance(result, ingot.safe_open):
                with result as file, pytest.raises(ingot.TensorNotFoundError) as caught:
                    file.get_tensor("none")
                texts += [*told_by(caught.value), repr(result)]
        except Exception as error:
            texts += told_by(error)
    texts += [out.getvalue(), err.getvalue(), *(str(warning.message) for warning in seen)]
    texts += [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return texts


def turns(number: int, server: Server, place: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield each kind of URL with a good answer, and with a bad one if it reaches the server, each in a new
    folder.

    A function gets every kind of URL, and every answer to a URL with secrets. The other pairs depend on
    the `number` of the function: over all functions, every kind of URL gets every answer.
    """
    bad = [answer for answer in ANSWERS if answer != "good"]
    pairs = [(kind, "good") for kind in KINDS] + [("http", answer) for answer in bad]
    pairs += [(kind, bad[(number + at) % len(bad)]) for at, kind in enumerate(ASKED) if kind != "http"]
    for kind, answer in pairs:
        server.replace(ANSWERS[answer])
        folder = place / f"{kind}-{answer}"
        folder.mkdir()
        (folder / "good.safetensors").write_bytes(FILE)
        yield kind, answer, folder


def assert_no_secret(texts: list[str]) -> None:
    assert [text for text in texts if MARK in text.lower()] == []


# Every public function. ------------------------------------------------------------------------------------

MODULES = (
    "ingot",
    "ingot.numpy",
    "ingot.torch",
    "ingot.flax",
    "ingot.tensorflow",
    "ingot.mlx",
    "ingot.paddle",
    "ingot.modelspec",
    "ingot.compat.safetensors",
    "ingot.compat.safetensors.numpy",
    "ingot.compat.safetensors.torch",
)
# Required parameters other than paths, by name. Add new ones here.
GIVEN: dict[str, Callable[[], object]] = {
    "dtype": lambda: "F16",
    "framework": lambda: "numpy",
    "metadata": lambda: {"k": "v"},
    "name": lambda: "a",
    "tensor": lambda: numpy.ones((2, 3), numpy.float32),
    "tensors": lambda: _tensors(),
    "tensor_dict": lambda: {"a": {"dtype": "F32", "shape": [1], "data": b"1234"}},
    "state_dict": lambda: _tensors(),
    "state": lambda: {"tensors": _tensors(), "step": 1},
    "model": lambda: _model(),
    "into": lambda: _model(),
    "module_or_dict": lambda: _model(),
}


def _model() -> Any:
    return importlib.import_module("torch").nn.Linear(3, 2)


def _tensors() -> dict[str, object]:
    return {"a": numpy.ones((2, 3), numpy.float32)}


def is_place(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter takes a path or a URL: by its type, or if that is a str by its name."""
    annotation = str(parameter.annotation)
    return bool(re.search(r"\bPath|PathLike|\bSource\b", annotation)) or (
        parameter.name in ("source", "filename", "destination") and parameter.default is parameter.empty
    )


def public() -> dict[str, Callable[..., Any]]:
    """Return all functions and classes of the package that take a path or a URL, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in getattr(module, "__all__", dir(module)):
            value = None
            with contextlib.suppress(ImportError):
                value = getattr(module, name)
            if (
                name.startswith("_")
                or not callable(value)
                or (isinstance(value, type) and issubclass(value, BaseException))
            ):
                continue
            found[f"{module_name}.{name}"] = value
            for method in vars(value) if isinstance(value, type) else ():
                if isinstance(vars(value)[method], classmethod) and not method.startswith("_"):
                    found[f"{module_name}.{name}.{method}"] = getattr(value, method)
    return {name: value for name, value in found.items() if places(value)}


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:
        # Functions in C without a signature take no path.
        return {}


def places(function: Callable[..., Any]) -> list[str]:
    # The parameters of result classes are fields, not paths to open.
    if isinstance(function, type) and not hasattr(function, "__exit__"):
        return []
    return [name for name, parameter in parameters(function).items() if is_place(parameter)]


FUNCTIONS = public()


def arguments(function: Callable[..., Any], given: dict[str, object], folder: Path) -> dict[str, object]:
    """Return the other arguments: good paths, and all required values."""
    good_file = folder / "good.safetensors"
    found: dict[str, object] = {}
    for name, parameter in parameters(function).items():
        if name in given:
            found[name] = given[name]
        elif name in places(function):
            found[name] = [good_file] if name == "sources" else folder / f"{name}.safetensors"
            if name == "source":
                found[name] = good_file
        elif name == "storage_options":
            found[name] = OPTIONS
        elif name == "specs":
            found[name] = {"a": ("F32", [1])}
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert name in GIVEN, f"say in GIVEN what to give {name} of {function}"
            found[name] = GIVEN[name]()
            if name == "tensors" and "torch" in function.__module__:
                found[name] = _model().state_dict()
        elif name == "options" and "**" in str(parameter) and "Load" in str(parameter.annotation):
            found["storage_options"] = OPTIONS
    return found


def calls(function: Callable[..., Any], url: object, folder: Path) -> Iterator[dict[str, object]]:
    """Yield arguments with the URL in place of each path, and in place of all paths."""
    names = places(function)
    for chosen in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
        given: dict[str, object] = {name: [url] if name == "sources" else url for name in chosen}
        yield arguments(function, given, folder)


def test_secret_tests_find_the_functions_that_take_paths() -> None:
    expected = (
        "ingot.safe_open ingot.Writer ingot.Writer.join ingot.convert ingot.download ingot.hash ingot.merge "
        "ingot.inspect ingot.inspect_async ingot.open ingot.modelspec.read ingot.replace_tensor "
        "ingot.rewrite ingot.serialize_file ingot.split ingot.update_metadata ingot.verify ingot.view "
        "ingot.warm ingot.numpy.load_file ingot.numpy.save_file"
    )
    assert set(expected.split()) - set(FUNCTIONS) == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_print_no_secret(name: str, server: Server, tmp_path: Path) -> None:
    for kind, answer, folder in turns([*FUNCTIONS].index(name), server, tmp_path):
        for given in calls(FUNCTIONS[name], urls(server)[kind], folder):
            if "storage_options" in given and kind == "http" and answer != "good":
                given["storage_options"] = {option: OPTIONS[option] for option in ("headers", "retries")}
            assert_no_secret(reported(partial(FUNCTIONS[name], **given), tmp_path))


def test_progress_bars_and_ranges_print_no_secret(server: Server, tmp_path: Path) -> None:
    server.replace(ANSWERS["good"])
    url = urls(server)["http"]
    shown = reported(partial(ingot.hash, url, progress=True), tmp_path)
    assert any("model.safetensors" in text for text in shown)
    assert_no_secret([*shown, repr(ingot.Ranges(MemoryStore(), url, nbytes=1))])


def test_secret_tests_have_servers_that_echo_secrets(server: Server) -> None:
    """The tests above prove something only if a server really repeats secrets."""
    import urllib.request
    from urllib.error import HTTPError

    server.replace(ANSWERS["reason"])
    request = urllib.request.Request(
        f"{server.url('/x')}?{QUERY}", headers={"Authorization": f"Bearer {MARK}-b"}
    )
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(request)
    assert f"{MARK}-signature%2Bx" in caught.value.reason
    assert f"{MARK}-b" in caught.value.reason
    caught.value.close()


# Every function that writes. -----------------------------------------------------------------------------

# The parameters of paths to write. All other paths are read.
WRITTEN = ("destination",)
WRITERS = {
    f"{name}({place})": (function, place)
    for name, function in FUNCTIONS.items()
    for place in places(function)
    if place in WRITTEN or re.search(r"\.(save\w*|serialize_file|update_metadata|replace_tensor)$", name)
}


# Functions that write to stores too.
STORED = [
    writer
    for writer in WRITERS
    if re.search(r"\.(merge|rewrite|save_\w+|serialize_file|split|upload|Writer)\(", writer)
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if re.match("(clean-)?(s3|az)", kind)])
def test_failed_save_to_a_store_hides_secrets(kind: str, server: Server) -> None:
    def refuse(handler: Handler, request: Request) -> None:
        said = f"<Error><Code>{request.headers} {request.path}</Code></Error>".encode()
        handler.head(403, Content_Length=len(said))
        handler.body(said)

    server.replace(refuse)
    options = {**OPTIONS, "endpoint": server.url(""), "retries": 0}
    saves: list[Callable[..., object]] = [partial(ingot.numpy.save_file, {"a": numpy.zeros(3)})]
    saves += [ingot.Checkpoints]
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        save_sharded = importlib.import_module("ingot.torch").save_sharded
        # Notes about the shards are a part of the error.
        saves += [partial(save_sharded, {"a": torch.zeros(3)}, overwrite=True)]
    for save in saves:
        with pytest.raises((ingot.SafetensorError, OSError)) as caught:
            save(urls(server)[kind], storage_options=options)
        assert MARK not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("writer", WRITERS)
def test_url_is_rejected_as_a_destination(writer: str, server: Server, tmp_path: Path) -> None:
    function, place = WRITERS[writer]
    (tmp_path / "good.safetensors").write_bytes(FILE)
    for kind, url in urls(server).items():
        if kind.removeprefix("clean-").startswith(("s3", "az")) and writer in STORED:
            continue
        given = arguments(function, {place: url}, tmp_path)
        if "source" in given and "download" in writer:
            given["source"] = server.url()
        before, asked = sorted(tmp_path.rglob("*")), len(server.requests)
        if "upload" in writer and not isinstance(url, str):
            # Only a URL is a destination.
            continue
        with pytest.raises(ingot.OptionError) as caught:
            function(**given)
        is_invalid = kind == "file" or "upload" in writer
        assert caught.value.code == ("bad-url" if is_invalid else "url-for-path")
        assert (sorted(tmp_path.rglob("*")), len(server.requests)) == (before, asked)


def test_file_url_is_read_and_written_as_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "a b%"
    folder.mkdir()
    path = folder / "model.safetensors"
    for url in (
        path.as_uri(),
        path.as_uri().replace("file:///", "file://localhost/"),
        path.as_uri().replace("//", ""),
    ):
        ingot.numpy.save_file({"a": numpy.arange(3)}, url)
        assert path.exists()
        assert list(ingot.numpy.load_file(url, backend="mmap")) == ["a"]
        assert ingot.hash(url) == ingot.hash(path)
        assert ingot.hash(url, "md5") == ingot.hash(path, "md5")
        ingot.merge([url], (folder / "merged.safetensors").as_uri(), overwrite=True)
        ingot.convert(url, folder / "c.bt", overwrite=True)
        assert ingot.inspect(url).parameter_total == 3
        assert run("ls", "-q", url).out == "a\n"
        assert run("hash", url).code == run("verify", url).code - 1 == 0
        path.unlink()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://elsewhere/x", "names a file of this machine"),
        ("file:///a?b", "%3F"),
        (
            "ftp://h/x",
            "the scheme ftp:// is unknown: expected one of http://, https://, hf://, s3://, gs://, az://",
        ),
        ("s3a://b/x", "did you mean s3://?"),
        ("gcs://b/x", "did you mean gs://?"),
        ("memory://x", "the scheme memory:// is unknown"),
    ],
)
def test_unknown_scheme_is_named_with_the_known_ones(url: str, words: str) -> None:
    for read in (ingot.numpy.load_file, ingot.hash, ingot.verify, ingot.inspect, ingot.modelspec.read):
        with pytest.raises(ingot.OptionError) as caught:
            read(url)
        assert words in str(caught.value)
        assert caught.value.code == "bad-url"


# Every command. -------------------------------------------------------------------------------------------


def commands(
    group: click.Group, before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


COMMANDS = {" ".join(words): command for words, command in commands(program)}
# Arguments other than paths, by name. Add new ones here.
TYPED = {
    "name": ["a"],
    "names": ["a"],
    "part": ["a[0]"],
    "pairs": ["title=b"],
    "key": [],
    "keys": ["title"],
    "shell": ["bash"],
}
PLACES = (
    "path",
    "paths",
    "a",
    "b",
    "source",
    "destination",
    "json_file",
    "url",
    "other",
    "patch",
    "patches",
    "adapter",
)


def line(words: str, url: str, *more: str) -> list[str]:
    """Return a command with the URL for every path and required option, and `more` words."""
    command = COMMANDS[words]
    typed = words.split()
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            if parameter.name == "words":
                # Paths, and then keys or pairs.
                typed += [url, "title=b"]
                continue
            assert parameter.name in PLACES or parameter.name in TYPED, (
                f"say in TYPED what {parameter.name} is"
            )
            typed += [url] if parameter.name in PLACES else TYPED[parameter.name]
    required = [option for option in _options(command) if option.required]
    typed += [word for option in required for word in (option.opts[0], _value(option, url))]
    return [*typed, *more]


def _options(command: click.Command) -> list[click.Option]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return [option for option in options if option.opts[0] not in ("--help", "--install")]


def _value(option: click.Option, url: str) -> str:
    return option.type.choices[0] if isinstance(option.type, click.Choice) else url


def of_command(typed: list[str], folder: Path) -> list[str]:
    ended = run(*typed)
    return [ended.out, ended.err, *(str(path.relative_to(folder)) for path in folder.rglob("*"))]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_print_no_secret(words: str, server: Server, tmp_path: Path) -> None:
    number = [*COMMANDS].index(words)
    for kind, _, _ in turns(number, server, tmp_path):
        if kind == "bytes":
            continue
        url = str(urls(server)[kind])
        for more in ([], [url, url], ["--json"]):
            assert_no_secret(of_command(line(words, url, *more), tmp_path))


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_print_no_secret_of_an_option(words: str, server: Server, tmp_path: Path) -> None:
    server.replace(ANSWERS["good"])
    for number, option in enumerate(_options(COMMANDS[words]), [*COMMANDS].index(words)):
        for kind in ("http", ASKED[number % len(ASKED)]):
            url = str(urls(server)[kind])
            more = [option.opts[0], *([] if option.is_flag or option.count else [url])]
            assert_no_secret(of_command(line(words, url, *more), tmp_path))


def test_commands_print_no_secret_of_a_system_error(server: Server) -> None:
    url = str(urls(server)["http"])
    message = screen.message_of(PermissionError(errno.EACCES, f"refused:\n{url}", url), [url])
    assert message.count("refused: ") == 1
    assert_no_secret([message])


@pytest.mark.parametrize("words", ["summary", "check", "doctor", "hash", "ls", "info", "verify", "stats"])
def test_commands_read_signed_urls(words: str, server: Server) -> None:
    """Every request has the query of the URL, which is its signature."""

    def signed(handler: Handler, request: Request) -> None:
        if not request.path.endswith(f"?{QUERY}"):
            handler.head(403, Content_Length=0)
        else:
            good(FILE)(handler, request)

    server.replace(signed)
    ended = run(*line(words, f"{server.url()}?{QUERY}"))
    assert ended.err == ""
    assert ended.code == (1 if words == "verify" else 0)
