"""Which parameters of a test the README's line leaves to the continuous build. Compilation is what tests cost."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

slow = pytest.mark.slow


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Marks as slow all values, or tuples of values, but those that are quick."""
    return [
        value if value in quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=slow)
        for value in values
    ]
