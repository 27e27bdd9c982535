"""Servers that imitate the Hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from .servers import Handler, Request, Server, serving
from .shards import folder

TOKEN = "hf_right"
#: All hosts of an imitation are on loopback, where redirects need this permission.
NEAR = {"allow_private_redirects": True, "retries": 1}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def take_the_place(hub: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `hub` the Hub, for a user with a token and the home directory `home`."""
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url(""))
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


class Hub:
    """A Hub of one repository, `me/gpt`. It serves JSON itself; another host has the other files."""

    def __init__(self, commits: dict[str, dict[str, bytes]]) -> None:
        #: The files of each commit. The branch is at the first.
        self.commits = commits
        self.main = next(iter(commits))
        self.hub: Server | None = None
        self.cdn: Server | None = None
        #: Addresses on the other host are valid for one signature.
        self.signature = 1
        #: False digests of large files, by name.
        self.claims: dict[str, str] = {}
        #: Called with each request for a file of the repository.
        self.asked = lambda name: None

    def answer(self, handler: Handler, request: Request) -> None:
        owner, repo, page, revision, name = unquote(request.path).lstrip("/").split("/", 4)
        self.asked(name)
        commit = {"main": self.main}.get(revision, revision)
        files = self.commits.get(commit, {})
        if (owner, repo, page) == ("me", "old", "resolve"):
            handler.head(307, Location=request.path.replace("/old/", "/gpt/"), Content_Length=0)
        elif request.headers.get("authorization") != f"Bearer {TOKEN}":
            handler.head(401, X_Error_Message="Access to model me/gpt is restricted", Content_Length=0)
        elif (owner, repo, page) != ("me", "gpt", "resolve") or name not in files:
            handler.head(
                404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", Content_Length=0
            )
        elif name.endswith(".json"):
            handler.part(files[name], request, X_Repo_Commit=commit, ETag=f'"{commit}"')
        else:
            path = request.path.split("/", 5)[5]
            handler.head(
                302,
                Location=self.cdn.url(f"/{commit}/{path}?Signature={self.signature}"),
                X_Repo_Commit=commit,
                X_Linked_Size=len(files[name]),
                X_Linked_Etag=f'"{self.claims.get(name, sha256(files[name]))}"',
                X_Xet_Hash="abc",
                Content_Length=0,
            )

    def blob(self, handler: Handler, request: Request) -> None:
        if request.path.endswith(f"?Signature={self.signature}"):
            commit = request.path[1:41]
            folder(self.commits[commit], f"/{commit}/")(handler, request)
        else:
            handler.head(403, Content_Length=0)

    def names(self) -> list[str]:
        """Return the requests as revision and file."""
        return [unquote(request.path).removeprefix("/me/gpt/resolve/") for request in self.hub.requests]


@contextmanager
def imitated(
    commits: dict[str, dict[str, bytes]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """Run a Hub with these commits in place of the real one."""
    hub = Hub(commits)
    with serving(hub.answer) as hub.hub, serving(hub.blob, host="127.0.0.2") as hub.cdn:
        take_the_place(hub.hub, home, monkeypatch)
        yield hub


def fill_cache(home: Path, commit: str, files: Mapping[str, bytes], without: str | None = None) -> Path:
    """Write the repository as the Hub's clients cache it, and return the folder of the commit."""
    repo = home / "hub" / "models--me--gpt"
    for number, (name, data) in enumerate(files.items()):
        blob = repo / "blobs" / f"{commit}-{number}"
        link = repo / "snapshots" / commit / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if name != without:
            blob.write_bytes(data)
            link.symlink_to(os.path.relpath(blob, link.parent))
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit
