"""What stays behind on a worker."""

from gradcomp_jax.memory.base import Memory as Memory
from gradcomp_jax.memory.base import none as none
from gradcomp_jax.memory.momentum import Momentum as Momentum
from gradcomp_jax.memory.momentum import momentum_correction as momentum_correction
from gradcomp_jax.memory.narrow import Narrow as Narrow
from gradcomp_jax.memory.residual import estimate as estimate
from gradcomp_jax.memory.residual import residual as residual

__all__ = ["Memory", "Momentum", "Narrow", "estimate", "momentum_correction", "none", "residual"]
