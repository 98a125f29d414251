"""Messages: what goes out to an axis, in which operation, and what every worker has of it afterwards."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax._typing import Array, AxisName
from gradcomp_jax.compressors import Compressor, RowInfo

Remainder = Literal["split", "put_back", "server", "drop"]
"""What becomes of what the downlink loses: see :class:`~gradcomp_jax.collectives.TwoPhase`."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Describes the workers along an axis.

    Attributes:
        count: N, how many there are.
        index: this worker's number, int32 scalar.
        axis_name: the axis; ``None`` for one worker.
    """

    count: int
    index: Array
    axis_name: AxisName | None

    @classmethod
    def along(cls, axis_name: AxisName | None) -> "Workers":
        """Returns the workers along a mapped axis."""
        return cls(_compat.axis_size(axis_name) or 1, _compat.axis_index(axis_name), axis_name)


class Send(NamedTuple):
    """Holds what a collective puts into one operation of the axis.

    Attributes:
        by: ``permute``, to one partner; ``all_to_all``, slice i of each array to worker i; ``all_gather``, to all workers,
            stacked; ``psum``, added up.
        payload: a tree of arrays.
        partners: for ``permute``, the worker that each worker sends to.
        shapes: for ``psum``, the shapes of the tensors whose entries each array holds, one after the other and nothing else.
        bad: boolean scalar, whether the payload is unusable; ``None`` where its sender has checked it.
    """

    by: Literal["permute", "all_to_all", "all_gather", "psum"]
    payload: Any
    partners: tuple[int, ...] = ()
    bad: Array | None = None
    shapes: Sequence[tuple[int, ...]] = ()


class Message(Protocol):
    """Defines what a collective reads of a message: the payload of one compressor on one worker."""

    @property
    def compressor(self) -> Compressor:
        """Returns the compressor that encoded the message."""

    @property
    def payload(self) -> Any:
        """Returns the payload, leaves ``[rows, ...]``."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns the shape of each tensor that the message was made of; ``()`` for several that go as one."""

    @property
    def info(self) -> RowInfo:
        """Returns the info of its rows: their counts, the side information of all workers, a key for a second encoding."""

    @property
    def remainder(self) -> Remainder | None:
        """Returns what becomes of what the downlink loses; ``None`` where nothing is lost."""

    @property
    def residual(self) -> Array | None:
        """Returns what this worker keeps as an owner of rows, float32 ``[ceil(rows / N), block]``, or ``None``.

        With a residual, owners take rows in turn; otherwise each owner has equally many consecutive rows.
        """


Span = Sequence[tuple[int, int]]
"""Ranges of rows: of each the first one, and the first one after them."""

Laid = tuple[kernels.Deal, int] | None
"""The layout in which dealt rows are wanted: the deal, and the width of the matrix that its vector is seen as."""


@dataclasses.dataclass(frozen=True)
class InboundMessage:
    """Holds what every worker has of a message after its collective. Rows are those of the message, equal on every worker.

    Attributes:
        payload: leaves ``[rows, ...]``; where ``stacked``, those of every worker, ``[N, rows, ...]``.
        code: decodes the payload; ``None`` where it is float32 rows already.
        side: side information of the rows, or ``None``.
        divisor: the decoded rows divided by it are the mean.
        stacked: whether the payloads of all workers are to be decoded and added.
        added: whether the payload is the sum of the workers' payloads.
        drops: whether an entry that is zero in the mean was left out by its owner; otherwise a zero is an ordinary value.
        rounding: what this worker, as an owner, lost to rounding: rows, or a payload of ``code`` where it is a sparsifier.
        rounding_factor: the factor of that loss in this worker's own memory: N.
        splits: whether workers take back part of what the mean lacks, see :meth:`taken`.
        residual: this owner's new residual.
    """

    payload: Any
    code: Compressor | None
    side: Array | None = None
    divisor: int = 1
    stacked: bool = False
    added: bool = False
    drops: bool = False
    rounding: Any = None
    rounding_factor: int = 1
    splits: bool = False
    residual: Array | None = None

    def mean(self, span: Span, laid: Laid, again: Callable[[Any], Any], ok: Array | None = None) -> Array:
        """Returns rows of the mean, float32 ``[rows, block]``; with a :data:`Laid`, the vector dealt out over them.

        ``again`` takes the payload where each use should decode it again and not share an array. With ``ok``, a boolean
        scalar, it is what becomes an update: zeros where the step did not take place.
        """
        payload = rows_of(self.payload, span, axis=1 if self.stacked else 0)
        if self.code is None:
            mean = _lay(payload, laid)
        else:
            payload = payload if self.added else fresh(self.code, payload, laid, again)
            decode = _reduce if self.stacked else _decode
            heeded = ok if laid and not self.stacked and self.code.zeroes else None
            mean = decode(self.code, payload, RowInfo(side=self._side(span), ok=heeded), laid)
            ok = ok if heeded is None else None
        mean = mean if self.divisor == 1 else mean / self.divisor
        return mean if ok is None else jnp.where(ok, mean, 0.0)

    def mean_payload(self, span: Span) -> Any:
        """Returns rows of the mean of the payloads, where they were added."""
        # The division is in floating point: the sums of an integer code are not divided in place.
        return jax.tree.map(lambda a: a / self.divisor, rows_of(self.payload, span))

    def lost(self, span: Span, laid: Laid) -> Array | None:
        """Returns what this worker's memory takes back of what it lost to rounding as an owner; ``None`` for nothing."""
        if self.rounding is None or self.code is None:
            return None
        part = rows_of(self.rounding, span)
        rows = (
            _decode(self.code, part, RowInfo(side=self._side(span)), laid)
            if self.code.is_sparsifier
            else _lay(part, laid)
        )
        return rows * self.rounding_factor

    def taken(self, compressor: Compressor, payload: Any, span: Span) -> Any:
        """Returns the part of this worker's payload that counts as sent: all but what the owners leave to the worker."""
        return compressor.left_with_owner(payload, rows_of(self.payload, span)) if self.splits else payload

    def _side(self, span: Span) -> Array | None:
        return None if self.side is None else rows_of(self.side, span)


Steps = Generator[Send, Any, InboundMessage]
"""The operations of a collective: a generator that yields what it sends, gets what came in, and returns an inbound message."""


def rows_of(tree: Any, span: Span, axis: int = 0) -> Any:
    """Returns ranges of rows of every array of a tree, one range after the other."""
    if len(span) > 1:
        return jax.tree.map(lambda *a: lax.concatenate(a, axis), *(rows_of(tree, [rows], axis) for rows in span))
    return jax.tree.map(lambda a: lax.slice_in_dim(a, *span[0], axis=axis), tree)


def fresh(code: Compressor, payload: Any, laid: Laid, again: Callable[[Any], Any]) -> Any:
    """Returns ``again(payload)`` where it was dealt out and the code would rather decode it anew; otherwise the payload."""
    return again(payload) if laid and code.decodes_anew else payload


def _lay(rows: Array, laid: Laid) -> Array:
    return rows if laid is None else laid[0].flat(rows).reshape(-1, laid[1])


def _decode(code: Compressor, payload: Any, info: RowInfo, laid: Laid) -> Array:
    return code.decode(payload, info) if laid is None else code.decode_dealt(payload, *laid, info)


def _reduce(code: Compressor, payloads: Any, info: RowInfo, laid: Laid) -> Array:
    return code.reduce(payloads, info) if laid is None else code.reduce_dealt(payloads, *laid, info)
