"""What to log about a state."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from gradcomp_jax import _arguments
from gradcomp_jax._typing import Array
from gradcomp_jax.audit import WireReport
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.per_device import is_per_device, nodes_within
from gradcomp_jax.replicas import replica_spread
from gradcomp_jax.training.refusals import refuse_donated
from gradcomp_jax.transforms import DensityState, SwitchedState


@_arguments.checked
def diagnostics(state: Any, *, spread: bool = False, wire: WireReport | None = None) -> dict[str, Array]:
    """Returns what a state says about its exchanges, as a flat dictionary of scalars for any metric writer.

    Call it on the state that a step returns, outside ``shard_map``, inside ``jax.jit`` or not: ``writer.write_scalars(step,
    gc.diagnostics(state))``. It reads counters and one number a worker, so it costs almost nothing compared to a step.

    Example:
        >>> state = gc.init_state(params, optax.chain(gc.topk_sgd(axis_name="data"), optax.sgd(0.1)), mesh)
        >>> sorted(gc.diagnostics(state))
        ['exchange/memory_ratio', 'exchange/memory_ratio_max', 'exchange/skipped', 'exchange/steps']

    Args:
        state: a train state, or an optimizer's state, with an exchange or a method of :mod:`gradcomp_jax.replicas` in it.
        spread: whether to say how far apart replicas are, which averages their parameters over the network.
        wire: the report of :func:`gradcomp_jax.wire_bytes` for the compiled step, to include its bytes.

    Returns:
        Float32 scalars, for what the state has:

        - ``exchange/steps``, ``exchange/skipped``: updates seen, and those skipped because a gradient was not finite;
        - ``exchange/memory_ratio``, ``exchange/memory_ratio_max``: the norm of what a worker holds back over that of its
          gradient, the mean and the largest over the workers. If it keeps growing, something is never sent;
        - ``switched/choice``: the number of the candidate in use, whose exchanges are those above, in their order;
        - ``density/level``, ``density/selection_error``: those of a moving density;
        - ``replicas/staleness``, ``replicas/dropped``, ``replicas/spread``: see :func:`gradcomp_jax.staleness`; updates
          of all replicas left out because they were not finite; see :func:`gradcomp_jax.replica_spread`;
        - ``wire/bytes_per_step``: what one device sends in a step, from ``wire``.

        If there are several exchanges, the second is ``exchange_1``, and so on.

    Raises:
        ValueError: if there is nothing of this package in the state.
    """
    refuse_donated(state)
    found: dict[str, Any] = {}
    for name, exchange in _named("exchange", state, lambda node: isinstance(node, ExchangeState)):
        found[f"{name}/steps"] = exchange.step
        found[f"{name}/skipped"] = exchange.skipped
        if is_per_device(exchange.memory_ratio):
            found[f"{name}/memory_ratio"] = exchange.memory_ratio.value.mean()
            found[f"{name}/memory_ratio_max"] = exchange.memory_ratio.value.max()
    for name, switched in _named("switched", state, lambda node: isinstance(node, SwitchedState)):
        found[f"{name}/choice"] = switched.choice
    for name, density in _named("density", state, lambda node: isinstance(node, DensityState)):
        found[f"{name}/level"] = density.level
        found[f"{name}/selection_error"] = density.error
    for name, replicas in _named("replicas", state, lambda node: hasattr(node, "staleness")):
        found[f"{name}/staleness"] = replicas.staleness()
        if hasattr(replicas, "dropped"):
            found[f"{name}/dropped"] = replicas.dropped.value.sum()
        if spread:
            found[f"{name}/spread"] = replica_spread(state)
    if not found:
        raise ValueError(
            "there is no exchange and no method of gradcomp_jax.replicas in this state: pass the whole train state, or the"
            " optimizer's"
        )
    if wire is not None:
        found["wire/bytes_per_step"] = wire.sent
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def _named(name: str, state: Any, is_node: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Returns the nodes of a state, including nodes within others, each with its name."""
    return [(f"{name}_{number}" if number else name, node) for number, node in enumerate(nodes_within(state, is_node))]
