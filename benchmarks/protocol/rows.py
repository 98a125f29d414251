"""What goes between the workers' gradients and AdamW's step, or in the place of both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import gradcomp_jax as gc

AXIS = "data"
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
"""Of AdamW, dense or not; every row is tuned over as many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A recipe.

    Attributes:
      make: ``make(schedule, steps)``: the whole optimizer, exchange included.
      rates: peaks of the learning rate that are tried.
      replicas: whether every worker has parameters of its own.
      every: steps from one exchange to the next.
    """

    make: Callable[[optax.Schedule, int], optax.GradientTransformationExtraArgs]
    rates: tuple[float, ...] = RATES
    replicas: bool = False
    every: int = 1


def before_adamw(exchange: Any, *, b1: float = 0.9, b2: float = 0.999, rates: tuple[float, ...] = RATES) -> Row:
    """Returns the row of an exchange, then AdamW."""
    return Row(lambda rate, steps: optax.chain(exchange, optax.adamw(rate, b1, b2)), rates)


def outer(method: Any, every: int, rate: float, momentum: float, **options: Any) -> Row:
    """Returns the row of AdamW on each replica, then an outer step in ``every`` steps."""
    average = gc.diloco(method, axis_name=AXIS, every=every, learning_rate=rate, momentum=momentum, **options)
    return Row(lambda rate, steps: optax.chain(optax.adamw(rate), average), replicas=True, every=every)


def topk(density: float, *, dense: Any = None, **options: Any) -> Any:
    """Returns top-k with a residual, by a gather."""
    collective = options.pop("collective", "all_gather")
    return gc.exchange(gc.compressors.topk(density, **options), axis_name=AXIS, collective=collective, dense_compressor=dense)


HALF = gc.compressors.dense(jnp.bfloat16)
"""Of the leaves that are not compressed."""

INT4 = gc.block_quantized(axis_name=AXIS, bits=4)

ROWS: dict[str, Row] = {
    "dense": before_adamw(gc.dense(axis_name=AXIS)),
    "dense, b1=0": before_adamw(gc.dense(axis_name=AXIS), b1=0.0),
    "bf16": before_adamw(gc.dense(axis_name=AXIS, dtype=jnp.bfloat16)),
    "int8": before_adamw(gc.block_quantized(axis_name=AXIS, bits=8)),
    "int4": before_adamw(INT4),
    **{
        f"top-k {density:g}, b1={b1:g}": before_adamw(topk(density), b1=b1)
        for density in (0.01,)
        for b1 in (0.0, 0.5, 0.9)
    },
    **{f"top-k 0.01, b1=0, b2={b2:g}": before_adamw(topk(0.01), b1=0.0, b2=b2) for b2 in (0.95, 0.99)},
    **{f"top-k {density:g}, b1=0": before_adamw(topk(density), b1=0.0) for density in (0.003, 0.001)},
    **{
        f"top-k {density:g} in 2 bits, b1=0": before_adamw(topk(density, bits=2, pack_positions=True, dense=HALF), b1=0.0)
        for density in (0.02, 0.01, 0.005, 0.0025)
    },
}
