"""Recipes of the studies: methods with a part left out, another collective, narrower memories or more options."""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import optax

from gradcomp_jax import collectives
from gradcomp_jax.compressors import Compressor, block_quantized, topk
from gradcomp_jax.core import exchange
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.recipes import make_dgc, make_terngrad, with_bits
from gradcomp_jax.experiments.registered import Recipe, Transformation, after, make_registered, warm_up_stages
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.methods import dense
from gradcomp_jax.transforms.warm_up import Stages


def _clipped(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    """Makes dense bfloat16 whose mean gradient is clipped at the threshold of DGC's local clipping."""
    exchanged = dense(axis_name=settings.axis_name, dtype="bfloat16")
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    return after(optax.chain(exchanged, clip), settings)


def _dgc_gather(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    """Makes DGC by gather at 2 / N of the density, which sends as many bytes as two phases do."""
    fraction = 2 / settings.workers
    stages = tuple((steps, density * fraction) for steps, density in warm_up)
    return make_dgc(
        dataclasses.replace(settings, density=settings.density * fraction), stages, seed, collective="all_gather"
    )


def _collective(name: str) -> collectives.Collective:
    return collectives.AllGather() if name == "all_gather" else collectives.TwoPhase(cast(collectives.Remainder, name))


def _exchanged(
    settings: Settings, warm_up: Stages, seed: int, *, code: Callable[[float], Compressor], collective: str
) -> Transformation:
    """A code, made for the density, with error feedback, and the momentum after it."""
    crossed = exchange(code(settings.density), axis_name=settings.axis_name, collective=_collective(collective))
    return after(crossed, settings)


_topk = functools.partial(_exchanged, code=topk)
_int8 = functools.partial(_exchanged, code=lambda density: block_quantized())

OWN: dict[str, Recipe] = {
    "dense-bf16-clip": Recipe(_clipped, "dense bfloat16, the mean gradient clipped at DGC's threshold"),
    "terngrad-ternary": Recipe(functools.partial(make_terngrad, downlink="ternary"), "TernGrad, ternary downlink"),
    "terngrad-no-clip": Recipe(functools.partial(make_terngrad, clip=None), "TernGrad without clipping"),
    "dgc-no-correction": Recipe(
        functools.partial(make_dgc, momentum_correction=False),
        "DGC with a plain residual, and the momentum after the exchange",
        stages=warm_up_stages,
    ),
    "dgc-no-masking": Recipe(
        functools.partial(make_dgc, masking=False), "DGC without factor masking", stages=warm_up_stages
    ),
    "dgc-no-warm-up": Recipe(make_dgc, "DGC at its final density from the first step"),
    "dgc-no-clip": Recipe(
        functools.partial(make_dgc, clip_norm=None), "DGC without local clipping", stages=warm_up_stages
    ),
    "dgc-gather": Recipe(_dgc_gather, "DGC by gather, at the density that sends the same bytes", stages=warm_up_stages),
    "dgc-two-bits": Recipe(
        functools.partial(make_dgc, bits=2, pack_positions=True, block=4096, view="tree"),
        "DGC with values of two bits and packed positions, all leaves together",
        stages=warm_up_stages,
    ),
    "dgc-paper": Recipe(
        functools.partial(make_dgc, collective=_collective("all_gather")),
        "DGC by gather at its full density, as in the paper: whatever any worker sends is in the update",
        stages=warm_up_stages,
    ),
    "dgc-put-back": Recipe(
        functools.partial(make_dgc, collective=_collective("put_back")),
        "DGC whose workers take back all that owners do not keep",
        stages=warm_up_stages,
    ),
    "topk-gather": Recipe(
        functools.partial(_exchanged, code=lambda density: topk(density / 4), collective="all_gather"),
        "top-k with a residual, by gather at the same bytes",
    ),
    "topk-put-back": Recipe(functools.partial(_topk, collective="put_back"), "top-k with a residual, in two phases"),
    "topk-server": Recipe(functools.partial(_topk, collective="server"), "the same with a server residual"),
    "int8-gather": Recipe(functools.partial(_int8, collective="all_gather"), "block int8 with a residual, by gather"),
    "int8-put-back": Recipe(
        functools.partial(_int8, collective="put_back"), "block int8 with a residual, in two phases"
    ),
    "int8-server": Recipe(functools.partial(_int8, collective="server"), "the same with a server residual"),
}

_NARROW = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}

OWN |= {
    f"dgc-{short}-memory": Recipe(
        functools.partial(make_dgc, memory_dtype=dtype), f"DGC with its memories in {dtype}", stages=warm_up_stages
    )
    for short, dtype in _NARROW.items()
}
OWN |= {
    f"topk-sgd-{short}-memory": Recipe(
        functools.partial(make_registered, name="topk_sgd", memory_dtype=dtype), f"top-k with its memory in {dtype}"
    )
    for short, dtype in _NARROW.items()
}
OWN |= {f"eden-{bits}-bit": with_bits("eden", bits) for bits in (1, 2)}

RECIPES = recipes.RECIPES | OWN
"""Those of the package among them."""

COLLECTIVES = (
    "dense-bf16",
    "dgc",
    *(name for name in RECIPES if name.rpartition("-")[2] in ("gather", "back", "server")),
)

MEMORIES = (
    "dense-bf16",
    *(name for of in ("dgc", "topk-sgd") for name in (of, *(f"{of}-{x}-memory" for x in _NARROW))),
)
"""Memories in float32, in two bytes and in one."""

ABLATIONS = ("dense-bf16", "dgc", *(name for name in RECIPES if name.startswith("dgc-no-")))

GROUPS = {"ablations": ABLATIONS, "collectives": COLLECTIVES, "memories": MEMORIES}
"""By the name that stands for them."""
