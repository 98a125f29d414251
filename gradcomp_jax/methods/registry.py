"""Every method, a line each; and the table of what they cost, as their exchanges describe it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks, _markdown
from gradcomp_jax.methods.block_quantized import block_quantized
from gradcomp_jax.methods.demo import demo
from gradcomp_jax.methods.dense import dense
from gradcomp_jax.methods.dgc import dgc
from gradcomp_jax.methods.eden import eden
from gradcomp_jax.methods.ef21 import ef21
from gradcomp_jax.methods.ef_sign_sgd import ef_sign_sgd
from gradcomp_jax.methods.fp8 import fp8
from gradcomp_jax.methods.gradient_dropping import gradient_dropping
from gradcomp_jax.methods.one_bit_adam import one_bit_adam
from gradcomp_jax.methods.one_bit_sgd import one_bit_sgd
from gradcomp_jax.methods.powersgd import powersgd
from gradcomp_jax.methods.qsgd import qsgd
from gradcomp_jax.methods.random_k import random_k
from gradcomp_jax.methods.sign_sgd import sign_sgd
from gradcomp_jax.methods.sparcml import sparcml
from gradcomp_jax.methods.stochastic_rounding import stochastic_rounding
from gradcomp_jax.methods.terngrad import terngrad
from gradcomp_jax.methods.topk_sgd import topk_sgd
from gradcomp_jax.methods.traffic import traffic_of

Kept = Literal["nothing", "residual", "momentum", "estimate"]
Update = Literal["mean", "sign", "direction"]
Momentum = Literal["after", "inside"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method as users call it, and what must hold of it.

    Attributes:
        make: ``make(axis_name=..., **options)``.
        kept: what stays behind on a worker. ``nothing``: the code is unbiased, or sends the gradient as it is.
            ``residual``: what was not sent, added to the next gradient. ``momentum``: the same of a velocity.
            ``estimate``: an estimate of the worker's gradient.
        momentum: whether momentum goes ``after`` it or lives ``inside``.
        collectives: the ways across that its ``collective`` argument takes, the default first; one that takes none has one.
        paper: number of the paper on arXiv, or another reference.
        update: ``mean``: an average of gradients. ``sign``: numbers in {-1, 0, 1}. ``direction``: an optimizer's.
        biased: whether the update's expectation is not the mean gradient, clipping, saturation and the rounding of a cast to
            bfloat16 aside.
        options: what it must be given, or is best seen with.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    kept: Kept
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str
    update: Update = "mean"
    biased: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, *, axis_name: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation, with :attr:`options` unless others are given."""
        return self.make(axis_name=axis_name, **{**self.options, **options})


GATHERS = ("two_phase", "all_gather")
SELECTS = (*GATHERS, "recursive_doubling")

METHODS: dict[str, Method] = {
    "dense": Method(dense, "nothing", "after", ("all_reduce", *GATHERS), "", biased=False),
    "dense_bf16": Method(
        dense, "nothing", "after", (*GATHERS, "all_reduce"), "", biased=False, options={"dtype": "bfloat16"}
    ),
    "terngrad": Method(terngrad, "nothing", "after", (*GATHERS, "all_reduce"), "1705.07878", biased=False),
    "dgc": Method(dgc, "momentum", "inside", SELECTS, "1712.01887"),
    "gradient_dropping": Method(gradient_dropping, "residual", "after", SELECTS, "1704.05021"),
    "topk_sgd": Method(topk_sgd, "residual", "after", SELECTS, "1809.07599"),
    "random_k": Method(random_k, "residual", "after", SELECTS, "1809.07599"),
    "one_bit_sgd": Method(one_bit_sgd, "residual", "after", GATHERS, "Interspeech 2014"),
    "qsgd": Method(qsgd, "nothing", "after", GATHERS, "1610.02132", biased=False),
    "stochastic_rounding": Method(stochastic_rounding, "nothing", "after", GATHERS, "1502.02551", biased=False),
    "fp8": Method(fp8, "residual", "after", GATHERS, "2209.05433"),
    "block_quantized": Method(block_quantized, "residual", "after", GATHERS, "2306.10209"),
    "sign_sgd": Method(sign_sgd, "nothing", "after", GATHERS, "1802.04434", update="sign"),
    "ef_sign_sgd": Method(ef_sign_sgd, "residual", "after", GATHERS, "1901.09847"),
    "one_bit_adam": Method(
        one_bit_adam, "residual", "inside", ("two_phase",), "2102.02888", "direction", options={"warm_up_steps": 100}
    ),
    "powersgd": Method(powersgd, "residual", "after", ("all_reduce",), "1905.13727"),
    "eden": Method(eden, "nothing", "after", GATHERS, "2108.08842", biased=False),
    "ef21": Method(ef21, "estimate", "after", SELECTS, "2106.05203"),
    "demo": Method(demo, "residual", "inside", ("all_gather", "two_phase"), "2411.19870", update="sign"),
    "sparcml": Method(sparcml, "residual", "after", ("two_phase", "recursive_doubling"), "1802.08021"),
}
"""Names to methods. A new method adds one line."""


def command_name(name: str) -> str:
    """Returns a method's name as the commands print it; they take it with ``_`` as well."""
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Row:
    """What a method costs with its defaults, on one large matrix.

    Attributes:
        name: in :data:`METHODS`.
        up: bits for each entry that a worker puts on its way to the others.
        down: bits for each entry that come back as the mean; 0 where payloads are gathered and nothing comes back.
        sent: bits for each entry that one worker sends in all, as :func:`gradcomp_jax.wire_bytes` counts.
        state: bytes of state for each parameter on each worker.
        biased: see :class:`Method`.
        momentum: see :class:`Method`.
        collectives: see :class:`Method`.
        paper: see :class:`Method`.
    """

    name: str
    up: float
    down: float
    sent: float
    state: float
    biased: bool
    momentum: Momentum
    collectives: tuple[str, ...]
    paper: str


def table(*, workers: int = 8, shape: tuple[int, int] = (4096, 1024)) -> list[Row]:
    """What every method sends and keeps of one matrix, as its exchange describes it: no devices, nothing compiled or run.

    Args:
        workers: N.
        shape: of the matrix.

    Raises:
        ValueError: for fewer than two workers.
    """
    if _checks.positive_int("workers", workers) < 2:
        raise ValueError(f"workers must be at least 2, got {workers}: one worker sends nothing")
    return [_row(name, workers, tuple(shape)) for name in METHODS]


@functools.cache
def _row(name: str, workers: int, shape: tuple[int, int]) -> Row:
    method, size, axis = METHODS[name], shape[0] * shape[1], "workers"
    traffic = traffic_of(method.build(axis_name=axis), jax.ShapeDtypeStruct(shape, jnp.float32), {axis: workers})
    put_in = {crossing.kind: crossing.operand for crossing in traffic.crossings}
    summed, gathered = put_in.get("all-reduce", 0), put_in.get("all-gather", 0)
    up = put_in.get("all-to-all", 0) + put_in.get("collective-permute", 0)
    down = gathered * workers if up else 0
    up = up or gathered
    return Row(
        name,
        up=8 * (up + summed) / size,
        down=8 * (down + summed) / size,
        sent=8 * traffic.sent / size,
        state=traffic.state / size,
        biased=method.biased,
        momentum=method.momentum,
        collectives=method.collectives,
        paper=method.paper,
    )


def header(workers: int) -> tuple[str, ...]:
    """Names of the columns of :func:`cells`."""
    return ("method", "bits up / down", f"sent, N = {workers}", "state", "biased", "momentum", "collectives", "paper")


def markdown_table(*, workers: int = 8) -> str:
    """:func:`table` as Markdown, as it stands in the README."""
    lines = _markdown.table(header(workers), map(cells, table(workers=workers)), align="lrrrl")
    return "\n".join(lines) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """One row as text."""
    down = "-" if not row.down else _bits(row.down)
    link = f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper[:1].isdigit() else row.paper
    return (
        f"`gc.{_call(row.name)}`",
        f"{_bits(row.up)} / {down}",
        _bits(row.sent),
        # Counters of steps are a few bytes in all.
        f"{row.state:.3g} B" if row.state > 1e-3 else "0",
        "yes" if row.biased else "no",
        row.momentum,
        ", ".join(row.collectives),
        link,
    )


def _call(name: str) -> str:
    method = METHODS[name]
    options = ", ".join(f"{k}={v!r}" for k, v in method.options.items())
    return f"{method.make.__name__}({options})"


def _bits(bits: float) -> str:
    return f"{bits:.2g}" if bits < 10 else f"{bits:.0f}"
