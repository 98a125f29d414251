"""What every compressor is: a static pair of encode and decode over rows."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.kernels import LARGEST


def largest_of(workers: int) -> float:
    """The largest magnitude that an exchange of so many workers takes, a quarter of float32's largest number over N.

    A sum of N such numbers is finite. So is what a memory holds afterwards: a target, less what was sent, plus N times
    what an owner's rounding took from the mean.
    """
    return LARGEST / (4 * workers)


def add_up(one: Callable[[Any, Array | int], Array], payloads: Any) -> Array:
    """The sum of what ``one(payload, i)`` makes of the payload of each worker i, stacked on a leading dimension.

    Memory is one dense copy, whatever their number is, and the order is fixed.
    """

    def of(i: Array | int) -> Array:
        return one(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), payloads), i)

    workers = jax.tree.leaves(payloads)[0].shape[0]
    return of(0) if workers == 1 else lax.fori_loop(1, workers, lambda i, total: total + of(i), of(0))


Payload = Any
"""A registered dataclass of arrays; every leaf's leading dimension is ``rows``, with a static shape."""


@dataclasses.dataclass(frozen=True)
class Compressor(abc.ABC):
    """Encodes each row of a float32 ``[rows, block]`` view of a tensor by itself.

    Static and hashable: configuration only, no arrays. Because every payload leaf leads with ``rows``, a
    collective can split, route and reassemble any payload without knowing its format.
    """

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Entries of a row."""

    @property
    def summable(self) -> bool:
        """Whether payloads of several workers add up, leaf by leaf, to the payload of the sum."""
        return False

    @property
    def most_workers(self) -> int | None:
        """How many workers' payloads can be added before an integer could wrap; ``None`` if any number."""
        return None

    @property
    def selects(self) -> bool:
        """Whether a payload holds some of a row's entries and the others decode to exactly zero."""
        return False

    @property
    def drops(self) -> bool:
        """Whether a row's entries compete for a place in the payload: those that are too small to get one are not in it."""
        return False

    @property
    def deals(self) -> bool:
        """Whether a block had better be a sample of the whole tensor than a stretch of it."""
        return False

    @property
    def decodes_anew(self) -> bool:
        """Whether each pass that needs a dealt payload decoded had better decode it, than all of them share an array."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether decoding returns the rows bit for bit."""
        return False

    @property
    def fills(self) -> bool:
        """Whether padding decodes to something other than zero; whoever decodes then clears it."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the decoded payload has the (clipped) rows as its expectation."""
        return self.lossless

    def init(self, shape: tuple[int, ...]) -> PyTree:
        """State of one tensor of the given shape; none by default."""
        del shape
        return ()

    @property
    def agrees(self) -> Literal["max", "mean"] | None:
        """What all workers must know of :meth:`measure`: its maximum over the workers, its mean, or nothing."""
        return None

    @property
    def seeded(self) -> bool:
        """Whether the code draws numbers that whoever decodes must draw again: a uint32 seed for each row, not sent."""
        return False

    def measure(self, rows: Array, count: Array, state: PyTree = ()) -> Array | None:
        """A statistic that :meth:`encode` needs before its own pass: float32 ``[rows, ...]`` or ``[1]``, or ``None``.

        In a function of its own so that each reads the rows once: the caller may compute them anew for each pass
        instead of holding them. Not finite where an entry is not. ``count`` (int32 ``[rows]``) says how many entries
        of each row are not padding.
        """
        del rows, count, state
        return None

    def settle(self, agreed: Array) -> Array:
        """Makes the mean of the statistics, of all this compressor's tensors rows after rows, ready for use."""
        return agreed

    def for_worker(self, shared: Array | None, worker: Array | int) -> Array | None:
        """What worker number ``worker`` encodes with, and others decode its payload with, of what all workers know."""
        del worker
        return shared

    @abc.abstractmethod
    def encode(
        self,
        rows: Array,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[Payload, PyTree]:
        """Encodes float32 ``[rows, block]``.

        Args:
            rows: zeros in the padding.
            state: what :meth:`init` or the previous call returned.
            key: typed JAX key, different for every worker, tensor and step.
            count: int32 ``[rows]``, valid entries of each row.
            local: what :meth:`measure` returned here.
            shared: what the workers :attr:`agree <agrees>` on, or the rows' seeds (uint32 ``[rows]``), as
                :meth:`for_worker` gave it.
        """

    def finite(self, payload: Payload, local: Array | None, largest: float = LARGEST) -> Array:
        """Whether every entry that was encoded is finite, boolean scalar, told from the payload and the statistic.

        Every code has a number in which one bad entry shows (the largest value, a scale), so the check costs no pass
        over the gradient. A code that has sums or several entries in it may count smaller ones as too large, too.

        Args:
            payload: what :meth:`encode` returned.
            local: what :meth:`measure` returned.
            largest: magnitude above which an entry counts as not finite, see :func:`largest_of`.
        """
        numbers = [a for a in jax.tree.leaves((payload, local)) if jnp.issubdtype(a.dtype, jnp.floating)]
        return jnp.stack([jnp.array(True), *(kernels.all_finite(a, largest) for a in numbers)]).all()

    @abc.abstractmethod
    def decode(self, payload: Payload, *, shared: Array | None = None) -> Array:
        """Returns float32 ``[rows, block]``."""

    def encode_dealt(
        self,
        flat: Array,
        deal: kernels.Deal,
        state: PyTree,
        key: Array,
        *,
        count: Array,
        local: Array | None = None,
        shared: Array | None = None,
    ) -> tuple[Payload, PyTree]:
        """:meth:`encode` of the blocks that ``deal`` makes of a float32 vector."""
        return self.encode(deal.blocks(flat), state, key, count=count, local=local, shared=shared)

    def decode_dealt(self, payload: Payload, deal: kernels.Deal, width: int, *, shared: Array | None = None) -> Array:
        """Inverse of :meth:`encode_dealt`: the vector as a matrix, float32 ``[deal.size / width, width]``."""
        return deal.flat(self.decode(payload, shared=shared)).reshape(-1, width)

    def reduce_dealt(self, payloads: Payload, deal: kernels.Deal, width: int, *, shared: Array | None = None) -> Array:
        """:meth:`reduce`, as :meth:`decode_dealt` lays it."""
        return deal.flat(self.reduce(payloads, shared=shared)).reshape(-1, width)

    def carried(self, payload: Payload, *, shared: Array | None = None) -> Array:
        """The entries that decode to something other than zero: boolean ``[rows, block]``."""
        return self.decode(payload, shared=shared) != 0

    def reduce(self, payloads: Payload, *, shared: Array | None = None) -> Array:
        """Decodes and sums the payloads of N workers, stacked on a new leading dimension.

        Memory is one dense copy, whatever N is. The order of the sum is fixed, so equal payloads give equal bits on
        every worker.
        """
        return add_up(lambda one, i: self.decode(one, shared=self.for_worker(shared, i)), payloads)

    def back(self, workers: int) -> "Compressor":
        """The compressor of the way back: what an owner encodes the mean of ``workers`` payloads with."""
        del workers
        return self

    def exact_back(self, workers: int) -> bool:
        """Whether the way back reproduces the mean of the decoded payloads exactly."""
        return self.back(workers).lossless

    def rounding(self, rows: Array, payload: Payload, *, shared: Array | None = None) -> Payload:
        """For a selection: a payload with the same positions and what rounding took from their values."""
        raise TypeError(f"{type(self).__name__} is not a selection")

    def settled(self, payload: Payload, mean: Payload) -> Payload:
        """For codes that :attr:`drop <drops>` entries: what of a worker's payload does not come back to it.

        Args:
            payload: of one worker, or of several, stacked on a new leading dimension.
            mean: what the owners kept of all workers' payloads.

        Returns:
            The payload without the smallest magnitude of the row's mean, or without all that is smaller, where the mean lacks
            the entry.
        """
        raise TypeError(f"{type(self).__name__} drops no entries")

    def next_state(self, state: PyTree, mean: Payload) -> PyTree:
        """The state after the exchange, from the mean payload of all workers; of summable payloads only."""
        del mean
        return state

    def statistic(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Shape and dtype of what the workers agree on for ``rows`` rows; it crosses in an all-reduce."""
        if self.agrees is None:
            return None
        return jax.eval_shape(lambda r, c: self.measure(r, c, self.init(r.shape)), *self._specs(rows))

    def payload_bytes(self, rows: int) -> int:
        """Bytes of the payload of ``rows`` rows."""

        def encode(rows: Array, count: Array, shared: Array | None) -> Payload:
            state = self.init(rows.shape)
            local = self.measure(rows, count, state)
            return self.encode(rows, state, jax.random.key(0), count=count, local=local, shared=shared)[0]

        shared = jax.ShapeDtypeStruct((rows,), jnp.uint32) if self.seeded else self.statistic(rows)
        spec = jax.eval_shape(encode, *self._specs(rows), shared)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))

    def _specs(self, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return jax.ShapeDtypeStruct((rows, self.block), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
