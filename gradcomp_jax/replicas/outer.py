"""Local steps of each replica, and at intervals an outer step that all replicas take together from their common centre."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat, _registered
from gradcomp_jax._counters import count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.core.changed import only_of
from gradcomp_jax.core.placeholders import NotOfParams, is_placeholder
from gradcomp_jax.per_device import PerDevice, is_per_device
from gradcomp_jax.replicas import nonfinite
from gradcomp_jax.replicas.branching import advance, each_nth
from gradcomp_jax.replicas.fragments import Parts, members_of
from gradcomp_jax.transforms.skipping import keep_if, took_place


@_registered.node
@dataclasses.dataclass(frozen=True)
class OuterState(nonfinite.ReplicaState):
    """Holds the state of :func:`outer_average` and the methods made from it: a :class:`ReplicaState`.

    Attributes:
        centre: the replicas' common parameters after the last outer step, float32, equal on every worker.
        outer: for each part of the tree, state of the outer optimizer; the part whose turn ends the period comes first.
        method: for each part of the tree, state of the exchange.
        flying: for each part of the tree, how far this replica had moved at the part's turn, ``PerDevice`` float32
            ``[1, *shape]``, and zeros once the mean has arrived; ``()`` without a delay.
        delay: steps from a part's turn to the arrival of its mean, as configured.
    """

    centre: PyTree
    outer: tuple
    method: tuple
    flying: tuple = ()
    delay: int = dataclasses.field(default=0, metadata={"static": True})

    def staleness(self) -> Array:
        """Returns a replica's steps since the last outer step of the part that waits longest: int32 scalar."""
        parts = len(self.method)
        since = [(self.step + offset_of(j, parts, self.every) - self.delay) % self.every for j in range(parts)]
        return jnp.minimum(self.step, jnp.stack(since).max() + self.delay)


@_arguments.checked
def outer_average(
    method: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    *,
    axis_name: AxisName | None,
    every: int,
    parts: Parts = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes local steps, and every ``every`` steps an outer step along the mean of the replicas' moves.

    :math:`c` is the replicas' centre after the last outer step, and :math:`x_i` are the parameters of replica i after
    :math:`H` local steps. The outer gradient is :math:`\Delta = \frac1N \sum_i (c - x_i)`. An outer optimizer makes a step from
    it, and all replicas continue from the new centre:

    .. math:: c \leftarrow c + \mathrm{outer}(\Delta), \qquad x_i \leftarrow c.

    The :math:`c - x_i` cross by any exchange; what a method does not send stays in its memory and is part of the next
    outer gradient. It goes after the inner optimizer, whose state is each replica's own: ``optax.chain(optax.adamw(1e-3),
    gc.outer_average(gc.dense(axis_name="data"), optax.sgd(0.7, 0.9, nesterov=True), axis_name="data", every=100))``.

    With ``parts`` the tree is cut into that many parts of about equal size, or into the layers that
    :func:`gradcomp_jax.fragments` names. Each part has its turn once in ``every`` steps: the bytes are the same, spread over
    the period (streaming). Turns depend only on the number of the step, which is the same on all workers.

    With ``delay`` :math:`\tau` a part's :math:`c - x_i` is taken at its turn, and its mean arrives :math:`\tau` steps later,
    while the replicas continue: the exchange needs nothing of the step that it is in. Each replica then keeps a share ``mix``
    :math:`\alpha` of its present parameters: :math:`x_i \leftarrow \alpha x_i + (1 - \alpha) c`.

    Replicas differ: build the state with ``gc.init_state(..., replicas=True)``. State: :class:`OuterState`. Wire: the
    method's, once for each part in ``every`` steps. An update that is not finite is left out: the replica does not move.

    Replicas may have different weights in an outer step, and some may be absent: put :func:`gradcomp_jax.weighted` around the
    method, and call ``update(..., weight=...)``; the weight is read in the step in which a mean is exchanged. A replica of
    weight 0 continues from :math:`c` like all others, and its moves since the last outer step are in no mean. Where all weights
    are 0 there is no outer step: replicas continue, and their moves are part of the next outer step.

    A replica reaches :math:`c` as its parameters plus an update: up to one rounding of each parameter, and exactly where
    no parameter has more than doubled or halved since the last outer step.

    Example:
        >>> outer = optax.sgd(0.7, 0.9, nesterov=True)
        >>> average = gc.outer_average(gc.dense(axis_name="data"), outer, axis_name="data", every=100)
        >>> state = gc.init_state(params, optax.chain(optax.adamw(1e-3), average), mesh, replicas=True)
        >>> int(gc.staleness(state))  # before the first step
        0

    Args:
        method: an exchange, such as ``gc.dense(...)``.
        optimizer: the outer optimizer; it sees :math:`\Delta` as its gradient and :math:`c` as its parameters.
        axis_name: the method's axis.
        every: steps :math:`H` from one outer step to the next.
        parts: parts of the tree, at most ``every``: their number, or a function of the parameters that returns the number of
            each leaf's part, from 0 on, in the order of their turns.
        delay: steps :math:`\tau` from a part's turn to the arrival of its mean, fewer than ``every``.
        mix: :math:`\alpha`, a replica's own share in the parameters that it continues from, in [0, 1).

    Returns:
        A transformation of the inner optimizer's updates. Its own are each replica's.

    Raises:
        ValueError: for a period below 1, too many parts, a delay of a period or more, and a share outside [0, 1); when traced,
            without parameters, and for a method that decays weights: what crosses is not a gradient.

    References:
        Douillard et al., 2023, DiLoCo, https://arxiv.org/abs/2311.08105, algorithm 1; Douillard et al., 2025, Streaming
        DiLoCo, https://arxiv.org/abs/2501.18512, sections 2.2 and 2.3.
    """
    every = _checks.positive_int("every", every)
    if not callable(parts):
        parts = _checks.positive_int("parts", parts)
        _at_most(every, parts)
    delay = _checks.non_negative_int("delay", delay)
    if delay >= every:
        raise ValueError(
            f"delay must be below every={every}, so that a part has arrived before its next turn, got {delay}"
        )
    _checks.below_one("mix", mix)
    exchange = optax.with_extra_args_support(method)
    outer = optax.with_extra_args_support(optimizer)

    not_of_params = NotOfParams()

    def begun(centre: PyTree, outers: Any, methods: Any, flying: Any) -> OuterState:
        step, dropped = jnp.zeros((), jnp.int32), nonfinite.counter(axis_name)
        return OuterState(step, dropped, every, centre, outers, methods, flying, delay)

    def init(params: PyTree) -> OuterState:
        if is_placeholder(params):
            return begun(params, *(not_of_params.leaves() or (0, 0, 0 if delay else ())))
        centre = _compat.invarying(nonfinite.or_zeros(params)[0], axis_name)
        divided = members_of(parts, centre)
        _at_most(every, len(divided))
        pieces = [only(centre, members) for members in divided]
        outers, methods = (tuple(tx.init(piece) for piece in pieces) for tx in (outer, exchange))
        flying = tuple(jax.tree.map(nothing, piece) for piece in pieces) if delay else ()
        return begun(centre, *not_of_params.seen((outers, methods, flying)))

    def nothing(centre: Array) -> PerDevice:
        return PerDevice(_compat.varying(jnp.zeros((1, *centre.shape), jnp.float32), axis_name), 1)

    def update(updates: PyTree, state: OuterState, params: PyTree | None = None, **extra: Any) -> Any:
        nonfinite.need_replicas(params, axis_name, "outer_average")
        own, ok = nonfinite.steady(updates, params)
        (own_leaves, treedef), centre_leaves = jax.tree.flatten(own), jax.tree.leaves(state.centre)
        outers, methods, flying = list(state.outer), list(state.method), list(state.flying)
        weighed = extra.get("weight") is not None

        def outer_gradient(own: PyTree, centre: PyTree, here: PyTree) -> PyTree:
            return jax.tree.map(lambda c, p, u: c - (p.astype(jnp.float32) + u), centre, here, own)

        def apply_outer(gradient: PyTree, centre: PyTree, outer_state: Any, inner: Any) -> tuple:
            mean, after = exchange.update(gradient, inner, None, **extra)
            step, moved = outer.update(mean, outer_state, centre)
            there = jax.tree.map(jnp.add, centre, step)
            if not weighed:
                return there, moved, after
            return *keep_if(took_place(inner, after), (there, moved), (centre, outer_state)), after

        def together(own: PyTree, centre: PyTree, outer_state: Any, inner: Any, here: PyTree) -> tuple:
            centre, outer_state, after = apply_outer(outer_gradient(own, centre, here), centre, outer_state, inner)
            moved = to_centre(own, centre, here)
            moved = keep_if(took_place(inner, after), moved, (own,)) if weighed else moved
            return *moved, centre, outer_state, after

        def to_centre(own: PyTree, centre: PyTree, here: PyTree) -> tuple[PyTree]:
            def to(c: Array, p: Array, u: Array) -> Array:
                towards = c - p.astype(jnp.float32)
                return towards if mix == 0 else mix * u + (1 - mix) * towards

            return (jax.tree.map(to, centre, here, own),)

        def depart(_: PyTree, own: PyTree, centre: PyTree, here: PyTree) -> tuple[PyTree]:
            return (jax.tree.map(lambda d: PerDevice(d[None], 1), outer_gradient(own, centre, here)),)

        def land(flying: PyTree, centre: PyTree, outer_state: Any, inner: Any) -> tuple:
            gradient = jax.tree.map(lambda mark: mark.value[0], flying, is_leaf=is_per_device)
            # Zeros replace what has arrived. So a compiler sees that the exchange reads what the loop changes, and stays in it.
            return jax.tree.map(jnp.zeros_like, flying), *apply_outer(gradient, centre, outer_state, inner)

        divided = members_of(parts, params)
        for j, members in enumerate(divided):
            moved, centre, here = (only(tree, members) for tree in (own, state.centre, params))
            offset = offset_of(j, len(divided), every)
            now = each_nth(state.step, every, offset)
            if delay:
                # The exchange reads nothing of this step's update.
                arrived = each_nth(state.step, every, offset - delay) & (state.step >= every - 1 - offset + delay)
                sent = (flying[j], centre, outers[j], methods[j])
                flying[j], centre, outers[j], methods[j] = advance(arrived, land, sent)
                arrived = arrived & took_place(sent[-1], methods[j]) if weighed else arrived
                (moved,) = advance(arrived, to_centre, (moved,), centre, here)
                (flying[j],) = advance(now, depart, (flying[j],), moved, centre, here)
            else:
                carried = (moved, centre, outers[j], methods[j])
                moved, centre, outers[j], methods[j] = advance(now, together, carried, here)
            for i, u, c in zip(members, jax.tree.leaves(moved), jax.tree.leaves(centre), strict=True):
                own_leaves[i], centre_leaves[i] = u, c
        dropped, centre = nonfinite.count(state.dropped, ok), jax.tree.unflatten(treedef, centre_leaves)
        step = count_on(state.step, cycle=every)
        new = OuterState(step, dropped, every, centre, tuple(outers), tuple(methods), tuple(flying), delay)
        return nonfinite.like(jax.tree.unflatten(treedef, own_leaves), updates), new

    return optax.GradientTransformationExtraArgs(init, only_of(OuterState, update))


def _at_most(every: int, parts: int) -> None:
    if parts > every:
        raise ValueError(f"parts must be at most every={every}, so that each has a step of its own, got {parts}")


def offset_of(part: int, parts: int, every: int) -> int:
    """Returns how many steps a part's turn comes before that of the first part."""
    return part * every // parts


def only(tree: PyTree, members: Sequence[int]) -> PyTree:
    """Returns the tree with only some of its leaves, under their own paths."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = set(members)
    return jax.tree.unflatten(treedef, [x if i in chosen else optax.MaskedNode() for i, x in enumerate(leaves)])


def is_masked(node: object) -> bool:
    """Returns whether a node stands for a leaf that is left out."""
    return isinstance(node, optax.MaskedNode)


@_arguments.checked
def local_sgd(
    method: optax.GradientTransformation, *, axis_name: AxisName | None, every: int
) -> optax.GradientTransformationExtraArgs:
    r"""Sets all replicas to their mean every ``every`` steps: :math:`x_i \leftarrow \frac1N \sum_j x_j`.

    It is :func:`outer_average` with an outer step of the whole distance. With ``every=1``, ``dense`` and plain SGD this is
    synchronous SGD up to the rounding of :math:`x`.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), gc.local_sgd(gc.dense(axis_name="data"), axis_name="data", every=8))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> int(gc.staleness(state))  # before the first step
        0

    Args:
        method: an exchange, such as ``gc.dense(...)``, of a replica's moves since the last exchange.
        axis_name: the method's axis.
        every: local steps :math:`\tau`.

    Returns:
        A transformation of the inner optimizer's updates. Its own are each replica's; after an outer step all replicas are
        equal.

    Raises:
        ValueError: as for :func:`outer_average`.

    References:
        McMahan et al., 2017, https://arxiv.org/abs/1602.05629; Stich, 2019, https://arxiv.org/abs/1805.09767.
    """
    return outer_average(method, optax.sgd(1.0), axis_name=axis_name, every=every)
