"""What every test shares: eight simulated devices, strict dtypes, one compilation cache.

The environment is set before jax is imported, because jax reads it at import.
"""

import functools
import gc
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.xla_flags import xla_flags

_DEVICES = 8
os.environ["XLA_FLAGS"] = xla_flags(_DEVICES, os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Figures are written to files; a display may not exist.
os.environ.setdefault("MPLBACKEND", "Agg")

# One cache for all processes of the tests, and for those that they start, which is why it is in the environment and not in
# jax.config: many tests need programs that others have compiled.
_session_cache = None
_cache = os.environ.get("GRADCOMP_TEST_CACHE") or os.environ.get("JAX_COMPILATION_CACHE_DIR")
if not _cache:
    _session_cache = tempfile.TemporaryDirectory(prefix="gradcomp-tests-", ignore_cleanup_errors=True)
    _cache = _session_cache.name
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Where each operation was written is not asked for, and costs time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import platforms  # noqa: E402

# Here and not in the environment: child processes run third-party code that mixes dtypes freely.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# An example may compile a program, so none has a deadline and there are few of them.
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


MOST_COMPILED = 3_250
"""Programs that the README's line may compile."""

_compiled = 0
"""Programs compiled by this process and, where tests run in several, by those that have ended."""


def _count(event: str, seconds: float, **facts: object) -> None:
    del seconds, facts
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def compiled() -> Callable[[], int]:
    """Says how many programs this process has compiled so far."""
    return lambda: _compiled


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Adds up what the processes of pytest-xdist compiled."""
    del error
    global _compiled
    _compiled += getattr(node, "workeroutput", {}).get("compiled", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the README's line where it compiles more than its budget: compilation is what it costs."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["compiled"] = _compiled
    elif _is_readme_line(config) and _compiled > MOST_COMPILED and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints how many programs were compiled."""
    limit = f", the budget is {MOST_COMPILED:,}" if _is_readme_line(config) else ""
    if limit and _compiled > MOST_COMPILED:
        limit += ": FAILED, though every test may have passed"
    terminalreporter.write_line(f"{_compiled:,} programs compiled{limit}")
    late = sum(_TOO_LATE in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if late:
        terminalreporter.write_line(f"{late:,} tests not begun: {_TOO_LATE}")


def _is_readme_line(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow" and config.args_source != pytest.Config.ArgsSource.ARGS


# First, so that pytest-xdist sees the groups: it reads them in a hook of the same name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets one process run what shares programs."""
    for item in items:
        # Programs of accelerators take minutes: those have groups of their own, or none.
        if not item.get_closest_marker("xdist_group") and not item.nodeid.startswith(("tests/tpu/", "tests/gpu/")):
            item.add_marker(pytest.mark.xdist_group(_shares_programs_with(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the collector of garbage from what stays to the end: tracing makes many objects, and most of them last."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


_TOO_LATE = "no time was left to begin it"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Chooses what is traced, before any fixture traces. Begins nothing after the time that ``GRADCOMP_TEST_UNTIL`` gives."""
    if time.time() > float(os.environ.get("GRADCOMP_TEST_UNTIL", "inf")):
        pytest.skip(_TOO_LATE)
    platforms.trace_for(every_platform=platforms.needs_every(item))


def _shares_programs_with(item: pytest.Item) -> str:
    """Names the tests that a test shares compiled programs with: those of its file, or of its method's conformance."""
    file = item.nodeid.partition("::")[0]
    method = item.callspec.params.get("method") if hasattr(item, "callspec") else None
    return f"conformance of {method}" if method and file.startswith("tests/conformance/") else file


_MOST_MAPS = 15_000
"""A quarter of what Linux lets a process have by default. Each loaded program takes some, and beyond the limit loading one
crashes the process."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets go of compiled programs before there are too many; what is needed again comes from the cache on disk."""
    maps = pathlib.Path("/proc/self/maps")
    goes_on = nextitem is not None and _shares_programs_with(item) == _shares_programs_with(nextitem)
    if not maps.exists() or maps.read_bytes().count(b"\n") < _MOST_MAPS * (1 + goes_on):
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for held in vars(module).values():
                if isinstance(held, functools._lru_cache_wrapper):
                    held.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _standard_promotion(request: pytest.FixtureRequest):
    """Lifts strict promotion where a test is marked ``standard_promotion``.

    optax.adam multiplies an int32 count by a Python float, which strict promotion rejects.
    """
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """A mesh of eight devices on one Auto axis called ``data``."""
    return jax.make_mesh((_DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
