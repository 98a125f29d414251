"""Training in several processes: how they find each other, what they must share, and how a run ends when one is lost."""

from gradcomp_jax.distributed.address import ClusterError as ClusterError
from gradcomp_jax.distributed.agreement import check_equal as check_equal
from gradcomp_jax.distributed.cluster import Place as Place
from gradcomp_jax.distributed.cluster import find_place as find_place
from gradcomp_jax.distributed.cluster import join as join
from gradcomp_jax.distributed.digests import digest as digest
from gradcomp_jax.distributed.exit_notice import FAILED as FAILED
from gradcomp_jax.distributed.start import check_equal_start as check_equal_start
from gradcomp_jax.distributed.verifier import Verifier as Verifier
from gradcomp_jax.distributed.watchdog import Watchdog as Watchdog
