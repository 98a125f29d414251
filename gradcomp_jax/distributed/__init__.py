"""Training in several processes: how they find each other, and how a run ends when one of them is lost."""

from gradcomp_jax.distributed.cluster import ClusterError as ClusterError
from gradcomp_jax.distributed.cluster import Place as Place
from gradcomp_jax.distributed.cluster import find_place as find_place
from gradcomp_jax.distributed.cluster import join as join
from gradcomp_jax.distributed.exit_notice import FAILED as FAILED
from gradcomp_jax.distributed.watchdog import Watchdog as Watchdog
