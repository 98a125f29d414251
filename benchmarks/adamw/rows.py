"""What goes between the workers' gradients and AdamW's step, or instead of both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import gradcomp_jax as gc
from gradcomp_jax import per_device
from gradcomp_jax.methods import METHODS

AXIS = "data"
DENSE = 0.15
"""Share of 1-bit Adam's steps before its variance freezes (2102.02888, section 7.1)."""

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
      dense: share of the steps, the first ones, that are dense in float32.
      branches: shares of the steps by branch of the compiled update, where ``every`` does not say what they send.
      claimed: whether a claim is made for it, and it has more seeds.
      method: its name in ``gradcomp_jax.methods.METHODS``, where ``gc.adamw`` of that method is what it is. Of
        ``topk_two_bits`` it is that or less: ``gc.sparse_adamw`` compresses vectors too, which the method alone leaves dense.
      options: of the method, as a price says them, where they are not its defaults.
    """

    make: Callable[[optax.Schedule, int], optax.GradientTransformationExtraArgs]
    rates: tuple[float, ...] = RATES
    replicas: bool = False
    every: int = 1
    dense: float = 0.0
    branches: tuple[float, ...] = ()
    claimed: bool = False
    method: str = ""
    options: str = ""


def before_adamw(exchange: Any, *, b1: float = 0.9, b2: float = 0.999, method: str = "", options: str = "") -> Row:
    """Returns the row of an exchange, then AdamW."""
    return Row(lambda rate, steps: optax.chain(exchange, optax.adamw(rate, b1, b2)), method=method, options=options)


def registered(name: str) -> Row:
    """Returns the row of a method with its defaults, as ``gc.adamw`` has it."""
    return Row(lambda rate, steps: gc.adamw(rate, METHODS[name].build(axis_name=AXIS)), method=name)


def outer(method: Any, every: int, rate: float, momentum: float, inner: Any = optax.adamw, **options: Any) -> Row:
    """Returns the row of an optimizer on each replica, then an outer step in ``every`` steps."""
    average = gc.diloco(method, axis_name=AXIS, every=every, learning_rate=rate, momentum=momentum, **options)
    return Row(lambda rate, steps: optax.chain(inner(rate), average), replicas=True, every=every)


def topk(
    density: float, *, dense: Any = None, phases: int = 1, together: bool = False, mask: Any = None, **options: Any
) -> Any:
    """Returns top-k with a residual, by a gather or in two phases, of each matrix or of all leaves together.

    ``mask=True`` compresses vectors too.
    """
    return gc.exchange(
        gc.compressors.topk(density, **options),
        axis_name=AXIS,
        collective="all_gather" if phases == 1 else "two_phase",
        dense_compressor=dense,
        mask=True if together else mask,
        view="tree" if together else None,
    )


def two_bits(density: float, **options: Any) -> Any:
    """Returns top-k whose values are a sign and one of two magnitudes, with packed positions."""
    options = {"block": 4160, "bits": 2, "pack_positions": True, "dense": HALF} | options
    return topk(density, **options)


def worker_ema(decay: float) -> optax.GradientTransformation:
    """Averages each worker's own gradients over time (2305.15055, eq. 4)."""
    ema = optax.ema(decay, debias=False)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        averaged, state = ema.update(updates, per_device.lower(state), params)
        return averaged, per_device.lift(state)

    return optax.GradientTransformation(lambda params: per_device.lift(ema.init(params)), update)


HALF = gc.compressors.dense(jnp.bfloat16)
"""Of the leaves that are not compressed."""

INT4 = gc.block_quantized(axis_name=AXIS, bits=4)

_FINE = {
    "dense": before_adamw(gc.dense(axis_name=AXIS)),
    "dense, b1=0": before_adamw(gc.dense(axis_name=AXIS), b1=0.0),
    "bf16": before_adamw(gc.dense(axis_name=AXIS, dtype=jnp.bfloat16)),
    "int8": registered("block_quantized"),
    "int4": before_adamw(INT4, method="block_quantized", options="bits 4"),
    "FP8": registered("fp8"),
    "QSGD, 4 bits": registered("qsgd"),
    "TernGrad": registered("terngrad"),
    "EDEN, 4 bits": registered("eden"),
    "EDEN, 2 bits": before_adamw(gc.eden(axis_name=AXIS, bits=2), method="eden", options="bits 2"),
    "EDEN, 1 bit": before_adamw(gc.eden(axis_name=AXIS, bits=1), method="eden", options="bits 1"),
    "EDEN, 1 bit, residual": before_adamw(
        gc.eden(axis_name=AXIS, bits=1, error_feedback=True), method="eden", options="bits 1, error_feedback True"
    ),
    "EDEN, 1 bit, residual, b1=0": before_adamw(gc.eden(axis_name=AXIS, bits=1, error_feedback=True), b1=0.0),
    "1-bit SGD": registered("one_bit_sgd"),
    "1-bit SGD, b1=0": before_adamw(gc.one_bit_sgd(axis_name=AXIS), b1=0.0),
    "signs, residual": registered("ef_sign_sgd"),
    "signs, residual, b1=0": before_adamw(gc.ef_sign_sgd(axis_name=AXIS), b1=0.0),
}

_SELECTIONS = {
    **{
        f"sparse_adamw, {density:g}": Row(
            lambda rate, steps, density=density: gc.sparse_adamw(rate, axis_name=AXIS, density=density),
            claimed=True,
            method="topk_two_bits",
            options="" if density == 0.01 else f"density {density:g}",
        )
        for density in (0.01, 0.02, 0.007, 0.005, 0.0025, 0.002)
    },
    **{
        f"top-k {up:g} up, {down:g} down, 2 bits, b1=0": before_adamw(
            gc.topk_sgd(
                axis_name=AXIS, density=up, downlink_density=down, block=1024, bits=2, pack_positions=True, mask=True
            ),
            b1=0.0,
        )
        for up, down in ((0.006, 0.02), (0.004, 0.024), (0.012, 0.012))
    },
    **{f"top-k 0.01, b1={b1:g}": before_adamw(topk(0.01), b1=b1) for b1 in (0.9, 0.5)},
    "top-k 0.01, b1=0": before_adamw(topk(0.01), b1=0.0, method="topk_sgd", options="collective all_gather"),
    **{
        f"top-k {density:g}, 2 bits, two phases, leaves together, b1=0": before_adamw(
            two_bits(density, block=block, phases=2, together=True), b1=0.0
        )
        # Some ten entries a block.
        for density, block in ((0.0075, 1360), (0.005, 2048), (0.003, 3424))
    },
    "top-k 0.01, 2 bits, two phases, b1=0": before_adamw(two_bits(0.01, block=1024, phases=2), b1=0.0),
    "top-k 0.01, 2 bits, leaves together, b1=0": before_adamw(two_bits(0.01, together=True), b1=0.0),
    **{f"top-k 0.01, b1=0, b2={b2:g}": before_adamw(topk(0.01), b1=0.0, b2=b2) for b2 in (0.95, 0.99)},
    **{f"top-k {density:g}, b1=0": before_adamw(topk(density), b1=0.0) for density in (0.003, 0.001)},
    "top-k 0.01, two phases, b1=0": registered("topk_sgd"),
    "gradient dropping 0.01": registered("gradient_dropping"),
    "random-k 0.01": registered("random_k"),
    "SparCML 0.01": registered("sparcml"),
    "DGC 0.001": registered("dgc"),
    "DGC 0.01, by gather, b1=0": before_adamw(gc.dgc(axis_name=AXIS, density=0.01, collective="all_gather"), b1=0.0),
    "DGC 0.01, by gather, b1=0.9": before_adamw(gc.dgc(axis_name=AXIS, density=0.01, collective="all_gather")),
    "DGC 0.01, two phases, b1=0": before_adamw(gc.dgc(axis_name=AXIS, density=0.01, collective="two_phase"), b1=0.0),
    "EF21 0.01, b1=0": before_adamw(gc.ef21(axis_name=AXIS, density=0.01, collective="all_gather"), b1=0.0),
    **{
        f"EF21 0.01, momentum of {1 - eta:g} on the worker, b1=0": before_adamw(
            optax.chain(worker_ema(1 - eta), gc.ef21(axis_name=AXIS, density=0.01, collective="all_gather")), b1=0.0
        )
        for eta in (0.1, 0.5)
    },
}

_LOW_RANK = {
    "PowerSGD, rank 4, b1=0": registered("powersgd"),
    "PowerSGD, rank 4, b1=0.9": before_adamw(gc.powersgd(axis_name=AXIS), b1=0.9),
    "PowerSGD, rank 1, b1=0": before_adamw(
        gc.powersgd(axis_name=AXIS, rank=1), b1=0.0, method="powersgd", options="rank 1"
    ),
    "PowerSGD, rank 8, b1=0": before_adamw(
        gc.powersgd(axis_name=AXIS, rank=8), b1=0.0, method="powersgd", options="rank 8"
    ),
}

_WHOLE = {
    "1-bit Adam": Row(
        lambda rate, steps: optax.chain(
            gc.one_bit_adam(axis_name=AXIS, warm_up_steps=round(DENSE * steps)), optax.scale_by_learning_rate(rate)
        ),
        tuple(rate / 4 for rate in RATES),
        dense=DENSE,
        method="one_bit_adam",
    ),
    "DeMo": Row(
        lambda rate, steps: optax.chain(gc.demo(axis_name=AXIS), optax.sgd(rate)),
        tuple(rate / 4 for rate in RATES),
        method="demo",
    ),
    "Dion, rank 4": Row(
        lambda rate, steps: optax.chain(gc.dion(axis_name=AXIS, rank=4), optax.sgd(rate)),
        tuple(5 * rate for rate in RATES),
        method="dion",
        options="rank 4",
    ),
}


def _outer_rows(name: str, method: Any, every: int, **options: Any) -> dict[str, Row]:
    return {
        f"{name} every {every}, {rate:g}/{momentum:g}": outer(method, every, rate, momentum, **options)
        for rate, momentum in ((0.7, 0.9), (0.7, 0.8), (1.0, 0.5), (1.0, 0.0))
    }


_OUTER = {
    **_outer_rows("outer average in int4", INT4, 9),
    **_outer_rows("outer average in int4", INT4, 15),
    **_outer_rows("outer average in int4", INT4, 30),
    **_outer_rows("outer average in int4", INT4, 100),
}

_OUTER |= {
    **_outer_rows("outer average in 1 bit, residual,", gc.eden(axis_name=AXIS, bits=1, error_feedback=True), 9),
    # Some hundred steps until an entry has crossed, as with one in a hundred in every step.
    **_outer_rows("outer average of top-k 0.05, 2 bits,", two_bits(0.05, block=768, phases=2, mask=True), 4),
    **_outer_rows(
        "outer average in 2 bits, Muon inside,", gc.block_quantized(axis_name=AXIS, bits=2), 9, inner=optax.contrib.muon
    ),
    **{
        f"SparseLoCo every {every}": Row(
            lambda rate, steps, every=every: optax.chain(
                optax.adamw(rate), gc.sparse_loco(axis_name=AXIS, every=every)
            ),
            replicas=True,
            every=every,
        )
        for every in (9, 30)
    },
}

ROWS: dict[str, Row] = _FINE | _SELECTIONS | _LOW_RANK | _WHOLE | _OUTER
