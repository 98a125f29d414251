"""Parameters in few bits, with a copy in float32 that the updates add up in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, kernels
from gradcomp_jax._typing import Array, PyTree


class MasterWeightsState(NamedTuple):
    """Holds the state of :func:`master_weights`.

    Attributes:
        master: the parameters in float32; leaves that are not floats are unchanged.
        inner: state of the inner transformation.
    """

    master: PyTree
    inner: Any


@_arguments.checked
def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps a float32 copy of narrow parameters, updates the copy, and rounds it to the parameters' dtype after every step.

    An update of less than 1/256 of a bfloat16 parameter is lost when it is added to the parameter; in the copy it adds up. It
    goes around a whole chain: ``gc.master_weights(optax.chain(gc.dgc(...), optax.sgd(0.1)))``, with parameters in bfloat16 or
    float16.

    The inner transformation sees gradients and parameters in float32. The update is a float32 difference, from which
    ``optax.apply_updates`` makes the rounded copy.

    State: :class:`MasterWeightsState`, 4 bytes for each parameter besides the inner transformation's. Wire: that of ``inner``.

    Example:
        >>> tx = gc.master_weights(optax.chain(gc.dgc(axis_name="data"), optax.sgd(0.1)))
        >>> narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
        >>> state = gc.init_state(narrow, tx, mesh)

    Args:
        inner: exchange and optimizer.

    Returns:
        A transformation whose updates are float32.

    Raises:
        ValueError: by ``update``, without parameters.

    References:
        Micikevicius et al., 2018, Mixed Precision Training, section 3.1, https://arxiv.org/abs/1710.03740.
    """
    update_with_extra = optax.with_extra_args_support(inner).update

    def init(params: PyTree) -> MasterWeightsState:
        # float32 parameters are copied too: a state may be donated beside the parameters.
        master = jax.tree.map(lambda p: kernels.widened(jnp.array(p)), params)
        return MasterWeightsState(master, inner.init(master))

    def update(
        updates: PyTree, state: MasterWeightsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights rounds to the parameters' dtype: call update(updates, state, params)")
        moved, new = update_with_extra(jax.tree.map(kernels.widened, updates), state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, moved)
        return jax.tree.map(_step_to, master, params), MasterWeightsState(master, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _step_to(master: Array, param: Array) -> Array:
    """Returns the step from a parameter to the master rounded to its dtype, exact in float32."""
    return kernels.widened(master.astype(param.dtype)) - kernels.widened(param)
