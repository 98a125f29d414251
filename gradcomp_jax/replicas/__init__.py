"""Methods whose replicas differ: delayed averages, elastic averages, local steps, gossip; and fewer exchanges.

Each goes around an exchange: it decides what crosses and when, and the exchange decides how. So every method, collective and
residual works inside it, and conservation is the exchange's own law.
"""

from gradcomp_jax.replicas.accumulate import AccumulateState as AccumulateState
from gradcomp_jax.replicas.accumulate import accumulate as accumulate
from gradcomp_jax.replicas.consensus import consolidate as consolidate
from gradcomp_jax.replicas.consensus import mean_wire_bytes as mean_wire_bytes
from gradcomp_jax.replicas.consensus import replica_spread as replica_spread
from gradcomp_jax.replicas.consensus import staleness as staleness
from gradcomp_jax.replicas.delayed import DelayedState as DelayedState
from gradcomp_jax.replicas.delayed import delayed_average as delayed_average
from gradcomp_jax.replicas.diloco import diloco as diloco
from gradcomp_jax.replicas.diloco import sparse_loco as sparse_loco
from gradcomp_jax.replicas.elastic import ElasticState as ElasticState
from gradcomp_jax.replicas.elastic import elastic_average as elastic_average
from gradcomp_jax.replicas.fragments import fragments as fragments
from gradcomp_jax.replicas.gossip import GossipState as GossipState
from gradcomp_jax.replicas.gossip import gossip as gossip
from gradcomp_jax.replicas.nonfinite import ReplicaState as ReplicaState
from gradcomp_jax.replicas.outer import OuterState as OuterState
from gradcomp_jax.replicas.outer import local_sgd as local_sgd
from gradcomp_jax.replicas.outer import outer_average as outer_average

MARKED = (AccumulateState, DelayedState, ElasticState, GossipState, OuterState)
"""States that mark themselves what differs by device."""
