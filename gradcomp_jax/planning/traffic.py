"""Reads what a method sends in a step from the description of its exchange."""

import collections
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.methods.traffic import CollectiveTraffic as CollectiveTraffic
from gradcomp_jax.methods.traffic import Traffic as Traffic
from gradcomp_jax.methods.traffic import traffic_of

# Of equal tensors at least _LARGE, at most _MOST are described one by one, and further ones add what the last ones did.
# Tensors of this size are separate segments even if they go dense.
_MOST, _LARGE = 128, 2**18


def read(make: Callable[..., optax.GradientTransformation], params: PyTree, workers: int) -> Traffic:
    """Reads what a transformation sends from its own description. It is exact, and nothing is compiled.

    Args:
        make: ``make(axis_name=...)``, for instance ``functools.partial(gc.dgc, density=0.01)``.
        params: arrays or ``ShapeDtypeStruct``.
        workers: N; a single one sends nothing.
    """
    if _checks.positive_int("workers", workers) == 1:
        return Traffic((), 0)
    return traffic_of(make(axis_name="workers"), params, {"workers": workers})


@functools.lru_cache(maxsize=4096)
def read_method(method: str, shapes: tuple[tuple[int, ...], ...], workers: int) -> Traffic:
    """Reads what a method sends with its defaults; a process caches the results.

    If there are more than 128 large tensors of one shape, further ones add what the last 64 did. The bytes are the same except
    for the padding of the owners' rows.

    Args:
        method: its name in :data:`gradcomp_jax.methods.METHODS`.
        shapes: the shapes of all tensors, which are float32.
        workers: N.

    Raises:
        ValueError: for an unknown method.
    """
    _checks.one_of("method", method, METHODS)
    common, count = collections.Counter(shapes).most_common(1)[0]
    if count > _MOST and math.prod(common) >= _LARGE:
        others = tuple(shape for shape in shapes if shape != common)
        half, most = (read_method(method, (*others, *[common] * k), workers) for k in (_MOST // 2, _MOST))
        return _extended(half, most, (count - _MOST // 2) / (_MOST - _MOST // 2))
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return read(METHODS[method].build, params, workers)


def _extended(start: Traffic, end: Traffic, far: float) -> Traffic:
    """Extrapolates linearly from ``start`` by ``far`` times the difference from ``start`` to ``end``."""
    collectives = [
        b._replace(sent=a.sent + far * (b.sent - a.sent), operand=a.operand + far * (b.operand - a.operand))
        for a, b in zip(start.collectives, end.collectives, strict=True)
    ]
    return Traffic(tuple(collectives), start.state + far * (end.state - start.state))
