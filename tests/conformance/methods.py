"""Every method that must conform. A new method adds one line here."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import optax

import gradcomp_jax as gc
from gradcomp_jax.transforms import everything

Law = Literal["mean", "unbiased", "residual", "momentum"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, and what must hold of it.

    Attributes:
        make: ``make(axis_name)`` builds the transformation.
        law: what must hold in every step.
        tolerance: of a mean, relative to the largest gradient.
        nesterov: which form of momentum.
        whole_tree: whether every leaf is compressed, not only those with two or more dimensions.
        wire: what crosses between 8 workers: compressor and route of the compressed leaves.
        rest: and of the others.
    """

    make: Callable[[Any], optax.GradientTransformationExtraArgs]
    law: Law
    wire: tuple[gc.compressors.Compressor, str]
    rest: tuple[gc.compressors.Compressor, str] = (gc.compressors.dense(), "sum")
    tolerance: float = 1e-6
    nesterov: bool = False
    whole_tree: bool = False


topk = gc.compressors.topk
quantized = gc.compressors.block_quantized
two_phase = gc.collectives.two_phase

ternary = gc.compressors.ternary
own_ternary = ternary(share_scale=False, down="ternary", granularity="bucket", bucket_size=100)
dense = gc.compressors.dense
BF16 = (dense(jnp.bfloat16), "two_phase")

METHODS: dict[str, Case] = {
    "dense-f32": Case(lambda axis: gc.dense(axis_name=axis), "mean", (dense(), "sum"), whole_tree=True),
    "dense-bf16": Case(
        lambda axis: gc.dense(axis_name=axis, dtype=jnp.bfloat16), "mean", BF16, tolerance=2**-7, whole_tree=True
    ),
    "dense-bf16-sum": Case(
        lambda axis: gc.dense(axis_name=axis, dtype=jnp.bfloat16, route="sum"),
        "mean",
        (dense(jnp.bfloat16), "sum"),
        tolerance=2**-6,
        whole_tree=True,
    ),
    "terngrad": Case(
        lambda axis: gc.terngrad(axis_name=axis, bucket_size=160), "unbiased", (ternary(bucket_size=160), "two_phase")
    ),
    "terngrad-ternary": Case(
        lambda axis: gc.terngrad(axis_name=axis, down="ternary"), "unbiased", (ternary(down="ternary"), "two_phase")
    ),
    "terngrad-bucket": Case(
        lambda axis: gc.terngrad(axis_name=axis, granularity="bucket", bucket_size=64, clip=None),
        "unbiased",
        (ternary(granularity="bucket", bucket_size=64, clip=None), "two_phase"),
    ),
    "terngrad-own-scale": Case(
        lambda axis: gc.terngrad(axis_name=axis, share_scale=False, down="ternary", route="gather"),
        "unbiased",
        (ternary(share_scale=False, down="ternary"), "gather"),
    ),
    "terngrad-sum": Case(
        lambda axis: gc.terngrad(axis_name=axis, route="sum"), "unbiased", (ternary(packing="int8"), "sum")
    ),
    "terngrad-whole-tree": Case(
        lambda axis: gc.terngrad(axis_name=axis, select=everything),
        "unbiased",
        (ternary(), "two_phase"),
        whole_tree=True,
    ),
    "dgc": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, clip_norm=1e6), "momentum", (topk(0.02), "two_phase"), BF16
    ),
    "dgc-nesterov": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, nesterov=True, back_density=0.05),
        "momentum",
        (topk(0.02, back_density=0.05), "two_phase"),
        BF16,
        nesterov=True,
    ),
    "dgc-gather": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, route="gather", dtype=jnp.float32),
        "momentum",
        (topk(0.02, dtype=jnp.float32), "gather"),
    ),
    "dgc-no-masking": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, masking=False), "momentum", (topk(0.02), "two_phase"), BF16
    ),
    "dgc-warm-up": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.01, warm_up=gc.warm_up(1, (0.25, 0.05))),
        "momentum",
        (topk(0.01), "two_phase"),
        BF16,
    ),
    "dgc-whole-tree": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.1, block=64, select=everything),
        "momentum",
        (topk(0.1, block=64), "two_phase"),
        whole_tree=True,
    ),
    "topk-gather": Case(lambda axis: gc.exchange(topk(0.02), axis_name=axis), "residual", (topk(0.02), "gather")),
    "topk-put-back": Case(
        lambda axis: gc.exchange(topk(0.1, block=100), axis_name=axis, route="two_phase"),
        "residual",
        (topk(0.1, block=100), "two_phase"),
    ),
    "topk-int8": Case(
        lambda axis: gc.exchange(topk(0.1, block=100, dtype=jnp.int8), axis_name=axis, route="two_phase"),
        "residual",
        (topk(0.1, block=100, dtype=jnp.int8), "two_phase"),
    ),
    "topk-server": Case(
        lambda axis: gc.exchange(topk(0.02), axis_name=axis, route=two_phase("server")),
        "residual",
        (topk(0.02), "two_phase"),
    ),
    "ternary-residual": Case(
        lambda axis: gc.exchange(own_ternary, axis_name=axis, route=two_phase("server")),
        "residual",
        (own_ternary, "two_phase"),
    ),
    "int8-gather": Case(
        lambda axis: gc.exchange(quantized(), axis_name=axis, route="gather"), "residual", (quantized(), "gather")
    ),
    "int8-put-back": Case(
        lambda axis: gc.exchange(quantized(block=50), axis_name=axis, route="two_phase"),
        "residual",
        (quantized(block=50), "two_phase"),
    ),
    "int4-put-back": Case(
        lambda axis: gc.exchange(quantized(bits=4, block=50), axis_name=axis, route="two_phase"),
        "residual",
        (quantized(bits=4, block=50), "two_phase"),
    ),
    "int8-server": Case(
        lambda axis: gc.exchange(quantized(), axis_name=axis, route=two_phase("server"), dense_compressor=BF16[0]),
        "residual",
        (quantized(), "two_phase"),
        BF16,
    ),
}
