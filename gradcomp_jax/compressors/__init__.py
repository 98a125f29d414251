"""Encode and decode pairs, and the payloads that cross the wire."""

from gradcomp_jax.compressors.base import Compressor as Compressor
from gradcomp_jax.compressors.base import RowInfo as RowInfo
from gradcomp_jax.compressors.base import nbytes as nbytes
from gradcomp_jax.compressors.block_quantized import block_quantized as block_quantized
from gradcomp_jax.compressors.dense import dense as dense
from gradcomp_jax.compressors.fixed_point import fixed_point as fixed_point
from gradcomp_jax.compressors.float8 import float8 as float8
from gradcomp_jax.compressors.in_frequency import in_frequency as in_frequency
from gradcomp_jax.compressors.low_rank import low_rank as low_rank
from gradcomp_jax.compressors.random_k import random_k as random_k
from gradcomp_jax.compressors.rotated import rotated as rotated
from gradcomp_jax.compressors.sign import sign as sign
from gradcomp_jax.compressors.ternary import ternary as ternary
from gradcomp_jax.compressors.topk import topk as topk
