"""Payloads across an axis, in at most three collectives whatever the number of tensors and compressors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import fused
from gradcomp_jax.collectives.routes import Remainder, Route
from gradcomp_jax.compressors import Compressor

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What one compressor sends.

    Attributes:
        compressor: which encoded it.
        route: resolved, not ``auto``.
        remainder: see :class:`~gradcomp_jax.collectives.routes.Route`; ``None`` where nothing is lost.
        payload: leaves ``[rows, ...]``.
        count: int32 ``[rows]``, valid entries of each row.
        shared: float32 ``[rows]``, the statistic that the workers share, or ``None``.
        key: typed JAX key for the second encoding; differs by worker.
        server: float32 ``[ceil(rows / N), block]``, the owner's residual, or ``None``.
    """

    compressor: Compressor
    route: Route
    remainder: Remainder | None
    payload: Any
    count: Array
    shared: Array | None
    key: Array
    server: Array | None

    @property
    def rows(self) -> int:
        """Rows of the payload."""
        return self.count.shape[0]


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What every worker holds afterwards.

    Attributes:
        mean: rows ``[a, b)`` of the mean, float32 ``[b - a, block]``, equal on every worker.
        rounding: what this worker's share of the mean lost to rounding, times N, in rows ``[a, b)``; for ``put_back``.
        server: the owner's new residual.
    """

    mean: Callable[[Span], Array]
    rounding: Callable[[Span], Array] | None = None
    server: Array | None = None


def _rows(tree: Any, span: Span, axis: int = 0) -> Any:
    return jax.tree.map(lambda a: lax.slice_in_dim(a, *span, axis=axis), tree)


def _pad_rows(a: Array, rows: int) -> Array:
    return jnp.pad(a, [(0, rows - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) if rows != a.shape[0] else a


@dataclasses.dataclass(frozen=True)
class _Owned:
    """An owner's share between the two phases: the encoded mean, and what encoding took from it."""

    back: Compressor
    payload: Any
    rounding: Any
    server: Array | None


def _own(parcel: Parcel, received: Any, workers: int, index: Array) -> _Owned:
    """Reduces the payloads of my rows, encodes their mean and accounts for the loss."""
    share = -(-parcel.rows // workers)

    def mine(a: Array) -> Array:
        return lax.dynamic_slice_in_dim(_pad_rows(a, share * workers), index * share, share)

    shared = None if parcel.shared is None else mine(parcel.shared)
    mean = parcel.compressor.reduce(received, shared=shared) / workers
    if parcel.server is not None:
        mean = mean + parcel.server
    back = parcel.compressor.back(workers)
    state = back.init(mean.shape)
    payload, _ = back.encode(mean, state, parcel.key, count=mine(parcel.count), shared=shared)
    if parcel.remainder == "server":
        return _Owned(back, payload, None, mean - back.decode(payload, shared=shared))
    if parcel.remainder == "put_back":
        if back.selects:
            rounding = back.rounding(mean, payload)
        else:
            decoded = back.decode(payload, shared=shared)
            rounding = jnp.where(decoded != 0, mean - decoded, 0.0)
        return _Owned(back, payload, jax.tree.map(lambda a: _place(a, index, workers), rounding), None)
    return _Owned(back, payload, None, None)


def _place(a: Array, index: Array, workers: int) -> Array:
    """My share's rows among zeros for everybody else's."""
    zeros = jnp.zeros((a.shape[0] * workers, *a.shape[1:]), a.dtype)
    start = (index * a.shape[0],) + (jnp.zeros((), index.dtype),) * (a.ndim - 1)
    return lax.dynamic_update_slice(zeros, a, start)


def cross(parcels: Sequence[Parcel], bad: Array, *, axis_name: AxisName | None) -> tuple[list[Delivery], Array]:
    """Takes every parcel across the axis: all-to-all, then all-gather, then all-reduce, each at most once.

    Args:
        parcels: what this worker sends.
        bad: boolean scalar, whether this worker's gradient is unusable. It rides in the last collective, so that
            the workers' common decision costs no message of its own.
        axis_name: the axis, or ``None`` for one worker.

    Returns:
        One delivery for each parcel, and a boolean scalar, equal on every worker: whether no gradient was bad.
    """
    workers = _compat.axis_size(axis_name) or 1
    index = _compat.axis_index(axis_name)

    two_phase = [p for p in parcels if p.route.kind == "two_phase"]
    split = [jax.tree.flatten(_by_owner(p, workers)) for p in two_phase]
    arrived = iter(fused.all_to_all([a for leaves, _ in split for a in leaves], axis_name))
    owned = {
        id(p): _own(p, jax.tree.unflatten(treedef, [next(arrived) for _ in leaves]), workers, index)
        for p, (leaves, treedef) in zip(two_phase, split, strict=True)
    }

    outgoing = [owned[id(p)].payload if id(p) in owned else p.payload for p in parcels]
    flat = [jax.tree.flatten(o) for o in outgoing]
    gathers = [p.route.kind != "sum" for p in parcels]
    to_gather = [a for (leaves, _), g in zip(flat, gathers, strict=True) if g for a in leaves]
    to_add = [a for (leaves, _), g in zip(flat, gathers, strict=True) if not g for a in leaves]
    if to_gather:
        carrier = min(to_gather, key=lambda a: a.dtype.itemsize).dtype
        unsigned = jnp.dtype(f"uint{8 * carrier.itemsize}")
        *gathered, flags = fused.all_gather([*to_gather, bad.astype(unsigned)], axis_name)
        added = fused.psum(to_add, axis_name)
        ok = jnp.max(flags) == 0
    else:
        carrier = to_add[0].dtype if to_add else jnp.dtype(jnp.float32)
        *added, flags = fused.psum([*to_add, bad.astype(carrier)], axis_name)
        gathered, ok = [], flags == 0
    from_gather, from_add = iter(gathered), iter(added)

    deliveries = []
    for parcel, (leaves, treedef), g in zip(parcels, flat, gathers, strict=True):
        result = jax.tree.unflatten(treedef, [next(from_gather if g else from_add) for _ in leaves])
        deliveries.append(_deliver(parcel, result, owned.get(id(parcel)), workers))
    return deliveries, ok


def _by_owner(parcel: Parcel, workers: int) -> Any:
    """Payload leaves as ``[N, share, ...]``: slice j is what worker j owns."""
    share = -(-parcel.rows // workers)
    return jax.tree.map(lambda a: _pad_rows(a, share * workers).reshape(workers, share, *a.shape[1:]), parcel.payload)


def _deliver(parcel: Parcel, result: Any, owned: _Owned | None, workers: int) -> Delivery:
    def shared(span: Span) -> Array | None:
        return None if parcel.shared is None else _rows(parcel.shared, span)

    if owned is not None:
        joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), result)
        rounding = None
        if parcel.remainder == "put_back":
            kept = owned.rounding

            def rounding(span: Span) -> Array:
                part = _rows(kept, span)
                return (owned.back.decode(part) if owned.back.selects else part) * workers

        return Delivery(
            lambda span: owned.back.decode(_rows(joined, span), shared=shared(span)), rounding, owned.server
        )
    if parcel.route.kind == "gather":
        return Delivery(
            lambda span: parcel.compressor.reduce(_rows(result, span, axis=1), shared=shared(span)) / workers
        )
    return Delivery(lambda span: parcel.compressor.decode(_rows(result, span), shared=shared(span)) / workers)
