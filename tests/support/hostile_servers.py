"""Helpers of the tests of hostile servers."""

from __future__ import annotations

import numpy as np
import pytest

import ingot
import ingot.numpy

from .servers import Answer, Handler, Request, Server, serving

TENSORS = {"a": np.arange(600_000), "b": np.arange(7, dtype=np.float32)}


DATA = ingot.numpy.save(TENSORS)


TOKEN = "hf_secret"


#: One retry, without a pause that a test would notice. The servers may be slow on a busy machine.
QUICK = {"retries": 1, "min_rate": 1000, "timeout": 60, "token": TOKEN}


def opened(server: Server, path: str = "/m.safetensors", **options: object) -> ingot.safe_open:
    return ingot.safe_open(server.url(path), "np", storage_options={**QUICK, **options})


def refused(server: Server, code: str, path: str = "/m.safetensors", **options: object) -> ingot.StorageError:
    """Check that opening fails with this code, and that the message names the URL and no secret."""
    with pytest.raises(ingot.StorageError) as caught:
        opened(server, path, **options)
    assert caught.value.code == code, caught.value
    assert str(caught.value).startswith(server.url(path).partition("?")[0])
    assert TOKEN not in str(caught.value)
    return caught.value


def after_the_header(then: Answer) -> Answer:
    """Return the answer of a server that sends a correct header, and then answers like `then`."""

    def answer(handler: Handler, request: Request) -> None:
        if request.range[0] == 0:
            handler.part(DATA, request, ETag='"v1"')
        else:
            then(handler, request)

    return answer


def read_fails(answer: Answer, code: str, **options: object) -> tuple[ingot.StorageError, Server]:
    """Check that reading a tensor fails with this code. Return the error and the server's requests."""
    with serving(after_the_header(answer)) as server:
        file = opened(server, **options)
        with pytest.raises(ingot.StorageError) as caught:
            file["a"]
    assert caught.value.code == code, caught.value
    assert caught.value.path == server.url("/m.safetensors")
    return caught.value, server
