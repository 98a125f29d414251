"""How payloads cross an axis."""

from gradcomp_jax.collectives.all_gather import AllGather as AllGather
from gradcomp_jax.collectives.all_reduce import AllReduce as AllReduce
from gradcomp_jax.collectives.auto import Auto as Auto
from gradcomp_jax.collectives.auto import as_collective as as_collective
from gradcomp_jax.collectives.base import Collective as Collective
from gradcomp_jax.collectives.fused import permute as permute
from gradcomp_jax.collectives.fused import pmax as pmax
from gradcomp_jax.collectives.fused import psum as psum
from gradcomp_jax.collectives.messages import InboundMessage as InboundMessage
from gradcomp_jax.collectives.messages import Remainder as Remainder
from gradcomp_jax.collectives.messages import Span as Span
from gradcomp_jax.collectives.messages import Steps as Steps
from gradcomp_jax.collectives.messages import Workers as Workers
from gradcomp_jax.collectives.messages import fresh as fresh
from gradcomp_jax.collectives.messages import rows_of as rows_of
from gradcomp_jax.collectives.recursive_doubling import RecursiveDoubling as RecursiveDoubling
from gradcomp_jax.collectives.reduce_scatter import ReduceScatter as ReduceScatter
from gradcomp_jax.collectives.tpu import are_there as are_there
from gradcomp_jax.collectives.tpu import wait as wait
from gradcomp_jax.collectives.two_phase import TwoPhase as TwoPhase
