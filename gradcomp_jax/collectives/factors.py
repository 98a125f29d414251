r"""The mean of the workers' products :math:`X_i^T \Delta_i`, from the exchanged factors or from the exchanged products."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import fused

Exchange = Literal["auto", "factors", "dense"]
EXCHANGES: tuple[Exchange, ...] = ("auto", "factors", "dense")


def factor_bytes(x: jax.ShapeDtypeStruct | Array, delta: jax.ShapeDtypeStruct | Array, *, workers: int) -> int:
    """Returns the bytes that one of ``workers`` sends in all-gathers of both factors."""
    return (workers - 1) * (x.size * x.dtype.itemsize + delta.size * delta.dtype.itemsize)


def product_bytes(x: jax.ShapeDtypeStruct | Array, delta: jax.ShapeDtypeStruct | Array, *, workers: int) -> int:
    """Returns the bytes that one worker sends in a float32 all-reduce of the product ``[in, out]``, rounded up."""
    return -(-2 * (workers - 1) * x.shape[-1] * delta.shape[-1] * 4 // workers)


def resolve(
    exchange: Exchange, x: jax.ShapeDtypeStruct | Array, delta: jax.ShapeDtypeStruct | Array, *, workers: int
) -> Literal["factors", "dense"]:
    """Turns ``auto`` into the exchange that sends fewer bytes; if both send as many, into ``dense``, which computes less."""
    if exchange != "auto":
        return exchange
    fewer = factor_bytes(x, delta, workers=workers) < product_bytes(x, delta, workers=workers)
    return "factors" if fewer else "dense"


def mean_product(x: Array, delta: Array, *, axis_name: AxisName, exchange: Exchange = "auto") -> Array:
    r"""Computes :math:`\frac1N \sum_i X_i^T \Delta_i`, the same bits on every worker.

    Args:
        x: this worker's :math:`X_i`, ``[batch, in]``, a floating dtype of at most 32 bits.
        delta: this worker's :math:`\Delta_i`, ``[batch, out]``, likewise.
        axis_name: the axis to average over.
        exchange: ``factors`` gathers both factors from all workers and multiplies them here; ``dense`` multiplies here
            and adds the products in an all-reduce; ``auto`` is the one that sends fewer bytes.

    Returns:
        float32 ``[in, out]``, known to be replicated over the axis.

    Raises:
        NameError: if the axis is not bound.
        NotImplementedError: if it is differentiated.
    """
    workers = _compat.axis_size(axis_name)
    if workers is None:
        raise NameError(
            f"the axis {axis_name!r} is not bound here: differentiate inside jax.shard_map, jax.pmap or"
            f" jax.vmap(axis_name={axis_name!r}), or pass axis_name=None for one worker"
        )
    return _mean_product(x, delta, axis_name, resolve(exchange, x, delta, workers=workers), workers)


# Words carry no derivative: without this rule a second derivative would silently be zero.
@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _mean_product(x: Array, delta: Array, axis_name: AxisName, exchange: str, workers: int) -> Array:
    if exchange == "factors":
        # [N, batch, in] and [N, batch, out]: one product over workers and batch, in the same order on every worker.
        stacked_x, stacked_delta = fused.all_gather([x, delta], axis_name)
        return _product(stacked_x, stacked_delta) / workers
    (total,) = fused.psum([_compat.varying(_product(x, delta), axis_name)], axis_name)
    return total / workers


@_mean_product.defjvp
def _no_second_derivative(*_: object) -> tuple[Array, Array]:
    raise NotImplementedError(
        "the gradient of factored_dot cannot be differentiated again: pass axis_name=None for second derivatives, "
        "and average them with jax.lax.pmean"
    )


def _product(x: Array, delta: Array) -> Array:
    """Returns ``x^T delta`` over all dimensions but the last, accumulated in float32."""
    if x.dtype != delta.dtype:
        x, delta = x.astype(jnp.float32), delta.astype(jnp.float32)
    over = tuple(range(x.ndim - 1))
    return lax.dot_general(x, delta, ((over, over), ((), ())), preferred_element_type=jnp.float32)
