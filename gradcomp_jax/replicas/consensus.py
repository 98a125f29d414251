"""Measures how far replicas are apart, and makes one set of parameters from all of them."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.audit import wire_bytes
from gradcomp_jax.core.overwritten import is_overwritten, joined, trained
from gradcomp_jax.per_device import is_lifted, is_per_device, nodes_of
from gradcomp_jax.replicas.elastic import ElasticState
from gradcomp_jax.replicas.outer import OuterState, is_masked

Of = Literal["mean", "centre"]


@_arguments.checked
def consolidate(state: Any, *, of: Of = "mean") -> PyTree:
    """Returns one set of parameters for evaluation, or to start something else from.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=8))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> gc.consolidate(state)["kernel"].shape
        (256, 256)

    Args:
        state: a train state of replicas, or only its parameters, with their global values (as ``gc.init_state(...,
            replicas=True)`` and checkpoints hold them). Parameters that are not per-device are returned unchanged.
        of: ``mean``, the mean of the replicas; ``centre``, the centre of :func:`elastic_average`, :func:`local_sgd`,
            :func:`diloco` and similar methods, from the optimizer's state.

    Returns:
        The parameters. For Flax's collection ``_overwrite_with_gradient``, which no method averages, the replicas' maximum.

    Raises:
        ValueError: if there is no centre, or more than one.
    """
    _checks.one_of("of", of, get_args(Of))
    params = getattr(state, "params", state)
    if of == "mean":
        return jax.tree_util.tree_map_with_path(_one, params, is_leaf=is_per_device)

    found = nodes_of(state, lambda node: isinstance(node, (ElasticState, OuterState)))
    if len(found) != 1:
        raise ValueError(
            f"a centre is in the state of elastic_average, local_sgd, diloco and sparse_loco, and here are {len(found)} of"
            " those; pass the whole train state of one, or use of='mean'"
        )

    def at(centre: Any, own: Any) -> Any:
        # Parameters of another optimizer, in a partition, have no centre.
        return _mean(own) if is_masked(centre) else centre.astype((own.value if is_lifted(own) else own).dtype)

    overwritten = jax.tree_util.tree_map_with_path(_one, params, is_leaf=is_per_device)
    return joined(overwritten, jax.tree.map(at, found[0].centre, trained(params), is_leaf=is_masked), overwritten)


@_arguments.checked
def staleness(state: Any) -> Array:
    """Returns how many local steps a replica is ahead of what it knows of the others: int32 scalar, for a log.

    For :func:`delayed_average` it counts the steps whose mean has not arrived; for others, the steps since the last exchange.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=8))
        >>> int(gc.staleness(gc.init_state(params, tx, mesh, replicas=True)))  # before the first step
        0

    Args:
        state: a train state, or an optimizer's, with one of these methods in it.

    Raises:
        ValueError: if there is no such method, or more than one.
    """
    found = nodes_of(state, lambda node: hasattr(node, "staleness"))
    if len(found) != 1:
        raise ValueError(f"expected the state of one method of gradcomp_jax.replicas, found {len(found)}")
    return found[0].staleness()


@_arguments.checked
def mean_wire_bytes(compiled: Any, *, every: int) -> float:
    """Returns the bytes that a device sends per step, averaged over a period in which it exchanges once.

    Collectives outside branches of the program count in every step. Those in a branch (an exchange every so many steps, a
    part's turn) count in one of ``every``. Of a choice within it, among densities or the candidates of
    :func:`gradcomp_jax.switched`, the last counts.

    Example:
        >>> compiled = gc.lower_update(params, gc.dense(axis_name="data"), mesh).compile()
        >>> gc.mean_wire_bytes(compiled, every=4)  # no branch, so in every step
        460551.0

    Args:
        compiled: a compiled step, or anything else that :func:`gradcomp_jax.wire_bytes` reads.
        every: steps of the period.
    """
    every = _checks.positive_int("every", every)
    most = wire_bytes(compiled, branch=-1).sent
    least = wire_bytes(compiled, branch="min").sent if every > 1 else most
    return least + (most - least) / every


def _one(path: tuple, leaf: Any) -> Any:
    return jnp.max(leaf.value, axis=0) if is_lifted(leaf) and is_overwritten(path) else _mean(leaf)


def _mean(leaf: Any) -> Any:
    if not is_lifted(leaf):
        return leaf
    value = leaf.value
    return jnp.mean(value.astype(jnp.float32), axis=0).astype(value.dtype)


@_arguments.checked
def replica_spread(state: Any) -> Array:
    r"""Returns the replicas' spread: :math:`\sqrt{\tfrac1N \sum_i \lVert x_i - \bar x \rVert^2} \,/\, \lVert \bar x \rVert`.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), gc.gossip(axis_name="data"))
        >>> float(gc.replica_spread(gc.init_state(params, tx, mesh, replicas=True)))  # replicas start equal
        0.0

    Args:
        state: as for :func:`consolidate`.

    Returns:
        float32 scalar; 0 for parameters that are not per-device, and where the mean is zero.
    """
    params = trained(getattr(state, "params", state))
    apart = norm = jnp.zeros((), jnp.float32)
    for mark in nodes_of(params, is_per_device):
        value = mark.value.astype(jnp.float32)
        mean = value.mean(axis=0)
        apart = apart + jnp.sum((value - mean) ** 2) / value.shape[0]
        norm = norm + jnp.sum(mean**2)
    return jnp.where(norm > 0, jnp.sqrt(apart) / jnp.sqrt(jnp.where(norm > 0, norm, 1.0)), 0.0)
