"""EF21-Muon (2510.00643): each worker sends how its momentum differs from what was sent; Muon steps on the mean estimate."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp_jax as gc
from benchmarks.adamw.rows import worker_ema


def ef21_muon(
    rate: optax.Schedule, *, axis_name: str, momentum: float = 0.9, others: float = 0.2, **options: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Makes Muon's step on EF21's estimate of the workers' momenta.

    :math:`M_i \leftarrow \mu M_i + (1 - \mu) g_i`, :math:`c_i = C(M_i - G_i)`, :math:`G_i \leftarrow G_i + c_i`, and Muon's
    step on the mean :math:`G` without another momentum. The paper's server sends compressed differences of the model back; here
    :math:`c_i` is gathered, or owners send compressed sums, and every worker takes the step itself. Embeddings and vectors get
    AdamW's update of :math:`G`, without a first moment, at ``others`` times the rate, where the paper has
    steps in other norms. Vectors cross dense in float32.

    Args:
        rate: the learning rate of the matrices.
        axis_name: the axis.
        momentum: :math:`\mu`.
        others: learning rate of AdamW over that of the matrices.
        options: of :func:`gradcomp_jax.ef21`.
    """
    muon = optax.chain(optax.stateless_with_tree_map(_direction), optax.scale_by_learning_rate(rate))
    adamw = optax.adamw(lambda step: others * rate(step), b1=0.0)
    return optax.chain(
        worker_ema(momentum),
        gc.ef21(axis_name=axis_name, **options),
        optax.partition({"muon": muon, "adamw": adamw}, _labels),
    )


def orthonormal(matrix: jax.Array) -> jax.Array:
    """Returns about the nearest matrix whose singular values are 1, by Muon's five Newton-Schulz iterations."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (jnp.linalg.norm(wide) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def is_hidden(name: str, leaf: Any) -> bool:
    """Returns whether Muon takes a leaf: a matrix of a hidden layer."""
    return leaf.ndim == 2 and name != "embedding"


def _labels(params: dict[str, Any]) -> dict[str, str]:
    return {name: "muon" if is_hidden(name, leaf) else "adamw" for name, leaf in params.items()}


def _direction(matrix: jax.Array, _: Any) -> jax.Array:
    return math.sqrt(matrix.shape[1] / matrix.shape[0]) * orthonormal(matrix)
