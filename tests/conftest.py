"""Settings that all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a busy machine is not a bug. The same examples each time, so that what passed passes again.
# `make nightly` takes new ones, and prints what reproduces a failure.
settings.register_profile("ingot", deadline=None, derandomize=True)
# A CI server has another default profile, which takes the same examples each time.
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile("ingot")

# A machine of a cloud that runs the tests has an identity of its own, which is not theirs.
os.environ["AWS_EC2_METADATA_DISABLED"] = os.environ["NO_GCE_CHECK"] = "true"

# A shell that starts a program in the background has it ignore Ctrl-C, and with it all that this one starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of OpenBLAS poll for work, and the tests have none for them. Polling is half of the cost of
# importing numpy, in each of a thousand processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No file of the tests needs to survive a power cut. Tests of flushing set or remove this.
os.environ["INGOT_DURABLE"] = "0"


# Four devices of jax on the CPU, for tests of shardings. jax reads the variable when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path for a test's file. Modules override this to create one."""
    return tmp_path / "model.safetensors"
