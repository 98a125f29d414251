"""Several workers on one device, as NumPy's replays have them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.conformance.environments import AXIS, vmapped

N = 4
Tree = dict[str, np.ndarray]
__all__ = ["AXIS", "N", "close", "mapped"]


def mapped(tx: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[Any, Callable[..., tuple[Tree, Any]]]:
    """State initialised inside the axis, and ``update(gradients, state)`` whose results are stacked by worker."""
    return vmapped(tx, {k: np.zeros(s, np.float32) for k, s in shapes.items()}, N)


def close(got: Any, want: Any, tolerance: float = 2e-5, message: str = "") -> None:
    """Equal up to a part of the largest entry."""
    bound = tolerance * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=bound, err_msg=message)
