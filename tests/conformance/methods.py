"""Every method that must conform. A new method adds one line here."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import optax

import gradcomp_jax as gc
from gradcomp_jax.compressors.low_rank import low_rank_direction
from gradcomp_jax.methods import registry

Law = Literal["mean", "unbiased", "residual", "momentum", "estimate", "vote", "adam", "low-rank direction"]
Code = gc.compressors.Compressor | Callable[[tuple[int, ...]], gc.compressors.Compressor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, and what must hold of it.

    Attributes:
        make: ``make(axis_name)`` builds the transformation.
        law: what must hold in every step.
        tolerance: of a mean, relative to the largest gradient.
        nesterov: which form of momentum.
        decay: of the residual.
        outruns: how far an unbiased code may exceed the largest gradient, as a factor.
        whole_tree: whether every leaf is compressed, not only those with two or more dimensions.
        wire: what crosses between 8 workers: compressor (or what makes one for a shape) and collective of the compressed
            leaves. A registered method without a case of its own has none: its bytes are then what its exchange says of itself.
        rest: and of the others.
        view: how leaves are cut into rows.
        is_sparsifier: of a method without ``wire``: whether it deals entries out over blocks of 1024, as sparsifiers do by
            default.
    """

    make: Callable[[Any], optax.GradientTransformationExtraArgs]
    law: Law
    wire: tuple[Code, str] | None
    rest: tuple[gc.compressors.Compressor, str] = (gc.compressors.dense(), "all_reduce")
    tolerance: float = 1e-6
    nesterov: bool = False
    whole_tree: bool = False
    decay: float = 1.0
    outruns: float = 1.0
    view: Literal["rows", "columns", "tree"] = "rows"
    is_sparsifier: bool = False

    def code(self, shape: tuple[int, ...]) -> gc.compressors.Compressor:
        """The compressor of a compressed leaf."""
        code = self.wire[0]
        return code if isinstance(code, gc.compressors.Compressor) else code(shape)


codes = gc.compressors
topk = gc.compressors.topk
quantized = gc.compressors.block_quantized
two_phase = gc.collectives.TwoPhase

ternary = gc.compressors.ternary
own_ternary = ternary(share_scale=False, downlink="ternary", granularity="bucket", bucket_size=100)
dense = gc.compressors.dense
BF16 = (dense(jnp.bfloat16), "two_phase")

METHODS: dict[str, Case] = {
    "dense": Case(lambda axis: gc.dense(axis_name=axis), "mean", (dense(), "all_reduce"), whole_tree=True),
    "dense-bf16": Case(
        lambda axis: gc.dense(axis_name=axis, dtype=jnp.bfloat16), "mean", BF16, tolerance=2**-7, whole_tree=True
    ),
    "dense-bf16-sum": Case(
        lambda axis: gc.dense(axis_name=axis, dtype=jnp.bfloat16, collective="all_reduce"),
        "mean",
        (dense(jnp.bfloat16), "all_reduce"),
        tolerance=2**-6,
        whole_tree=True,
    ),
    "terngrad": Case(
        lambda axis: gc.terngrad(axis_name=axis, bucket_size=160), "unbiased", (ternary(bucket_size=160), "two_phase")
    ),
    "terngrad-ternary": Case(
        lambda axis: gc.terngrad(axis_name=axis, downlink="ternary"),
        "unbiased",
        (ternary(downlink="ternary"), "two_phase"),
    ),
    "terngrad-bucket": Case(
        lambda axis: gc.terngrad(axis_name=axis, granularity="bucket", bucket_size=64, clip=None),
        "unbiased",
        (ternary(granularity="bucket", bucket_size=64, clip=None), "two_phase"),
    ),
    "terngrad-own-scale": Case(
        lambda axis: gc.terngrad(axis_name=axis, share_scale=False, downlink="ternary", collective="all_gather"),
        "unbiased",
        (ternary(share_scale=False, downlink="ternary"), "all_gather"),
    ),
    "terngrad-sum": Case(
        lambda axis: gc.terngrad(axis_name=axis, collective="all_reduce"),
        "unbiased",
        (ternary(packing="int8"), "all_reduce"),
    ),
    "terngrad-whole-tree": Case(
        lambda axis: gc.terngrad(axis_name=axis, mask=True),
        "unbiased",
        (ternary(), "two_phase"),
        whole_tree=True,
    ),
    "dgc": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, clip_norm=1e6), "momentum", (topk(0.02), "two_phase"), BF16
    ),
    "dgc-nesterov": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, nesterov=True, downlink_density=0.05),
        "momentum",
        (topk(0.02, downlink_density=0.05), "two_phase"),
        BF16,
        nesterov=True,
    ),
    "dgc-gather": Case(
        lambda axis: gc.dgc(axis_name=axis, density=0.02, collective="all_gather", dtype=jnp.float32),
        "momentum",
        (topk(0.02, dtype=jnp.float32), "all_gather"),
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
        lambda axis: gc.dgc(axis_name=axis, density=0.1, block=64, mask=True),
        "momentum",
        (topk(0.1, block=64), "two_phase"),
        whole_tree=True,
    ),
    "topk-gather": Case(lambda axis: gc.exchange(topk(0.02), axis_name=axis), "residual", (topk(0.02), "all_gather")),
    "topk-put-back": Case(
        lambda axis: gc.exchange(topk(0.1, block=100), axis_name=axis, collective=two_phase("put_back")),
        "residual",
        (topk(0.1, block=100), "two_phase"),
    ),
    "topk-int8": Case(
        lambda axis: gc.exchange(topk(0.1, block=100, dtype=jnp.int8), axis_name=axis, collective="two_phase"),
        "residual",
        (topk(0.1, block=100, dtype=jnp.int8), "two_phase"),
    ),
    "topk-packed-whole-tree": Case(
        lambda axis: gc.exchange(
            topk(0.03, block=300, bits=2, pack_positions=True), axis_name=axis, collective="two_phase", mask=True
        ),
        "residual",
        (topk(0.03, block=300, bits=2, pack_positions=True), "two_phase"),
        whole_tree=True,
    ),
    "topk-packed": Case(
        lambda axis: gc.exchange(
            topk(0.03, block=300, bits=2, pack_positions=True), axis_name=axis, collective="all_gather"
        ),
        "residual",
        (topk(0.03, block=300, bits=2, pack_positions=True), "all_gather"),
    ),
    "topk-server": Case(
        lambda axis: gc.exchange(topk(0.02), axis_name=axis, collective=two_phase("server")),
        "residual",
        (topk(0.02), "two_phase"),
    ),
    "ternary-residual": Case(
        lambda axis: gc.exchange(own_ternary, axis_name=axis, collective=two_phase("server")),
        "residual",
        (own_ternary, "two_phase"),
    ),
    "int8-gather": Case(
        lambda axis: gc.exchange(quantized(), axis_name=axis, collective="all_gather"),
        "residual",
        (quantized(), "all_gather"),
    ),
    "int8-put-back": Case(
        lambda axis: gc.exchange(quantized(block=50), axis_name=axis, collective="two_phase"),
        "residual",
        (quantized(block=50), "two_phase"),
    ),
    "int4-put-back": Case(
        lambda axis: gc.exchange(quantized(bits=4, block=50), axis_name=axis, collective="two_phase"),
        "residual",
        (quantized(bits=4, block=50), "two_phase"),
    ),
    "e3m0-put-back": Case(
        lambda axis: gc.exchange(quantized(bits=4, block=50, format="e3m0"), axis_name=axis, collective="two_phase"),
        "residual",
        (quantized(bits=4, block=50, format="e3m0"), "two_phase"),
    ),
    "int8-server": Case(
        lambda axis: gc.exchange(quantized(), axis_name=axis, collective=two_phase("server"), dense_compressor=BF16[0]),
        "residual",
        (quantized(), "two_phase"),
        BF16,
    ),
    "gradient_dropping": Case(
        lambda axis: gc.gradient_dropping(axis_name=axis, density=0.02),
        "residual",
        (topk(0.02), "two_phase"),
        view="tree",
    ),
    "topk_sgd": Case(lambda axis: gc.topk_sgd(axis_name=axis, density=0.02), "residual", (topk(0.02), "two_phase")),
    "random_k": Case(
        lambda axis: gc.random_k(axis_name=axis, density=0.05), "residual", (codes.random_k(0.05), "two_phase")
    ),
    "random_k-sum": Case(
        lambda axis: gc.random_k(axis_name=axis, density=0.1, block=100, dtype=jnp.float32),
        "residual",
        (codes.random_k(0.1, block=100, dtype=jnp.float32), "all_reduce"),
    ),
    "random_k-unbiased": Case(
        lambda axis: gc.random_k(axis_name=axis, density=0.25, block=64, error_feedback=False),
        "unbiased",
        (codes.random_k(0.25, block=64, rescale=True), "two_phase"),
        outruns=4,
    ),
    "one_bit_sgd": Case(
        lambda axis: gc.one_bit_sgd(axis_name=axis),
        "residual",
        (lambda shape: codes.sign("means", block=math.prod(shape[:-1])), "two_phase"),
        view="columns",
    ),
    "one_bit_sgd-block": Case(
        lambda axis: gc.one_bit_sgd(axis_name=axis, granularity="block", block=100),
        "residual",
        (codes.sign("means", block=100), "two_phase"),
    ),
    "qsgd": Case(
        lambda axis: gc.qsgd(axis_name=axis),
        "unbiased",
        (quantized(bits=4, block=512, stochastic=True), "two_phase"),
        # Its two encodings may each round up by a step of a seventh.
        outruns=8 / 7,
    ),
    "qsgd-l2": Case(
        lambda axis: gc.qsgd(axis_name=axis, bits=2, norm="l2", bucket_size=64, collective="all_gather"),
        "unbiased",
        (quantized(bits=2, block=64, stochastic=True, norm="l2"), "all_gather"),
        outruns=8,
    ),
    "stochastic_rounding": Case(
        lambda axis: gc.stochastic_rounding(axis_name=axis, fraction_bits=7),
        "unbiased",
        (codes.fixed_point(fraction_bits=7), "two_phase"),
        outruns=1.05,
    ),
    "fp8": Case(lambda axis: gc.fp8(axis_name=axis), "residual", (codes.float8(), "two_phase")),
    "fp8-cast": Case(
        lambda axis: gc.fp8(axis_name=axis, format="e5m2", scaled=False, error_feedback=False, block=100),
        "mean",
        (codes.float8("e5m2", scaled=False, block=100), "two_phase"),
        tolerance=2**-2,
    ),
    "block_quantized": Case(lambda axis: gc.block_quantized(axis_name=axis), "residual", (quantized(), "two_phase")),
    "sign_sgd": Case(
        lambda axis: gc.sign_sgd(axis_name=axis, block=100), "vote", (codes.sign("unit", block=100), "two_phase")
    ),
    "sign_sgd-gather": Case(
        lambda axis: gc.sign_sgd(axis_name=axis, collective="all_gather"), "vote", (codes.sign("unit"), "all_gather")
    ),
    "ef_sign_sgd": Case(
        lambda axis: gc.ef_sign_sgd(axis_name=axis, block=128), "residual", (codes.sign("l1", block=128), "two_phase")
    ),
    "one_bit_adam": Case(
        lambda axis: gc.one_bit_adam(axis_name=axis, warm_up_steps=2, block=100),
        "adam",
        (codes.sign("l1", block=100), "two_phase"),
    ),
    "powersgd": Case(
        lambda axis: gc.powersgd(axis_name=axis, rank=2),
        "residual",
        (lambda shape: codes.low_rank(2, (math.prod(shape[:-1]), shape[-1])), "all_reduce"),
    ),
    "dion": Case(
        lambda axis: gc.dion(axis_name=axis, rank=2),
        "low-rank direction",
        (lambda shape: low_rank_direction(2, (math.prod(shape[:-1]), shape[-1])), "all_reduce"),
    ),
    "eden": Case(
        lambda axis: gc.eden(axis_name=axis, block=256),
        "unbiased",
        (codes.rotated(4, block=256), "two_phase"),
        outruns=2,
    ),
    "drive": Case(
        lambda axis: gc.eden(axis_name=axis, bits=1, block=64, error_feedback=True, collective="all_gather"),
        "residual",
        (codes.rotated(1, block=64, unbiased=False), "all_gather"),
    ),
    "ef21": Case(lambda axis: gc.ef21(axis_name=axis, density=0.05), "estimate", (topk(0.05), "two_phase")),
    "demo": Case(
        lambda axis: gc.demo(axis_name=axis, density=0.05, block=256, signed=False),
        "residual",
        (codes.in_frequency(topk(0.05, block=256)), "all_gather"),
        decay=0.999,
    ),
    "demo-signed": Case(
        lambda axis: gc.demo(axis_name=axis, density=0.05, block=256),
        "vote",
        (codes.in_frequency(topk(0.05, block=256)), "all_gather"),
    ),
    "sparcml": Case(
        lambda axis: gc.sparcml(axis_name=axis, density=0.02),
        "residual",
        (topk(0.02, dtype=jnp.float32, downlink="union"), "two_phase"),
    ),
    "sparcml-whole": Case(
        lambda axis: gc.sparcml(axis_name=axis, density=0.25, block=64, dtype="bfloat16"),
        "residual",
        (topk(0.25, block=64, downlink="union"), "two_phase"),
    ),
    "sparcml-int8": Case(
        lambda axis: gc.sparcml(axis_name=axis, density=0.1, block=100, downlink="int8"),
        "residual",
        (topk(0.1, block=100, dtype=jnp.float32, downlink=quantized(block=100)), "two_phase"),
    ),
    "sparcml-doubling": Case(
        lambda axis: gc.sparcml(axis_name=axis, density=0.1, block=100, algorithm="recursive_doubling"),
        "residual",
        (topk(0.1, block=100, dtype=jnp.float32), "recursive_doubling"),
    ),
    "policy": Case(
        lambda axis: gc.exchange(
            gc.by_size({0: "dense", 600: gc.by_path("half", topk(0.1), otherwise=quantized(block=64))}),
            axis_name=axis,
            collective="two_phase",
        ),
        "residual",
        (lambda shape: topk(0.1) if shape == (4, 5, 30) else quantized(block=64), "two_phase"),
    ),
}

LAWS: dict[str, Law] = {"nothing": "unbiased", "residual": "residual", "momentum": "momentum", "estimate": "estimate"}


def plain_case(method: registry.Method) -> Case:
    """What must hold of a registered method about which nothing else is said."""
    law = {"sign": "vote", "direction": "adam"}.get(method.update, LAWS[method.kept])
    is_sparsifier = "density" in inspect.signature(method.make).parameters
    return Case(lambda axis: method.build(axis_name=axis), law, None, outruns=math.inf, is_sparsifier=is_sparsifier)


METHODS |= {
    name: plain_case(method)
    for name, method in registry.METHODS.items()
    if not any(case.partition("-")[0] == name.partition("_bf16")[0] for case in METHODS)
}
