"""Replicas that average with one partner at a time."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat, _registered, kernels
from gradcomp_jax._counters import count_on
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import Workers, permute
from gradcomp_jax.compressors import Compressor, RowInfo, dense
from gradcomp_jax.core.changed import only_of
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.replicas import nonfinite
from gradcomp_jax.replicas.branching import advance, each_nth, one_of
from gradcomp_jax.transforms.participation import refuse_weight

Graph = Literal["hypercube", "exponential"]


@_registered.node
@dataclasses.dataclass(frozen=True)
class GossipState(nonfinite.ReplicaState):
    """Holds the state of :func:`gossip`: a :class:`ReplicaState`."""

    def staleness(self) -> Array:
        """Returns how many steps a replica has taken since it last met a partner: int32 scalar."""
        return self.step % self.every


@_arguments.checked
def gossip(
    *,
    axis_name: AxisName,
    every: int = 1,
    graph: Graph = "hypercube",
    compressor: Compressor | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes each replica the mean of itself and one partner, a different one each time.

    With :math:`x_i` after the optimizer's step and :math:`\pi` the partners' permutation of this turn,

    .. math:: x_i \leftarrow x_i + \tfrac12 \left( \hat x_{\pi(i)} - \hat x_i \right),

    where :math:`\hat x` is what crossed: :math:`x` itself, or what a quantizer made of it. Because each worker is one other
    worker's partner, the sum of the replicas is preserved, even if the quantizer loses something. Partners are, in turns,
    the workers whose numbers differ in one bit (``hypercube``; the number of workers is a power of two, and after
    :math:`\log_2 N` turns without steps all are equal), or those :math:`1, 2, 4, \dots` places further on (``exponential``; any
    number of workers).

    It goes after the optimizer. Replicas differ: build the state with ``gc.init_state(..., replicas=True)``. Wire: one payload
    every ``every`` steps, to one worker, in one ``ppermute``: the latency of a single message.

    An update that is not finite is left out: the replica does not move.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), gc.gossip(axis_name="data", graph="exponential"))
        >>> state = gc.init_state(params, tx, mesh, replicas=True)
        >>> float(gc.replica_spread(state))  # replicas start equal
        0.0

    Args:
        axis_name: the axis.
        every: steps from one turn to the next.
        graph: which workers are partners.
        compressor: compressor of the parameters, neither a sparsifier nor one with side information; float32 by default.
        key: seed (int) or typed JAX key of the compressor's randomness.

    Returns:
        A transformation of the optimizer's updates. Its own are each replica's.

    Raises:
        ValueError: for an unknown graph, a compressor that does not fit; when traced, for a hypercube of a number of
            workers that is not a power of two, or without parameters.

    References:
        Jin et al., 2016, https://arxiv.org/abs/1611.04581, section 3 (gossiping SGD); Assran et al., 2019,
        https://arxiv.org/abs/1811.10792, appendix A (the exponential graph).
    """
    every = _checks.positive_int("every", every)
    _checks.one_of("graph", graph, get_args(Graph))
    code = dense() if compressor is None else compressor
    if code.is_sparsifier or code.side_information or code.init((code.block,)) != ():
        raise ValueError(
            f"gossip sends parameters to one worker, and {type(code).__name__} selects entries or needs what all workers"
            " know; use dense() or block_quantized()"
        )

    def init(params: PyTree) -> GossipState:
        return GossipState(jnp.zeros((), jnp.int32), nonfinite.counter(axis_name), every)

    def update(updates: PyTree, state: GossipState, params: PyTree | None = None, **extra: Any) -> Any:
        nonfinite.need_replicas(params, axis_name, "gossip")
        refuse_weight(extra, "gossip", "two workers meet half way")
        turns = permutations(graph, _compat.axis_size(axis_name) or 1)
        own, ok = nonfinite.steady(updates, params)

        def meet(own: PyTree) -> tuple[PyTree]:
            here = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, own)
            keys = StepKeys.of(key, state.step, Workers.along(axis_name).index, None)
            leaves, treedef = jax.tree.flatten(here)
            of_leaves = keys.of_leaves(keys.own, range(len(leaves)))
            payloads = [_encode(code, x, k) for x, k in zip(leaves, of_leaves, strict=True)]
            flat, payload_tree = jax.tree.flatten(payloads)
            turn = (state.step // every) % len(turns)
            came = one_of(turn, [lambda *a, to=to: tuple(permute(a, to, axis_name)) for to in turns], *flat)
            theirs = jax.tree.unflatten(payload_tree, came)
            pulled = [
                0.5 * (_decode(code, t, x) - _decode(code, m, x))
                for t, m, x in zip(theirs, payloads, leaves, strict=True)
            ]
            return (jax.tree.map(jnp.add, own, jax.tree.unflatten(treedef, pulled)),)

        (own,) = advance(each_nth(state.step, every), meet, (own,)) if turns else (own,)
        step = count_on(state.step, cycle=every * max(1, len(turns)))
        return nonfinite.like(own, updates), GossipState(step, nonfinite.count(state.dropped, ok), every)

    return optax.GradientTransformationExtraArgs(init, only_of(GossipState, update))


def permutations(graph: Graph, workers: int) -> list[list[int]]:
    """Lists the worker that each worker sends to, turn after turn; an empty list for one worker.

    Raises:
        ValueError: for a hypercube of a number of workers that is not a power of two.
    """
    reach = [1 << r for r in range((workers - 1).bit_length())]
    if graph == "exponential":
        return [[(i + d) % workers for i in range(workers)] for d in reach]
    if workers & (workers - 1):
        raise ValueError(f"a hypercube needs a power of two of workers, got {workers}; use graph='exponential'")
    return [[i ^ d for i in range(workers)] for d in reach]


def _encode(code: Compressor, x: Array, key: Array) -> Any:
    rows = kernels.as_rows(x, code.block)
    return code.encode(rows, (), RowInfo(kernels.valid_counts(x.size, code.block), key))[0]


def _decode(code: Compressor, payload: Any, like: Array) -> Array:
    return kernels.from_rows(code.decode(payload, RowInfo()), like.shape, jnp.float32)
