"""Sufficient factor broadcasting (Xie et al., 2014)."""

import functools
import math

import jax
import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import factors


@_arguments.checked
def factored_dot(x: Array, w: Array, *, axis_name: AxisName | None, exchange: factors.Exchange = "auto") -> Array:
    r"""Returns the product ``x @ w`` of a dense layer, whose weight gradient arrives averaged over the workers.

    On worker :math:`i`, with activations :math:`X_i` and the cotangent :math:`\Delta_i` of the product, the gradient of
    ``w`` is :math:`\frac1N \sum_j X_j^T \Delta_j`, the exact mean, the same bits on every worker. It is computed
    either from the sufficient factors :math:`X_j` and :math:`\Delta_j` of all workers, in one all-gather, or from an
    all-reduce of the products. The gradient of ``x`` is :math:`\Delta_i W^T`, this worker's own, as usual.

    The leaf is averaged where it is differentiated, so the exchange must not average it again. The loss must be this worker's
    own, as :func:`gradcomp_jax.local_value_and_grad` takes it: a ``pmean`` inside the loss divides by N again.
    Each call exchanges once: call it on a whole batch, not on single examples under ``jax.vmap``.

    State: none. Wire, a worker, with b the product of the leading dimensions: ``factors`` sends
    (N - 1) b (in + out) values, each as wide as its array's dtype; ``dense`` sends 2 (N - 1) / N in out float32.
    Non-finite values pass through; the exchange handles them.

    Example:
        >>> gc.factored_dot(batch, params["kernel"], axis_name="data").shape
        (16, 256)

    Args:
        x: ``[..., in]``, floating, at most 32 bits wide. All leading dimensions are the batch.
        w: ``[in, out]``, likewise. Its gradient is accumulated in float32 and returned in the dtype of ``w``.
        axis_name: the axis to average over; ``None`` is the plain product. Where the axis is not bound the
            product can be computed, for evaluation, but not differentiated.
        exchange: ``auto`` takes the one of ``factors`` and ``dense`` that sends fewer bytes for these static shapes.

    Returns:
        ``x @ w``, ``[..., out]``.

    Raises:
        ValueError: for shapes that do not match, or an unknown ``exchange``.
        TypeError: for a dtype that is not floating or is wider than 32 bits.
        NameError: when differentiated where the axis is not bound.
        NotImplementedError: when differentiated twice.

    References:
        Xie et al., 2014, Distributed Machine Learning via Sufficient Factor Broadcasting,
        https://arxiv.org/abs/1511.08277; Zhang et al., 2017, Poseidon, https://arxiv.org/abs/1706.03292.
    """
    _checks.one_of("exchange", exchange, factors.EXCHANGES)
    x, w = jnp.asarray(x), jnp.asarray(w)
    _check(x, w)
    return jnp.matmul(x, w) if axis_name is None else _dot(x, w, axis_name, exchange)


def _check(x: Array, w: Array) -> None:
    if w.ndim != 2:
        raise ValueError(f"w must be [in, out], got shape {w.shape}: reshape it to two dimensions")
    if x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x must be [..., in] with in = {w.shape[0]}, the first dimension of w, got x {x.shape} and w {w.shape}:"
            " is one of them transposed?"
        )
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize > 4:
            raise TypeError(f"{name} must be floating and at most 32 bits wide, got {array.dtype}: cast it first")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(x: Array, w: Array, axis_name: AxisName, exchange: factors.Exchange) -> Array:
    return jnp.matmul(x, w)


def _forward(x: Array, w: Array, axis_name: AxisName, exchange: factors.Exchange) -> tuple[Array, tuple[Array, Array]]:
    return jnp.matmul(x, w), (x, w)


def _backward(
    axis_name: AxisName, exchange: factors.Exchange, saved: tuple[Array, Array], delta: Array
) -> tuple[Array, Array]:
    x, w = saved
    for_x = jnp.matmul(delta, w.T.astype(delta.dtype)).astype(x.dtype)
    batch = math.prod(x.shape[:-1])
    flat_x, flat_delta = x.reshape(batch, w.shape[0]), delta.reshape(batch, w.shape[1])
    for_w = factors.mean_product(flat_x, flat_delta, axis_name=axis_name, exchange=exchange)
    # The mean is replicated; a weight that was cast to varying, for a local gradient, needs a varying cotangent.
    return _compat.as_cotangent(for_x, x), _compat.as_cotangent(for_w, w).astype(w.dtype)


_dot.defvjp(_forward, _backward)
