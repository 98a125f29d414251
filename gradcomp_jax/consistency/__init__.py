"""Methods whose replicas differ: delayed averages, elastic bands, local steps, gossip; and fewer exchanges."""

from gradcomp_jax.consistency.accumulate import AccumulateState as AccumulateState
from gradcomp_jax.consistency.accumulate import accumulate as accumulate
from gradcomp_jax.consistency.consensus import consolidate as consolidate
from gradcomp_jax.consistency.consensus import mean_wire_bytes as mean_wire_bytes
from gradcomp_jax.consistency.consensus import replica_spread as replica_spread
from gradcomp_jax.consistency.consensus import staleness as staleness
from gradcomp_jax.consistency.delayed import DelayedState as DelayedState
from gradcomp_jax.consistency.delayed import delayed_average as delayed_average
from gradcomp_jax.consistency.diloco import diloco as diloco
from gradcomp_jax.consistency.diloco import sparse_loco as sparse_loco
from gradcomp_jax.consistency.elastic import ElasticState as ElasticState
from gradcomp_jax.consistency.elastic import elastic_average as elastic_average
from gradcomp_jax.consistency.gossip import GossipState as GossipState
from gradcomp_jax.consistency.gossip import gossip as gossip
from gradcomp_jax.consistency.outer import OuterState as OuterState
from gradcomp_jax.consistency.outer import local_sgd as local_sgd
from gradcomp_jax.consistency.outer import outer_average as outer_average

MARKED = (AccumulateState, DelayedState, ElasticState, GossipState, OuterState)
"""States that mark by themselves what differs by device."""
