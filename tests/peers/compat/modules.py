"""Helpers of the tests of `ingot.compat`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import ingot
import ingot.compat
import ingot.torch

PACKAGE = Path(ingot.__file__).parent


# The modules of the wheel, kept here while their names refer to ingot's.
REAL = SimpleNamespace(top=safetensors, torch=safetensors.torch, numpy=safetensors.numpy)


RealError: type[Exception] = safetensors.SafetensorError


def in_a_fresh_process(*args: str, **variables: str) -> str:
    """Run Python with these arguments and ingot first on its path, and return the output."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ONES = torch.ones(2)
