"""The base class of compressors: a static pair of encode and decode over rows."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.kernels import LARGEST


def largest_of(workers: int) -> float:
    """Returns the largest magnitude that an exchange of N workers accepts: a quarter of float32's largest number, over N.

    A sum of N such numbers is finite. So is a memory afterwards, which is the target, less what was sent, plus N times
    the rounding error of an owner's mean.
    """
    return LARGEST / (4 * workers)


def largest_kept(workers: int, block: int) -> float:
    """Returns the largest magnitude that a memory keeps in a step that is skipped.

    If all entries of a block were that large, their sums, their products and the sums of N workers would still be accepted: a
    code multiplies at most by the entries of a block, and rejects entries above the limit divided by them. So what a memory
    holds never causes two skipped steps in a row.
    """
    return largest_of(workers) / (16 * block**2)


AT_ONCE = 8
"""Payloads that are decoded and added in one expression on accelerators."""


def add_up(one: Callable[[Any, Array | int], Array], payloads: Any, *, at_once: int = AT_ONCE) -> Array:
    """Returns the sum of ``one(payload, i)`` over the workers' payloads, stacked on a leading dimension.

    Memory is one dense copy for any number of workers, and the order is fixed. CPU takes one worker after the other, in a loop.
    Accelerators, where each iteration of a loop is a pass over memory, take up to ``at_once`` workers in one expression.
    """

    def of(payloads: Any, i: Array | int) -> Any:
        return one(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), payloads), i)

    def in_a_loop(payloads: Any) -> Any:
        return lax.fori_loop(1, workers, lambda i, total: total + of(payloads, i), of(payloads, 0))

    def in_groups(payloads: Any) -> Any:
        def run(first: Array | int, count: int, total: Any) -> Any:
            return functools.reduce(lambda total, i: total + of(payloads, first + i), range(count), total)

        begun = workers % at_once or at_once
        start = run(1, begun - 1, of(payloads, 0))
        if begun == workers:
            return start
        return lax.fori_loop(0, (workers - begun) // at_once, lambda g, t: run(begun + g * at_once, at_once, t), start)

    workers = jax.tree.leaves(payloads)[0].shape[0]
    return of(payloads, 0) if workers == 1 else kernels.on_cpu(in_a_loop, in_groups, payloads)


def index_dtype(block: int) -> Any:
    """Returns the narrowest unsigned dtype of a position in a row of ``block`` entries."""
    return jnp.uint8 if block <= 256 else jnp.uint16 if block <= 65536 else jnp.uint32


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


Payload = Any
"""A pytree of arrays; every leaf's leading dimension is ``rows``, with a static shape."""

SideInformation = Literal["max", "mean", "seeds", "worker_seeds"] | None


class RowInfo(NamedTuple):
    """Holds what is known of rows, or of their payload, besides the values.

    Attributes:
        count: int32 ``[rows]``, valid entries of each row; the others are padding.
        key: typed JAX key, different for every worker, tensor and step.
        statistic: what :meth:`Compressor.statistic` returned on this worker.
        side: the side information, ``[rows, ...]``: the maximum or the mean of the workers' statistics, or uint32 seeds.
        parts: what the rows are made of, where a kernel may make them.
        ok: of the mean that becomes an update: whether the step took place; where it did not, the update is zero.
    """

    count: Array | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    key: Array | None = None
    statistic: Any = None
    side: Array | None = None
    parts: kernels.Parts | None = None
    ok: Array | None = None

    def need(self, name: Literal["count", "key", "side"]) -> Array:
        """Returns the field of that name.

        Raises:
            ValueError: if it was not given.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"this compressor needs the {name} of its rows; pass info=RowInfo({name}=...)")
        return value


@dataclasses.dataclass(frozen=True)
class Compressor(abc.ABC):
    """Encodes each row of a float32 ``[rows, block]`` view of a tensor by itself.

    It is static and hashable: configuration only, no arrays. Because every payload leaf leads with ``rows``, a
    collective can split, carry and reassemble any payload without knowing its format.

    Attributes:
        block: entries of a row.
        side_information: what all workers know beyond the payload, and is not sent with it: ``max`` or ``mean``, that of
            their statistics; ``seeds``, one for each row, from step and tensor; ``worker_seeds``, different for each worker.
        summable: payloads of several workers add up, leaf by leaf, to the payload of the sum.
        most_workers: how many workers' payloads can be added before an integer could wrap; ``None`` if any number.
        is_sparsifier: a payload holds some of a row's entries, and the others decode to exactly zero.
        drops: a row's entries compete for a place in the payload; those that are too small to get one are not in it.
        deals: a block should be a sample of the whole tensor and not a stretch of it.
        decodes_anew: passes that need a dealt payload decoded should each decode it and not share an array.
        zeroes: :meth:`decode_dealt` heeds ``info.ok``: it places zeros, where others write a dense array once more.
        multiplies: decoding is matrix products.
        scales: a row decodes from its own digits and what is known of it: TPU should not do so in another layout.
        measures_largest: the statistic is the largest magnitude of each row, in which an entry that is not finite shows.
        by_entry: an entry is encoded by itself, whatever its place.
        by_row: a row is encoded by itself, without draws, a state or side information: rows of several tensors may go together.
        lossless: decoding returns the rows bit for bit.
        pads_nonzero: padding decodes to something other than zero; the caller of decode then clears it.
        unbiased: the decoded payload has the (clipped) rows as its expectation.
    """

    block: int
    side_information: ClassVar[SideInformation] = None
    summable: ClassVar[bool] = False
    most_workers: ClassVar[int | None] = None
    is_sparsifier: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    deals: ClassVar[bool] = False
    decodes_anew: ClassVar[bool] = False
    zeroes: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False
    scales: ClassVar[bool] = False
    measures_largest: ClassVar[bool] = False
    by_entry: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    pads_nonzero: ClassVar[bool] = False

    @property
    def row_shape(self) -> tuple[int, int] | None:
        """Returns the rows and columns of the matrix that a row is; ``None``, the default, if it is not a matrix."""
        return None

    @property
    def unbiased(self) -> bool:
        """Returns whether the expectation of the decoded payload is the rows; by default if it is lossless."""
        return self.lossless

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """Returns the state of one tensor of the given shape; none by default."""
        return ()

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array | None:
        """Returns what :meth:`encode` needs before its own pass: float32 ``[rows, ...]`` or ``[1]``; ``None`` by default.

        It is a separate function so that each reads the rows once: the caller may compute them again for each pass
        instead of holding them. It is not finite where an entry is not. ``info`` has only the count.
        """
        return kernels.largest_of_rows(rows) if self.measures_largest else None

    def statistics(self, rows: Sequence[Array], infos: Sequence[RowInfo], states: Sequence[PyTree]) -> list[Any]:
        """Returns the statistic of each of several tensors, which a code may find together."""
        return [self.statistic(*of) for of in zip(rows, infos, states, strict=True)]

    def statistic_of(self, rows: Array, info: RowInfo) -> Any:
        """Returns the statistic that is known, or computes it now."""
        return self.statistic(rows, info) if info.statistic is None else info.statistic

    def from_mean(self, mean: Array) -> Array:
        """Prepares the mean of the statistics for use; it has the rows of all tensors of this compressor."""
        return mean

    @final
    def side_of(self, side: Array | None, worker: Array | int) -> Array | None:
        """Returns the side information with which one worker encodes, and the others decode its payload."""
        if side is None or self.side_information != "worker_seeds":
            return side
        return kernels.fold_seeds(side, worker)

    @abc.abstractmethod
    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[Payload, PyTree]:
        """Encodes float32 ``[rows, block]``, with zeros in the padding.

        ``state`` is what :meth:`init` or the previous call returned. The side information is that of :meth:`side_of`.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, info: RowInfo = RowInfo()) -> Array:
        """Returns float32 ``[rows, block]``; ``info`` has only the side information."""

    def finite(self, payload: Payload, statistic: Any, largest: float = LARGEST) -> Array:
        """Returns whether every encoded entry is finite, boolean scalar, from the payload and the statistic.

        Every code has a number in which one bad entry shows (the largest value, a scale), so the check costs no pass
        over the gradient. A code that holds sums of entries may also count smaller ones as too large.

        Args:
            payload: what :meth:`encode` returned.
            statistic: what :meth:`statistic` returned.
            largest: magnitude above which an entry counts as not finite, see :func:`largest_of`.
        """
        numbers = [a for a in jax.tree.leaves((payload, statistic)) if jnp.issubdtype(a.dtype, jnp.floating)]
        return jnp.stack([jnp.array(True), *(kernels.all_finite(a, largest) for a in numbers)]).all()

    def encode_dealt(self, flat: Array, deal: kernels.Deal, state: PyTree, info: RowInfo) -> tuple[Payload, PyTree]:
        """Returns :meth:`encode` of the blocks that ``deal`` makes of a float32 vector."""
        return self.encode(deal.blocks(flat), state, info)

    def encode_all_dealt(self, flats: Sequence[Array], deals: Sequence[kernels.Deal]) -> Payload:
        """Returns the payload of the rows of several vectors, of a code that encodes :attr:`by_row`."""
        each = [self.encode_dealt(*one, (), RowInfo())[0] for one in zip(flats, deals, strict=True)]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *each)

    def decode_dealt(self, payload: Payload, deal: kernels.Deal, width: int, info: RowInfo = RowInfo()) -> Array:
        """Inverts :meth:`encode_dealt`: the vector as a matrix, float32 ``[deal.size / width, width]``."""
        return deal.flat(self.decode(payload, info)).reshape(-1, width)

    def reduce_dealt(self, payloads: Payload, deal: kernels.Deal, width: int, info: RowInfo = RowInfo()) -> Array:
        """Returns :meth:`reduce`, in the layout of :meth:`decode_dealt`."""
        return deal.flat(self.reduce(payloads, info)).reshape(-1, width)

    def sent_mask(self, payload: Payload, info: RowInfo = RowInfo()) -> Array:
        """Returns the entries that decode to something other than zero: boolean ``[rows, block]``."""
        return self.decode(payload, info) != 0

    def reduce(self, payloads: Payload, info: RowInfo = RowInfo()) -> Array:
        """Decodes and sums the payloads of N workers, stacked on a new leading dimension.

        Memory is one dense copy for every N. The order of the sum is fixed, so equal payloads give equal bits on
        every worker. ``info`` has what all workers know; :meth:`side_of` derives what each worker encoded with.
        """

        def decoded(one: PyTree, i: Array | int) -> Array:
            return self.decode(one, info._replace(side=self.side_of(info.side, i)))

        # Matrix products of several payloads would be joined, which copies their inputs and outputs.
        return add_up(decoded, payloads, at_once=1 if self.multiplies else AT_ONCE)

    def downlink(self, workers: int) -> "Compressor":
        """Returns the compressor of the downlink, with which an owner encodes the mean of ``workers`` payloads."""
        return self

    def exact_downlink(self, workers: int) -> bool:
        """Returns whether the downlink reproduces the mean of the decoded payloads exactly."""
        return self.downlink(workers).lossless

    def rounding(self, rows: Array, payload: Payload, info: RowInfo = RowInfo()) -> Payload:
        """Returns, for a sparsifier, a payload with the same positions and the rounding errors of their values."""
        name = type(self).__name__
        if self.is_sparsifier:
            raise TypeError(
                f"{name} is a sparsifier (is_sparsifier is True) without rounding(rows, payload, info), which owners need for"
                " what a cast takes from the values: define it, a payload with the same positions and rows less the decoded"
                " values there, or exchange with collective='all_gather'"
            )
        raise TypeError(f"{name} is not a sparsifier: only what sends some of the entries has a rounding")

    def left_with_owner(self, payload: Payload, mean: Payload) -> Payload:
        """Returns, for codes that :attr:`drop <drops>` entries, the part of a worker's payload that it does not take back.

        Args:
            payload: payload of one worker, or of several, stacked on a new leading dimension.
            mean: what the owners kept of all workers' payloads.

        Returns:
            The payload. Where the mean lacks an entry, the smallest magnitude of the row's mean is subtracted from it; an entry
            of smaller magnitude becomes zero.
        """
        raise TypeError(f"{type(self).__name__} drops no entries")

    def of_sum(self, total: Payload, workers: int) -> Payload:
        """Returns N times the payload that the update is decoded from, given the sum of N payloads: by default that sum."""
        return total

    def next_state(self, state: PyTree, mean: Payload) -> PyTree:
        """Returns the state after the exchange, from the mean payload of all workers; for summable payloads only."""
        return state

    @functools.cache  # noqa: B019  # static, and few
    def statistic_spec(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Returns shape and dtype of the statistic of ``rows`` rows, if it crosses in an all-reduce."""
        if self.side_information not in ("max", "mean"):
            return None
        return jax.eval_shape(lambda r, c: self.statistic(r, RowInfo(c), self.init(r.shape)), *self._specs(rows))

    def payload_bytes(self, rows: int) -> int:
        """Returns the bytes of the payload of ``rows`` rows."""
        return nbytes(self.payload_spec(rows))

    def payload_spec(self, rows: int) -> Payload:
        """Returns the shapes and dtypes of the payload of ``rows`` rows."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), self._payload_of_a_row())

    @functools.cache  # noqa: B019  # static, and few
    def _payload_of_a_row(self) -> Payload:

        def encode(rows: Array, count: Array, side: Array | None) -> Payload:
            state, info = self.init(rows.shape), RowInfo(count, jax.random.key(0), side=side)
            return self.encode(rows, state, info._replace(statistic=self.statistic(rows, info, state)))[0]

        has_seeds = self.side_information in ("seeds", "worker_seeds")
        side = jax.ShapeDtypeStruct((1,), jnp.uint32) if has_seeds else self.statistic_spec(1)
        return jax.eval_shape(encode, *self._specs(1), side)

    def _specs(self, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return jax.ShapeDtypeStruct((rows, self.block), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
