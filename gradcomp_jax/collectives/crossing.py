"""Payloads across an axis, in at most three collectives whatever the number of tensors and compressors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.collectives import fused, order, routes
from gradcomp_jax.collectives.routes import Remainder, Route
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.base import largest_of

Span = tuple[int, int]

Laid = tuple[kernels.Deal, int] | None
"""How rows that were dealt out are wanted: the deal, and the width of the matrix that its vector is seen as."""


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
        server: float32 ``[ceil(rows / N), block]``, the owner's residual, or ``None``. With one, owners take rows in turn;
            otherwise each owns as many that follow one another.
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
        mean: rows ``[a, b)`` of the mean, float32 ``[b - a, block]``, equal on every worker; with a :data:`Laid`, the
            vector that was dealt out over them. Decoded anew for each use that names another thing to wait for: an array
            that several passes share would be held.
        rounding: what this worker's share of the mean lost to rounding, times N, likewise; for ``put_back``.
        settled: what does not come back of a payload of this worker's, of rows ``[a, b)``; for ``settle``.
        drops: whether an entry that is zero in the mean was not kept; else a zero is a number like any other.
        server: the owner's new residual.
        payload: rows ``[a, b)`` of the mean of the payloads themselves, where they were added.
    """

    mean: Callable[[Span, Laid, Any], Array]
    rounding: Callable[[Span, Laid], Array] | None = None
    settled: Callable[[Any, Span], Any] | None = None
    drops: bool = False
    server: Array | None = None
    payload: Callable[[Span], Any] | None = None


def _rows(tree: Any, span: Span, axis: int = 0) -> Any:
    return jax.tree.map(lambda a: lax.slice_in_dim(a, *span, axis=axis), tree)


def _pad_rows(a: Array, rows: int) -> Array:
    return jnp.pad(a, [(0, rows - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) if rows != a.shape[0] else a


@dataclasses.dataclass(frozen=True)
class _Owned:
    """An owner's share between the two phases: its mean, and how that goes back, with what encoding takes from it.

    ``back`` and ``payload`` are ``None`` where nothing goes back. ``bad``: whether what goes back is unusable.
    """

    mean: Array
    bad: Array
    back: Compressor | None = None
    payload: Any = None
    rounding: Any = None
    server: Array | None = None


def _own(parcel: Parcel, received: Any, workers: int, index: Array) -> _Owned:
    """Reduces the payloads of my rows, encodes their mean for the others and accounts for the loss."""

    def mine(a: Array) -> Array:
        # By the owner's number: that of its first row may be more than an index holds.
        return lax.dynamic_index_in_dim(_by_owner(parcel, a, workers), index, keepdims=False)

    shared, count = None if parcel.shared is None else mine(parcel.shared), mine(parcel.count)
    back = None if parcel.route.kind == "reduce_scatter" else parcel.compressor.back(workers)
    mean = parcel.compressor.reduce(received, shared=shared) / workers
    if parcel.server is not None:
        mean = mean + parcel.server

    def clear(rows: Array) -> Array:
        """Without what a code leaves in the padding."""
        fills = parcel.compressor.fills or (back is not None and back.fills)
        return jnp.where(kernels.valid_mask(count, rows.shape[1]), rows, 0.0) if fills else rows

    mean = clear(mean)
    if back is None:
        return _Owned(mean, jnp.array(False))
    payload, _ = back.encode(mean, back.init(mean.shape), parcel.key, count=count, shared=shared)
    # Every payload that came was checked by its sender; an owner's residual is in nobody's.
    bad = ~back.finite(payload, None, largest_of(workers))
    if parcel.remainder == "server":
        return _Owned(mean, bad, back, payload, server=clear(mean - back.decode(payload, shared=shared)))
    if parcel.remainder == "settle":
        # What each worker takes back, it works out from its own payload and the mean alone, and so does the owner for all.
        settled = parcel.compressor.reduce(parcel.compressor.settled(received, payload)) / workers
        assert parcel.server is not None, "who settles has a residual"
        return _Owned(mean, bad, back, payload, server=parcel.server + settled - back.decode(payload))
    if parcel.remainder == "put_back":
        if back.selects:
            rounding = back.rounding(mean, payload, shared=shared)
        else:
            rounding = mean - clear(back.decode(payload, shared=shared))
        return _Owned(mean, bad, back, payload, jax.tree.map(lambda a: _place(a, index, workers), rounding))
    return _Owned(mean, bad, back, payload)


def _place(a: Array, index: Array, workers: int) -> Array:
    """My share's rows among zeros for everybody else's."""
    rows, *rest = a.shape
    if rows * workers < 2**31:
        # In place: with a dimension of owners, TPU's tiles would be filled up and every row copied.
        zeros = jnp.zeros((rows * workers, *rest), a.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, a, index * rows, 0)
    # The number of a row is more than an index holds, an owner's is not.
    zeros = jnp.zeros((workers, *a.shape), a.dtype)
    return lax.dynamic_update_index_in_dim(zeros, a, index, 0).reshape(-1, *rest)


class Arrived(NamedTuple):
    """What has come in: ``owners``, by all-to-all, and ``everyone``, by all-gather and all-reduce."""

    owners: Sequence[Array] = ()
    everyone: Sequence[Array] = ()


def cross(
    parcels: Sequence[Parcel], bad: Array, *, axis_name: AxisName | None, after: Arrived | None = None
) -> tuple[list[Delivery], Array, Arrived]:
    """Takes every parcel across the axis: all-to-all, then all-gather, then all-reduce, each at most once.

    Args:
        parcels: what this worker sends.
        bad: boolean scalar, whether this worker's gradient is unusable. It rides in the last collective, so that
            the workers' common decision costs no message of its own.
        axis_name: the axis, or ``None`` for one worker.
        after: what has to have come in before each of these collectives starts, of an earlier crossing. A compiler that
            combines collectives would make one of both, which waits for what the later one is made of.

    Returns:
        One delivery for each parcel; a boolean scalar, equal on every worker: whether no gradient was bad; and what came in.
    """
    after = after or Arrived()
    workers = _compat.axis_size(axis_name) or 1
    index = _compat.axis_index(axis_name)

    delivered = _doubled([p for p in parcels if p.route.kind == "doubling"], workers, index, axis_name)
    by_owner = [p for p in parcels if p.route.kind in ("two_phase", "reduce_scatter")]
    split = [jax.tree.flatten(jax.tree.map(lambda a, p=p: _by_owner(p, a, workers), p.payload)) for p in by_owner]
    came = fused.all_to_all(order.wait([a for leaves, _ in split for a in leaves], after.owners), axis_name)
    arrived = iter(came)
    owned = {
        id(p): _own(p, jax.tree.unflatten(treedef, [next(arrived) for _ in leaves]), workers, index)
        for p, (leaves, treedef) in zip(by_owner, split, strict=True)
    }
    delivered |= {key: _of_share(o.mean) for key, o in owned.items() if o.back is None}
    bad = jnp.stack([bad, *(o.bad for o in owned.values())]).any()

    left = [p for p in parcels if id(p) not in delivered]
    outgoing = [owned[id(p)].payload if id(p) in owned else p.payload for p in left]
    flat = [jax.tree.flatten(o) for o in outgoing]
    gathers = [p.route.kind != "sum" for p in left]
    to_gather = [a for (leaves, _), g in zip(flat, gathers, strict=True) if g for a in leaves]
    to_add = [a for (leaves, _), g in zip(flat, gathers, strict=True) if not g for a in leaves]
    to_gather, to_add = order.wait(to_gather, after.everyone), order.wait(to_add, after.everyone)
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

    results = {
        id(p): jax.tree.unflatten(treedef, [next(from_gather if g else from_add) for _ in leaves])
        for p, (leaves, treedef), g in zip(left, flat, gathers, strict=True)
    }
    delivered |= {id(p): _deliver(p, results[id(p)], owned.get(id(p)), workers) for p in left}
    return [delivered[id(p)] for p in parcels], ok, Arrived(came, [*gathered, *added])


def _doubled(chosen: Sequence[Parcel], workers: int, index: Array, axis_name: AxisName | None) -> dict[int, Delivery]:
    """By identity of the parcel, what recursive doubling delivers: the sum of all workers' rows.

    What two groups have is joined in the groups' order, not mine first, and sums are of two numbers: so every worker
    adds in the same order and gets the same bits.
    """
    held: list[Any] = [jax.tree.map(lambda a: a[None], p.payload) for p in chosen]
    whole = [False] * len(chosen)
    for have in routes.rounds(workers) if chosen else []:
        for j, p in enumerate(chosen):
            if not whole[j] and routes.dense_is_less(p.compressor, have):
                held[j], whole[j] = p.compressor.reduce(held[j], shared=p.shared), True
        flat = [jax.tree.flatten(h) for h in held]
        partner = [i ^ have for i in range(workers)]
        came = iter(fused.permute([a for leaves, _ in flat for a in leaves], partner, axis_name))
        upper = (index & have) != 0
        for j, (leaves, treedef) in enumerate(flat):
            theirs = [next(came) for _ in leaves]
            if whole[j]:
                held[j] = leaves[0] + theirs[0]
            else:
                pairs = [
                    jnp.concatenate([jnp.where(upper, b, a), jnp.where(upper, a, b)])
                    for a, b in zip(leaves, theirs, strict=True)
                ]
                held[j] = jax.tree.unflatten(treedef, pairs)
    sums = [h if w else p.compressor.reduce(h, shared=p.shared) for p, h, w in zip(chosen, held, whole, strict=True)]
    return {id(p): _of_sum(_compat.invarying(s, axis_name), workers) for p, s in zip(chosen, sums, strict=True)}


def _by_owner(parcel: Parcel, a: Array, workers: int) -> Array:
    """Rows ``[rows, ...]`` as ``[N, share, ...]``: slice j is what worker j owns."""
    share = -(-parcel.rows // workers)
    padded = _pad_rows(a, share * workers)
    if parcel.server is None:
        return padded.reshape(workers, share, *a.shape[1:])
    return jnp.swapaxes(padded.reshape(share, workers, *a.shape[1:]), 0, 1)


def _by_row(parcel: Parcel, a: Array) -> Array:
    """Inverse of :func:`_by_owner`, but for the padding."""
    return (a if parcel.server is None else jnp.swapaxes(a, 0, 1)).reshape(-1, *a.shape[2:])


def _of_sum(total: Array, workers: int) -> Delivery:
    return Delivery(lambda span, laid, _: _lay(_rows(total, span), laid) / workers)


def _of_share(mean: Array) -> Delivery:
    return Delivery(lambda span, laid, _: _lay(_rows(mean, span), laid))


def _lay(rows: Array, laid: Laid) -> Array:
    return rows if laid is None else laid[0].flat(rows).reshape(-1, laid[1])


def anew(code: Compressor, payload: Any, laid: Laid, after: Any) -> Any:
    """A payload that is decoded anew for each use if it was dealt out: an array that several passes share would be held."""
    return lax.optimization_barrier((payload, after))[0] if laid and code.decodes_anew else payload


def _decode(code: Compressor, payload: Any, shared: Array | None, laid: Laid) -> Array:
    return code.decode(payload, shared=shared) if laid is None else code.decode_dealt(payload, *laid, shared=shared)


def _reduce(code: Compressor, payloads: Any, shared: Array | None, laid: Laid) -> Array:
    return code.reduce(payloads, shared=shared) if laid is None else code.reduce_dealt(payloads, *laid, shared=shared)


def _deliver(parcel: Parcel, result: Any, owned: _Owned | None, workers: int) -> Delivery:
    def shared(span: Span) -> Array | None:
        return None if parcel.shared is None else _rows(parcel.shared, span)

    if owned is not None and owned.back is not None:
        back = owned.back
        joined = jax.tree.map(lambda a: _by_row(parcel, a), result)
        rounding = None
        if parcel.remainder == "put_back":
            kept = owned.rounding

            def rounding(span: Span, laid: Laid) -> Array:
                part = _rows(kept, span)
                return (_decode(back, part, shared(span), laid) if back.selects else _lay(part, laid)) * workers

        def settled(payload: Any, span: Span) -> Any:
            return parcel.compressor.settled(payload, _rows(joined, span))

        return Delivery(
            lambda span, laid, after: _decode(back, anew(back, _rows(joined, span), laid, after), shared(span), laid),
            rounding,
            settled if parcel.remainder == "settle" else None,
            drops=back.drops,
            server=owned.server,
        )
    if parcel.route.kind == "gather":
        return Delivery(
            lambda span, laid, after: (
                _reduce(
                    parcel.compressor,
                    anew(parcel.compressor, _rows(result, span, axis=1), laid, after),
                    shared(span),
                    laid,
                )
                / workers
            )
        )

    def mean_payload(span: Span) -> Any:
        return jax.tree.map(lambda a: a / workers, _rows(result, span))

    # Whoever needs the mean payload needs it in floating point: the sums of an integer code are not divided in place.
    return Delivery(
        lambda span, laid, _: _decode(parcel.compressor, _rows(result, span), shared(span), laid) / workers,
        payload=mean_payload,
    )
