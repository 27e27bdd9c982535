"""Settings that all tests share."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

# A busy machine is not a bug, so examples have no deadline. They are the same each time, so that results
# repeat. `make test-fresh` takes new ones and prints the seed. `make nightly` takes more, after those that
# failed in an earlier run. Both print how to reproduce a failure.
settings.register_profile(
    "ingot", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# A CI server has another default profile, which takes the same examples each time.
settings.register_profile(
    "nightly",
    settings.get_profile("ingot"),
    derandomize=False,
    max_examples=2000,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
)
# Some 1,000 examples in all, since no test has more than this.
settings.register_profile("fresh", settings.get_profile("nightly"), max_examples=25)
settings.load_profile("ingot")

# A cloud machine that runs the tests has an identity, which the tests must not use.
os.environ["AWS_EC2_METADATA_DISABLED"] = os.environ["NO_GCE_CHECK"] = "true"

# A shell makes programs in the background ignore Ctrl-C, and their child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of OpenBLAS poll for work, which the tests do not have. Polling is half of the cost of
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


@pytest.fixture(params=["mmap", "pread"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return each backend of local files in turn."""
    return str(request.param)


REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def needed(error: BaseException | None) -> str | None:
    """Return the package of requirements/test.txt that is not installed, if that is the error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    text = (REQUIREMENTS / "test.txt").read_text("utf-8").replace("-", "_")
    return package if re.search(rf"^{package}(?:_\w+)*(?:\[.*\])?==", text, re.MULTILINE) else None


class Module(pytest.Module):
    """A module of tests, skipped if a package that it imports is not installed."""

    def collect(self) -> object:
        """Collect the tests."""
        try:
            return super().collect()
        except self.CollectError as error:
            if package := needed(error.__cause__):
                pytest.skip(f"needs {package}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Module:
    return Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "torch" in vars(getattr(item, "module", None) or object):
            item.add_marker("torch")
        if settings.get_current_profile_name() == "fresh":
            limit_examples(getattr(item, "obj", None))


def limit_examples(test: Any) -> None:
    """Let a property test have no more examples than its profile, although it sets more itself."""
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None:
        most = min(own.max_examples, settings.default.max_examples)
        test._hypothesis_internal_use_settings = settings(own, max_examples=most)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from skipping())


def skipping() -> Generator[None, object, object]:
    """Skip a test that imports a package that is not installed."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if package := needed(error):
            pytest.skip(f"needs {package}")
        raise
