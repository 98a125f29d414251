"""What ``kernels.py`` times: each subject takes a gradient and returns a function that does one round."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.compressors import RowInfo


@dataclasses.dataclass(frozen=True)
class Round:
    """What runs again and again.

    Attributes:
        step: starts one step and returns what has to be waited for.
        read_and_written: the compiler's count of bytes, or ``None``.
    """

    step: Callable[[], Any]
    read_and_written: float | None = None


Start = Callable[[jax.Array], Round]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is timed.

    Attributes:
        start: compiles for a gradient.
        note: what is in a round.
        passes: bytes that have to be read and written over those of the gradient, counted by hand; state that a step
            updates counts once for reading it and once for writing.
    """

    start: Start
    note: str
    passes: float | None = None


def counted(compiled: jax.stages.Compiled) -> float | None:
    costs = compiled.cost_analysis()
    return costs.get("bytes accessed") if isinstance(costs, dict) else None


def pure(function: Callable[[jax.Array], Any]) -> Start:
    """A function of the gradient."""

    def start(x: jax.Array) -> Round:
        compiled = jax.jit(function).lower(x).compile()

        return Round(lambda: compiled(x), counted(compiled))

    return start


def donated(init: Callable[[jax.Array], Any], function: Callable[[jax.Array, Any], Any]) -> Start:
    """A step whose state is updated in place."""

    def start(x: jax.Array) -> Round:
        holder = [jax.tree.map(jnp.array, init(x))]
        compiled = jax.jit(function, donate_argnums=1).lower(x, holder[0]).compile()

        def step() -> Any:
            holder[0] = compiled(x, holder[0])
            return holder[0]

        return Round(step, counted(compiled))

    return start


KEY = jax.random.key(0)
EVERYTHING: dict[str, Any] = {"axis_name": None, "mask": True}


def encode(compressor: gc.compressors.Compressor) -> Callable[[jax.Array], Any]:
    """Statistics and payload of a whole gradient."""

    def run(x: jax.Array) -> Any:
        if compressor.deals:
            # A selection, as an exchange deals a tensor out.
            zero = jnp.zeros((), jnp.int32)
            flat = kernels.as_rows(x, compressor.block).reshape(-1)
            return compressor.encode_dealt(flat, deal_of(compressor, x), (), RowInfo(zero, KEY))[0], None
        rows, count = kernels.as_rows(x, compressor.block), kernels.valid_counts(x.size, compressor.block)
        statistic = compressor.statistic(rows, RowInfo(count))
        side = statistic if compressor.side_information else None
        payload, _ = compressor.encode(rows, (), RowInfo(count, KEY, statistic, side))
        return payload, None if side is None else jnp.broadcast_to(side, count.shape)

    return run


def deal_of(compressor: gc.compressors.Compressor, x: jax.Array) -> kernels.Deal:
    """Of a tensor that is 1024 wide."""
    size = kernels.row_count(x.size, compressor.block) * compressor.block
    return kernels.Deal(size, compressor.block, kernels.dealt_rows(size, compressor.block, (1024,)))


def rotated_rows(x: jax.Array) -> jax.Array:
    """Every block by a rotation of its own."""
    rows = kernels.as_rows(x, 1024)
    return kernels.rotate(rows, kernels.row_seeds(KEY, rows.shape[0]))


def decode_add(compressor: gc.compressors.Compressor) -> Start:
    """One payload, decoded and added to a dense sum in place."""

    def init(x: jax.Array) -> Any:
        return jnp.zeros((kernels.row_count(x.size, compressor.block), compressor.block)), encode(compressor)(x)

    def add(x: jax.Array, state: Any) -> Any:
        total, (payload, side) = state
        if compressor.deals:
            return total + compressor.decode_dealt(payload, deal_of(compressor, x), compressor.block), (payload, side)
        return total + compressor.decode(payload, RowInfo(side=side)), (payload, side)

    return donated(init, add)


def of_two_workers(function: Callable[[Any], Any]) -> Start:
    """A function of two messages in bfloat16, each of as many entries as the gradient."""
    return lambda x: pure(function)(jnp.stack([x, -2 * x]).astype(jnp.bfloat16))


def select_with_residual(x: jax.Array) -> Any:
    compressor = gc.compressors.topk(1e-3)
    rows, (payload, _) = kernels.as_rows(x, compressor.block), encode(compressor)(x)
    return payload, rows - compressor.decode_dealt(payload, deal_of(compressor, x), compressor.block)


def local_step(tx: Any) -> Start:
    """Memory, payload and its absorption, without the averaged update: what one worker computes."""
    return donated(tx.init, lambda x, state: tx.update(x, state)[1])


def whole_step(tx: Any) -> Start:
    """The local step, and plain SGD on parameters that are updated in place."""

    def step(x: jax.Array, carried: Any) -> Any:
        updates, state = tx.update(x, carried[0])
        return state, carried[1] - 0.1 * updates

    return donated(lambda x: (tx.init(x), jnp.zeros_like(x)), step)


def terngrad_step(x: jax.Array, params: jax.Array) -> jax.Array:
    tx = gc.terngrad(**EVERYTHING)
    return params - 0.1 * tx.update(x, tx.init(x))[0]


def momentum_alone(x: jax.Array, state: Any) -> Any:
    velocity = 0.9 * state[0] + x
    return velocity, state[1] + velocity


def ternarize_with_uniform(x: jax.Array) -> jax.Array:
    """The usual formulation: jax.random, a byte for each value."""
    scale = jnp.max(jnp.abs(x))
    taken = jax.random.uniform(KEY, x.shape) < jnp.abs(x) / scale
    return jnp.where(taken, jnp.sign(x), 0.0).astype(jnp.int8)


def naive_dgc(x: jax.Array, state: Any) -> Any:
    """The usual formulation: one global lax.top_k, dense masks."""
    velocity, accumulated = momentum_alone(x, state)
    index = lax.top_k(jnp.abs(accumulated), max(1, x.size // 1000))[1]
    keep = jnp.ones(x.shape, bool).at[index].set(False)
    payload = accumulated[index]
    return jnp.where(keep, velocity, 0.0), jnp.where(keep, accumulated, 0.0) + 0 * payload[0]


TERNARY = gc.compressors.ternary(clip=None)
CLIPPED = gc.compressors.ternary()

SUBJECTS: dict[str, Subject] = {
    "copy": Subject(pure(lambda x: x * 2), "x * 2 into fresh memory", 2),
    "read": Subject(pure(lambda x: jnp.max(jnp.abs(x))), "max |x|", 1),
    "ternarize + pack": Subject(pure(encode(TERNARY)), "scale, stochastic rounding, 1.6 bits", 2.05),
    "ternarize + pack (clipped)": Subject(pure(encode(CLIPPED)), "the same with sigma", 3.05),
    "top 1 of 1024": Subject(pure(encode(gc.compressors.topk(1e-3))), "16-bit index, bfloat16 value", 1.0),
    "top 4 of 1024": Subject(pure(encode(gc.compressors.topk(4e-3))), "the same, four of each block", 1.0),
    "top 32 of 1024": Subject(pure(encode(gc.compressors.topk(1 / 32))), "the same, 32 of each block", 1.03),
    "top 1 of 1024 + residual": Subject(pure(select_with_residual), "payload and what stays behind", 3.0),
    "block int8": Subject(pure(encode(gc.compressors.block_quantized())), "scale of 256, nearest", 2.27),
    "block int8 (stochastic)": Subject(pure(encode(gc.compressors.block_quantized(stochastic=True))), "unbiased", 2.27),
    "block int4": Subject(pure(encode(gc.compressors.block_quantized(bits=4))), "two to a byte, nearest", 2.14),
    "block int2": Subject(pure(encode(gc.compressors.block_quantized(bits=2))), "four to a byte, nearest", 2.08),
    "sign + pack": Subject(pure(lambda x: kernels.pack_signs(kernels.as_rows(x, 1024))), "eight to a byte", 1.03),
    "Hadamard 1024": Subject(pure(rotated_rows), "random signs and rotation", 4),
    "decode + add ternary": Subject(decode_add(TERNARY), "one payload into a dense sum", 2.05),
    "decode + add top 1": Subject(decode_add(gc.compressors.topk(1e-3)), "one payload into a dense sum", 2.0),
    "decode + add int8": Subject(decode_add(gc.compressors.block_quantized()), "one payload into a dense sum", 2.27),
    "sum of 2 in bfloat16": Subject(of_two_workers(kernels.sum_of_workers), "two messages to a dense sum", 2.0),
    "u = m u + g; v = v + u": Subject(donated(lambda x: (x, x), momentum_alone), "momentum alone, state donated", 5),
    "dgc local step": Subject(local_step(gc.dgc(**EVERYTHING)), "state donated; no update", 8),
    "dgc step + sgd": Subject(whole_step(gc.dgc(**EVERYTHING)), "state and parameters donated", 10),
    "terngrad encode + decode": Subject(
        pure(lambda x: gc.terngrad(**EVERYTHING).update(x, gc.terngrad(**EVERYTHING).init(x))[0]),
        "one worker, the mean into fresh memory",
        4.1,
    ),
    "terngrad encode + decode (in place)": Subject(
        donated(lambda x: jnp.zeros_like(x), terngrad_step), "one worker, the mean added to parameters", 5.1
    ),
    "naive: jnp.sum of 2 in bfloat16": Subject(
        of_two_workers(lambda stacked: jnp.sum(stacked.astype(jnp.float32), axis=0)), "the same", 2.0
    ),
    "naive: jax.random ternarize": Subject(pure(ternarize_with_uniform), "int8 values, not packed"),
    "naive: lax.top_k 0.1%": Subject(pure(lambda x: lax.top_k(jnp.abs(x), max(1, x.size // 1000))), "global"),
    "naive: dgc with lax.top_k": Subject(donated(lambda x: (x, x), naive_dgc), "state donated"),
}
