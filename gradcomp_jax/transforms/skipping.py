"""What follows an exchange and must know whether it took place."""

from typing import Any

import jax

from gradcomp_jax._typing import Array
from gradcomp_jax.per_device import nodes_of
from gradcomp_jax.transforms.exchange import ExchangeState


def took_place(before: Any, after: Any) -> Array:
    """Returns whether every exchange of a state went on from ``before`` to ``after``: boolean scalar, equal on all workers."""
    states = [nodes_of(s, lambda node: isinstance(node, ExchangeState)) for s in (before, after)]
    if not states[0]:
        raise ValueError("there is no exchange in this transformation: put a gradcomp_jax.exchange or a method inside")
    skipped = [b.skipped != a.skipped for b, a in zip(*states, strict=True)]
    return ~jax.numpy.stack(skipped).any()


def keep_if(ok: Array, new: Any, old: Any) -> Any:
    """Returns new values where the exchange took place, old ones where it was skipped."""
    return jax.tree.map(lambda n, o: jax.numpy.where(ok, n, o), new, old)
