"""Which of the expressions for several platforms a test traces.

``lax.platform_dependent`` traces all of them and lowers one. Most tests run on CPU and ask nothing about the others, whose
tracing would cost much of their time.
"""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import lax

_every = lax.platform_dependent

EVERY = ("tests/kernels/test_platforms.py", "tests/collectives/", "tests/planning/test_traffic.py")
"""Tests that trace all platforms' expressions, as users do, beside those for TPU and GPU and, but for the README's line,
conformance."""


def _cpu(*operands: Any, default: Callable[..., Any] | None = None, **platforms: Callable[..., Any]) -> Any:
    chosen = platforms.get("cpu", default)
    assert chosen is not None, "no expression for CPU"
    return chosen(*operands)


def needs_every(item: pytest.Item) -> bool:
    """Says whether a test is about more than CPU's expressions."""
    compiled = any(mark.name in ("tpu", "gpu") for mark in item.iter_markers())
    conformance = item.nodeid.startswith("tests/conformance/") and item.config.option.markexpr != "not slow"
    return compiled or conformance or item.nodeid.startswith(EVERY)


def trace_for(*, every_platform: bool) -> None:
    """Traces expressions of all platforms from now on, or CPU's alone."""
    chosen = _every if every_platform else _cpu
    if lax.platform_dependent is not chosen:
        lax.platform_dependent = chosen
        if every_platform:
            # What was traced before knows CPU alone.
            jax.clear_caches()
