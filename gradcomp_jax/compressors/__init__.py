"""Encode and decode pairs, and the payloads that cross the wire."""

from gradcomp_jax.compressors.base import Compressor as Compressor
from gradcomp_jax.compressors.block_quantized import block_quantized as block_quantized
from gradcomp_jax.compressors.dense import dense as dense
from gradcomp_jax.compressors.ternary import ternary as ternary
from gradcomp_jax.compressors.topk import topk as topk

__all__ = [
    "Compressor",
    "block_quantized",
    "dense",
    "ternary",
    "topk",
]
