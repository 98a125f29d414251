"""Every method that must conform. A new method adds one line here."""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import optax

import gradcomp_jax as gc
from gradcomp_jax.compressors.low_rank import low_rank_direction
from gradcomp_jax.methods import registry

FEW = ("dense_bf16", "dense-bf16", "terngrad", "dgc", "powersgd")
"""Methods of which the README's line asks what many methods are asked: a cast, by both its names; a shared statistic; a
selection with owners and momentum; a sum."""

KEEP = ("dgc", "powersgd")
"""Of the few those that keep something."""

SOME = (*FEW, "topk_sgd", "block_quantized", "one_bit_adam", "eden")
"""One for each kind of memory and of statistic."""

VARIANTS = (
    *("terngrad-sum", "dgc-whole-tree", "topk-put-back", "topk-server", "int8-gather", "random_k-sum", "demo-signed"),
    "sparcml-doubling",
)
"""Of the other forms of a method those that exercise what no registered method does."""

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
dense, sign, ternary, topk = codes.dense, codes.sign, codes.ternary, codes.topk
quantized = codes.block_quantized
two_phase = gc.collectives.TwoPhase
own_ternary = ternary(share_scale=False, downlink="ternary", granularity="bucket", bucket_size=100)
packed = topk(0.03, block=300, bits=2, pack_positions=True)
f32, bf16 = jnp.float32, jnp.bfloat16


def of(
    method: Callable[..., Any],
    law: Law,
    code: Code,
    over: str | None = None,
    half: bool = False,
    about: Mapping[str, Any] = types.MappingProxyType({}),
    **options: Any,
) -> Case:
    """A method with its options. ``over`` is the collective, where no option says it; with ``half`` others cross as a half."""
    over = over or options.get("collective", "two_phase")
    wire = code, over if isinstance(over, str) else "two_phase"
    rest = (dense(bf16), "two_phase") if half else (dense(), "all_reduce")
    return Case(lambda axis: method(axis_name=axis, **options), law, wire, rest, **about)


def own(code: Code, collective: Any, compressor: Any = None, half: bool = False, **options: Any) -> Case:
    """A code in an exchange of one's own, with error feedback."""
    about = {"whole_tree": options.get("mask", False)}
    exchange = functools.partial(gc.exchange, compressor or code)
    return of(exchange, "residual", code, half=half, about=about, collective=collective, **options)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


WHOLE = {"whole_tree": True}

METHODS: dict[str, Case] = {
    "dense": of(gc.dense, "mean", dense(), "all_reduce", about=WHOLE),
    "dense-bf16": of(gc.dense, "mean", dense(bf16), about={"tolerance": 2**-7, **WHOLE}, dtype=bf16),
    "dense-bf16-sum": of(
        gc.dense, "mean", dense(bf16), about={"tolerance": 2**-6, **WHOLE}, dtype=bf16, collective="all_reduce"
    ),
    "terngrad": of(gc.terngrad, "unbiased", ternary(bucket_size=160), bucket_size=160),
    "terngrad-ternary": of(gc.terngrad, "unbiased", ternary(downlink="ternary"), downlink="ternary"),
    "terngrad-bucket": of(
        gc.terngrad,
        "unbiased",
        ternary(granularity="bucket", bucket_size=64, clip=None),
        **{"granularity": "bucket", "bucket_size": 64, "clip": None},
    ),
    "terngrad-own-scale": of(
        gc.terngrad,
        "unbiased",
        ternary(share_scale=False, downlink="ternary"),
        **{"share_scale": False, "downlink": "ternary", "collective": "all_gather"},
    ),
    "terngrad-sum": of(gc.terngrad, "unbiased", ternary(packing="int8"), collective="all_reduce"),
    "terngrad-whole-tree": of(gc.terngrad, "unbiased", ternary(), about=WHOLE, mask=True),
    "dgc": of(gc.dgc, "momentum", topk(0.02), half=True, density=0.02, clip_norm=1e6),
    "dgc-nesterov": of(
        gc.dgc,
        "momentum",
        topk(0.02, downlink_density=0.05),
        half=True,
        about={"nesterov": True},
        **{"density": 0.02, "nesterov": True, "downlink_density": 0.05},
    ),
    "dgc-gather": of(gc.dgc, "momentum", topk(0.02, dtype=f32), density=0.02, collective="all_gather", dtype=f32),
    "dgc-no-masking": of(gc.dgc, "momentum", topk(0.02), half=True, density=0.02, masking=False),
    "dgc-warm-up": of(gc.dgc, "momentum", topk(0.01), half=True, density=0.01, warm_up=gc.warm_up(1, (0.25, 0.05))),
    "dgc-whole-tree": of(gc.dgc, "momentum", topk(0.1, block=64), about=WHOLE, density=0.1, block=64, mask=True),
    "topk-gather": own(topk(0.02), "all_gather"),
    "topk-put-back": own(topk(0.1, block=100), two_phase("put_back")),
    "topk-int8": own(topk(0.1, block=100, dtype=jnp.int8), "two_phase"),
    "topk-packed-whole-tree": own(packed, "two_phase", mask=True),
    "topk-packed": own(packed, "all_gather"),
    "topk-server": own(topk(0.02), two_phase("server")),
    "ternary-residual": own(own_ternary, two_phase("server")),
    "int8-gather": own(quantized(), "all_gather"),
    "int8-put-back": own(quantized(block=50), "two_phase"),
    "int4-put-back": own(quantized(bits=4, block=50), "two_phase"),
    "e3m0-put-back": own(quantized(bits=4, block=50, format="e3m0"), "two_phase"),
    "mxfp8-put-back": own(quantized(format="mxfp8"), "two_phase"),
    "mxfp4-gather": own(quantized(format="mxfp4"), "all_gather"),
    "nvfp4": of(gc.block_quantized, "residual", quantized(format="nvfp4"), format="nvfp4"),
    "int8-server": own(quantized(), two_phase("server"), half=True, dense_compressor=dense(bf16)),
    "gradient_dropping": of(gc.gradient_dropping, "residual", topk(0.02), about={"view": "tree"}, density=0.02),
    "topk_sgd": of(gc.topk_sgd, "residual", topk(0.02), density=0.02),
    "random_k": of(gc.random_k, "residual", codes.random_k(0.05), density=0.05),
    "random_k-sum": of(
        gc.random_k,
        "residual",
        codes.random_k(0.1, block=100, dtype=f32),
        "all_reduce",
        **{"density": 0.1, "block": 100, "dtype": f32},
    ),
    "random_k-unbiased": of(
        gc.random_k,
        "unbiased",
        codes.random_k(0.25, block=64, rescale=True),
        about={"outruns": 4},
        **{"density": 0.25, "block": 64, "error_feedback": False},
    ),
    "one_bit_sgd": of(
        gc.one_bit_sgd, "residual", lambda shape: sign("means", block=math.prod(shape[:-1])), about={"view": "columns"}
    ),
    "one_bit_sgd-block": of(gc.one_bit_sgd, "residual", sign("means", block=100), granularity="block", block=100),
    # Its two encodings may each round up by a step of a seventh.
    "qsgd": of(gc.qsgd, "unbiased", quantized(bits=4, block=512, stochastic=True), about={"outruns": 8 / 7}),
    "qsgd-l2": of(
        gc.qsgd,
        "unbiased",
        quantized(bits=2, block=64, stochastic=True, norm="l2"),
        about={"outruns": 8},
        **{"bits": 2, "norm": "l2", "bucket_size": 64, "collective": "all_gather"},
    ),
    "stochastic_rounding": of(
        gc.stochastic_rounding, "unbiased", codes.fixed_point(fraction_bits=7), about={"outruns": 1.05}, fraction_bits=7
    ),
    "fp8": of(gc.fp8, "residual", codes.float8()),
    "fp8-cast": of(
        gc.fp8,
        "mean",
        codes.float8("e5m2", scaled=False, block=100),
        about={"tolerance": 2**-2},
        **{"format": "e5m2", "scaled": False, "error_feedback": False, "block": 100},
    ),
    "block_quantized": of(gc.block_quantized, "residual", quantized()),
    "sign_sgd": of(gc.sign_sgd, "vote", sign("unit", block=100), block=100),
    "sign_sgd-gather": of(gc.sign_sgd, "vote", sign("unit"), collective="all_gather"),
    "ef_sign_sgd": of(gc.ef_sign_sgd, "residual", sign("l1", block=128), block=128),
    "one_bit_adam": of(gc.one_bit_adam, "adam", sign("l1", block=100), warm_up_steps=2, block=100),
    "powersgd": of(
        gc.powersgd, "residual", lambda shape: codes.low_rank(2, rows_and_columns(shape)), "all_reduce", rank=2
    ),
    "dion": of(
        gc.dion,
        "low-rank direction",
        lambda shape: low_rank_direction(2, rows_and_columns(shape)),
        "all_reduce",
        rank=2,
    ),
    "eden": of(gc.eden, "unbiased", codes.rotated(4, block=256), about={"outruns": 2}, block=256),
    "drive": of(
        gc.eden,
        "residual",
        codes.rotated(1, block=64, unbiased=False),
        **{"bits": 1, "block": 64, "error_feedback": True, "collective": "all_gather"},
    ),
    "ef21": of(gc.ef21, "estimate", topk(0.05), density=0.05),
    "demo": of(
        gc.demo,
        "residual",
        codes.in_frequency(topk(0.05, block=256)),
        "all_gather",
        about={"decay": 0.999},
        **{"density": 0.05, "block": 256, "signed": False},
    ),
    "demo-signed": of(
        gc.demo, "vote", codes.in_frequency(topk(0.05, block=256)), "all_gather", density=0.05, block=256
    ),
    "sparcml": of(gc.sparcml, "residual", topk(0.02, dtype=f32, downlink="union"), density=0.02),
    "sparcml-whole": of(
        gc.sparcml, "residual", topk(0.25, block=64, downlink="union"), density=0.25, block=64, dtype="bfloat16"
    ),
    "sparcml-int8": of(
        gc.sparcml,
        "residual",
        topk(0.1, block=100, dtype=f32, downlink=quantized(block=100)),
        **{"density": 0.1, "block": 100, "downlink": "int8"},
    ),
    "sparcml-doubling": of(
        gc.sparcml,
        "residual",
        topk(0.1, block=100, dtype=f32),
        "recursive_doubling",
        **{"density": 0.1, "block": 100, "algorithm": "recursive_doubling"},
    ),
    "policy": own(
        lambda shape: topk(0.1) if shape == (4, 5, 30) else quantized(block=64),
        "two_phase",
        gc.by_size({0: "dense", 600: gc.by_path("half", topk(0.1), otherwise=quantized(block=64))}),
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
