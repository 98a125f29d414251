"""An optimizer for the tensors that an exchange sends dense, where the exchange itself makes the updates of the others."""

from typing import Any, NamedTuple

import jax
import optax

from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.exchange import exchange
from gradcomp_jax.core.layout_rules import layout_rules
from gradcomp_jax.core.masks import Mask
from gradcomp_jax.core.placeholders import not_of_params
from gradcomp_jax.core.policies import Policy
from gradcomp_jax.transforms.skipping import keep_if, took_place


class OnDenseState(NamedTuple):
    """Holds the state of :func:`on_dense`.

    Attributes:
        exchange: the exchange's state.
        optimizer: the optimizer's state, equal on every worker.
    """

    exchange: Any
    optimizer: Any


def on_dense(
    policy: Policy, optimizer: optax.GradientTransformation, *, mask: Mask | None = None, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns an exchange by a policy, with an optimizer for the means of the leaves that go dense.

    A skipped exchange leaves the optimizer as it was, and its update is zero.

    Args:
        policy: which compressor for which leaf.
        optimizer: optimizer of the leaves that go dense. It sees their means, equal on every worker.
        mask: see :func:`gradcomp_jax.exchange`.
        options: other options of the exchange.
    """
    exchanged = exchange(policy, mask=mask, **options)
    rules = layout_rules(policy, mask=mask)

    def dense(tree: PyTree) -> PyTree:
        *compressed, _ = rules.layout(tree).groups
        taken = {i for _, segments in compressed for s in segments for i in s.leaves}
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, [i not in taken for i in range(len(leaves))])

    rest = optax.with_extra_args_support(optax.masked(optimizer, dense))
    # The optimizer's moments lack the leaves that are compressed, so no tree of the parameters' structure fits them.
    init_rest = not_of_params(rest.init)

    def init(params: PyTree) -> OnDenseState:
        return OnDenseState(exchanged.init(params), init_rest(params))

    def update(updates: PyTree, state: OnDenseState, params: PyTree | None = None, **extra: Any) -> Any:
        means, inner = exchanged.update(updates, state.exchange, params, **extra)
        if context_of(extra).describes:
            return means, state
        stepped, after = rest.update(means, state.optimizer, params, **extra)
        ok = took_place(state.exchange, inner)
        # The means of a skipped exchange are zeros.
        return keep_if(ok, stepped, means), OnDenseState(inner, keep_if(ok, after, state.optimizer))

    return optax.GradientTransformationExtraArgs(init, update)
