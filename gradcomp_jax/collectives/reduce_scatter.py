"""The first of two phases alone, for parameters that are sharded along the axis."""

import dataclasses

from gradcomp_jax._typing import PyTree
from gradcomp_jax.collectives.base import Collective
from gradcomp_jax.collectives.messages import InboundMessage, Message, Send, Steps, Workers
from gradcomp_jax.collectives.two_phase import owned_mean, owners_of, to_owners
from gradcomp_jax.compressors import Compressor


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Collective):
    """Gives each worker the mean of its own shard of every sharded parameter only: for FSDP and ZeRO.

    Payloads go to their owners and no mean comes back: (N-1)/N payloads are sent, and nothing is encoded twice. A tensor
    whose spec lays a dimension along the axis of the workers is divided along it before rows are encoded: whole gradients in,
    shards of the update out. Memories are of whole gradients, because each worker has one. They store how many entries their
    tensor has, so that they can be divided again if the number of workers changes. Tensors that no spec divides take ``auto``.

    Attributes:
        param_specs: the parameters' ``jax.sharding.PartitionSpec``, a tree or a prefix of it.

    References:
        Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, section 5.2 (ZeRO stage 2: partitioned gradients).
    """

    param_specs: PyTree = dataclasses.field(hash=False)

    def sends(self, compressor: Compressor, rows: int, workers: int) -> list[Send]:
        """Returns the payloads of every owner's rows, to their owners."""
        return [to_owners(compressor, rows, workers)]

    def steps(self, message: Message, workers: Workers) -> Steps:
        """Sends rows to their owners."""
        owners = owners_of(message, workers)
        received = yield Send("all_to_all", owners.by_owner(message.payload))
        mean, _ = owned_mean(message, received, owners, workers, clears=False)
        return InboundMessage(mean, None)
