"""A process that is killed at a chosen call, without a process."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


class Killed(BaseException):
    """As a signal: nothing in between handles it."""


def kill_before(patch: pytest.MonkeyPatch, call: int, functions: Iterable[tuple[Any, str]]) -> None:
    """Lets the functions, each an owner's attribute, raise :class:`Killed` in the place of their ``call``-th call in all."""
    left = call

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*args, **kwargs)

        return run

    for owner, name in functions:
        patch.setattr(owner, name, counted(getattr(owner, name)))
