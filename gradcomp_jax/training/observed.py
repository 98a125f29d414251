"""Splits what the loss of a train step returns: what is differentiated, metrics, and what the model itself changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, per_device
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.training.refusals import refuse_no_loss
from gradcomp_jax.training.seen import STATE, over_workers
from gradcomp_jax.transforms import participation


def observed(
    loss: Callable[..., Any], has_aux: bool, params: PyTree, batch: PyTree, *, scale: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the loss to differentiate, and the other values that the loss returns."""
    found = loss(params, batch, **given)
    seen = {}
    if "model_state" in given:
        found, seen["model_state"] = _last_of(found, has_aux)
    refuse_no_loss(found, has_aux)
    if has_aux:
        found, aux = found
        # Widened before micro-batches are averaged, because narrow floats would be rounded.
        seen["aux"] = jax.tree.map(lambda x: as_metric(x) if jnp.ndim(x) == 0 else x, aux)
    return (found if scale is None else found * scale.astype(found.dtype)), {"loss": found, **seen}


def as_metric(x: Any) -> Array:
    """Converts floats to float32, and returns all else unchanged."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _last_of(found: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits the model state from what a loss returns."""
    try:
        if not has_aux:
            value, model_state = found
            return value, model_state
        value, (aux, model_state) = found
        return (value, aux), model_state
    except (TypeError, ValueError) as error:
        form = "(loss, (aux, model_state))" if has_aux else "(loss, model_state)"
        raise ValueError(
            f"the train state has a model state, so the loss is given model_state= and must return {form}"
        ) from error


def next_model_state(
    old: PyTree, new: PyTree, axis_name: AxisName, *, share: participation.Share | None = None
) -> PyTree:
    """Returns the model state after a step: the workers' mean, or each worker's own; the old one if that is not finite.

    With a share, the mean is weighted.
    """
    own = bool(per_device.nodes_of(old, per_device.is_lifted))
    before = per_device.lower(old)
    after = new if own else over_workers([STATE] * len(jax.tree.leaves(new)), new, axis_name, share=share)
    ok = jnp.stack([jnp.array(True), *(jnp.isfinite(x).all() for x in jax.tree.leaves(after))]).all()
    kept = jax.tree.map(lambda a, b: jnp.where(ok, a.astype(jnp.result_type(b)), b), after, before)
    return per_device.lift(_compat.varying(kept, axis_name)) if own else kept
