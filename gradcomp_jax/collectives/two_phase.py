"""A reduce-scatter and an all-gather of payloads: the sharded parameter server, with both directions compressed."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from gradcomp_jax import _checks, kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import InboundMessage, Message, Remainder, Send, Steps, Workers
from gradcomp_jax.collectives.owners import Owners
from gradcomp_jax.compressors import Compressor, RowInfo
from gradcomp_jax.compressors.base import largest_of
from gradcomp_jax.memory import Memory
from gradcomp_jax.memory.momentum import MomentumCorrection


@dataclasses.dataclass(frozen=True)
class TwoPhase(Collective):
    """Sends payload rows to their owners, which reduce them, encode the mean again (the downlink) and send it to all workers.

    2(N-1)/N payloads are sent for every N.

    Attributes:
        remainder: what becomes of what the downlink loses. By default it is ``server`` for sparsifiers with a memory, ``split``
            for those with momentum in it, ``put_back`` for other codes with a memory, else ``drop``. ``server``: the owner adds
            the loss to its next mean. ``split``, for sparsifiers, whose losses are whole entries: of an entry that the owner
            did not keep, each worker takes back at most the smallest magnitude that the owner did keep in the row, and the
            owner adds the rest to its next mean. ``put_back``: the owner's own memory takes what rounding lost, and the workers
            take back, whole, what a sparsifier did not keep; where their gradients cancel, they hold it forever. ``drop``: the
            loss is dropped; for codes without a memory.

    Raises:
        ValueError: for an unknown remainder.
    """

    remainder: Remainder | None = None

    def __post_init__(self) -> None:
        """Checks the name of the rule."""
        if self.remainder is not None:
            _checks.one_of("remainder", self.remainder, get_args(Remainder))

    def check(self, compressor: Compressor, memory: Memory) -> None:
        """Refuses a remainder that would lose what the memory keeps, or never send it."""
        super().check(compressor, memory)
        if self.remainder in ("split", "put_back") and not memory.keeps:
            raise ValueError(
                f"remainder={self.remainder!r} needs a memory to put it into; use memory=residual() or remainder='drop'"
            )
        if self.remainder == "split" and not compressor.downlink(2).drops:
            raise ValueError(
                "remainder='split' is for a downlink that leaves entries out, and that of"
                f" {type(compressor).__name__} does not; use 'put_back'"
            )
        if self.remainder == "drop" and memory.keeps:
            raise ValueError(
                "remainder='drop' would lose what the memory exists to keep; leave it out, or use 'server'"
            )
        if self.remainder == "server" and compressor.is_sparsifier and isinstance(memory, MomentumCorrection):
            raise ValueError(
                "remainder='server' delays a momentum-corrected selection, which makes training diverge; use 'split'"
            )

    def remainder_of(self, compressor: Compressor, memory: Memory, workers: int) -> Remainder | None:
        """Returns the remainder, the default one by code and memory; ``None`` for an exact downlink."""
        if compressor.exact_downlink(workers):
            return None
        if self.remainder is not None:
            return self.remainder
        if not memory.keeps:
            return "drop"
        if not compressor.downlink(workers).drops:
            return "put_back"
        return "split" if isinstance(memory, MomentumCorrection) else "server"

    def owners_from(self, compressor: Compressor, memory: Memory) -> int | None:
        """Returns 1 where owners have a residual: one worker is its own owner."""
        return 1 if self.remainder_of(compressor, memory, 2) in ("split", "server") else None

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns the payloads of every owner's rows, to their owners; then an owner's mean, to all workers."""
        mean = compressor.downlink(workers).payload_spec(Owners(rows, workers, in_turn=False).each)
        return [to_owners(compressor, rows, workers), Send("all_gather", mean)]

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Sends rows to their owners, and every owner's mean to all workers."""
        downlink = message.compressor.downlink(workers.count)
        anyone = message.compressor.by_entry and message.remainder in (None, "drop")
        owners = dataclasses.replace(owners_of(message, workers), shapes=message.shapes if anyone else ())
        received = yield Send("all_to_all", owners.by_owner(message.payload))
        mean, info = owned_mean(message, received, owners, workers, clears=downlink.pads_nonzero)
        payload, _ = downlink.encode(mean, downlink.init(mean.shape), info)
        # Every payload that came in was checked by its sender; an owner's residual was not.
        bad = ~downlink.finite(payload, None, largest_of(workers.count))
        everyones = owners.by_row((yield Send("all_gather", payload, bad=bad)))

        def decoded() -> Array:
            rows = downlink.decode(payload, info)
            return clear(rows, info) if message.compressor.pads_nonzero or downlink.pads_nonzero else rows

        # TPU would take owners' rows to those of the message after the scale made them wide.
        rows = kernels.held_on_tpu(everyones) if downlink.scales else everyones
        inbound = InboundMessage(rows, downlink, message.info.side, drops=downlink.drops)
        if message.remainder == "server":
            return dataclasses.replace(inbound, residual=mean - decoded())
        if message.remainder == "split":
            # Each worker computes what it takes back from its own payload and the mean alone, and the owner does so for all.
            taken = message.compressor.reduce(message.compressor.left_with_owner(received, payload)) / workers.count
            assert message.residual is not None, "whose loss is split has a residual"
            residual = message.residual + taken - downlink.decode(payload)
            return dataclasses.replace(inbound, residual=residual, splits=True)
        if message.remainder == "put_back":
            lost = downlink.rounding(mean, payload, info) if downlink.is_sparsifier else mean - decoded()
            lost = owners.place(lost, workers.index)
            return dataclasses.replace(inbound, rounding=lost, rounding_factor=workers.count)
        return inbound


def to_owners(compressor: Compressor, rows: int, workers: int) -> Send:
    """Returns the shapes of the payloads that go to the owners of ``rows`` rows."""
    each = compressor.payload_spec(Owners(rows, workers, in_turn=False).each)
    return Send("all_to_all", jax.tree.map(lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), each))


def owners_of(message: Message, workers: Workers) -> Owners:
    """Returns who owns the rows of a message."""
    return Owners(message.info.need("count").shape[0], workers.count, in_turn=message.residual is not None)


def owned_mean(
    message: Message, received: object, owners: Owners, workers: Workers, *, clears: bool
) -> tuple[Array, RowInfo]:
    """Reduces the payloads of the rows that this worker owns: returns their mean plus its residual, and their info.

    ``received`` is every worker's payload of these rows, stacked; ``clears`` says that padding must be zeros for what follows.
    """
    counts = owners.mine(message.info.count, workers.index)
    info = RowInfo(counts, message.info.key, side=owners.mine(message.info.side, workers.index))
    mean = message.compressor.reduce(received, info) / workers.count
    if not (message.compressor.is_sparsifier or message.compressor.by_entry):
        mean = kernels.held_on_tpu(mean)
    if message.residual is not None:
        mean = mean + message.residual
    return (clear(mean, info) if clears or message.compressor.pads_nonzero else mean), info


def clear(rows: Array, info: RowInfo) -> Array:
    """Returns rows with zeros in the padding, whatever a code left there."""
    return jnp.where(kernels.valid_mask(info.need("count"), rows.shape[1]), rows, 0.0)
