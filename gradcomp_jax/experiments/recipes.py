"""The methods that can be compared, each as an optax chain that takes per-device gradients.

Recipes train with the same momentum and learning rate, but for the few whose updates have another length
(``registered.RATES``). What differs is how the gradient crosses the axis and, for DGC, where the momentum lives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import optax

from gradcomp_jax import collectives
from gradcomp_jax._errors import SettingError, look_up
from gradcomp_jax.compressors import Compressor, block_quantized, ternary, topk
from gradcomp_jax.compressors import dense as dense_code
from gradcomp_jax.core import exchange, masks
from gradcomp_jax.experiments.models import CLASSIFIER
from gradcomp_jax.experiments.registered import (
    Recipe,
    Transformation,
    after,
    dense_stage,
    make_registered,
    seeded,
    summary,
    warm_up_stages,
)
from gradcomp_jax.experiments.replicas import REPLICA_RECIPES
from gradcomp_jax.experiments.settings import CountedSettings, Settings
from gradcomp_jax.methods import dense, dgc, sparse_adamw, terngrad
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.transforms.warm_up import Stages


def build(method: str, settings: Settings, steps_per_epoch: int, *, seed: int = 0) -> Transformation:
    """Makes the transformation of a name of :data:`RECIPES`, whose warm-up goes by epochs.

    The seed of random rounding is part of the state: transformations that differ in nothing but their seed have states of one
    structure and the same ``update``, so a step that was compiled with one of them runs with the state of another.

    Raises:
      UnknownNameError: if there is no such method.
      SettingError: if the method cannot run with these settings.
    """
    recipe = look_up("method", method, RECIPES)
    counted = CountedSettings(**dataclasses.asdict(settings), steps=settings.epochs * steps_per_epoch)
    try:
        return recipe.make(counted, recipe.warm_up(settings, steps_per_epoch), seed)
    except ValueError as error:
        raise SettingError(f"{method}: {error}") from error


def _clipped(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    """Makes dense bfloat16 whose mean gradient is clipped at the threshold of DGC's local clipping."""
    exchanged = dense(axis_name=settings.axis_name, dtype="bfloat16")
    clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
    return after(optax.chain(exchanged, clip), settings)


def _terngrad(
    settings: Settings,
    warm_up: Stages,
    seed: int,
    *,
    downlink: Literal["exact", "ternary"] = "exact",
    clip: float | None = 2.5,
) -> Transformation:
    # The paper's practice: the last classification layer stays dense.
    mask = masks.without(CLASSIFIER, masks.gains(ternary(downlink=downlink), dense_code()))
    make = functools.partial(terngrad, axis_name=settings.axis_name, downlink=downlink, clip=clip, mask=mask)
    return after(seeded(make, seed), settings)


def _dgc(settings: Settings, warm_up: Stages, seed: int, **ablation: Any) -> Transformation:
    """DGC with some of its options replaced; the momentum is inside, so plain SGD follows; before Adam there is none."""
    if settings.optimizer == "adamw":
        ablation["momentum"] = 0.0
    options = {
        "axis_name": settings.axis_name,
        "density": settings.density,
        "momentum": settings.momentum,
        "clip_norm": settings.clip_norm,
        "warm_up": warm_up,
        **ablation,
    }
    return after(dgc(**options), dataclasses.replace(settings, momentum=0.0))


def _dgc_gather(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    """Makes DGC by gather at 2 / N of the density, which sends as many bytes as two phases do."""
    fraction = 2 / settings.workers
    stages = tuple((steps, density * fraction) for steps, density in warm_up)
    return _dgc(
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


def _sparse_adamw(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    if settings.optimizer != "adamw":
        raise SettingError(
            f"AdamW is a part of it, and this task trains with {settings.optimizer}: take one that trains with AdamW, such as"
            " --task language-model, or the method topk-sgd"
        )
    return sparse_adamw(settings.rate(), axis_name=settings.axis_name, density=settings.density)


_topk = functools.partial(_exchanged, code=topk)
_int8 = functools.partial(_exchanged, code=lambda density: block_quantized())

RECIPES: dict[str, Recipe] = {
    "dense": Recipe(functools.partial(make_registered, name="dense"), "float32 all-reduce"),
    "dense-bf16": Recipe(functools.partial(make_registered, name="dense_bf16"), "bfloat16 on the wire, float32 sums"),
    "dense-bf16-clip": Recipe(_clipped, "dense bfloat16, the mean gradient clipped at DGC's threshold"),
    "terngrad": Recipe(_terngrad, "TernGrad, exact downlink, last layer dense"),
    "terngrad-ternary": Recipe(functools.partial(_terngrad, downlink="ternary"), "TernGrad, ternary downlink"),
    "terngrad-no-clip": Recipe(functools.partial(_terngrad, clip=None), "TernGrad without clipping"),
    "dgc": Recipe(_dgc, "Deep Gradient Compression, complete", stages=warm_up_stages),
    "dgc-no-correction": Recipe(
        functools.partial(_dgc, momentum_correction=False),
        "DGC with a plain residual, and the momentum after the exchange",
        stages=warm_up_stages,
    ),
    "dgc-no-masking": Recipe(
        functools.partial(_dgc, masking=False), "DGC without factor masking", stages=warm_up_stages
    ),
    "dgc-no-warm-up": Recipe(_dgc, "DGC at its final density from the first step"),
    "dgc-no-clip": Recipe(functools.partial(_dgc, clip_norm=None), "DGC without local clipping", stages=warm_up_stages),
    "dgc-gather": Recipe(_dgc_gather, "DGC by gather, at the density that sends the same bytes", stages=warm_up_stages),
    "dgc-paper": Recipe(
        functools.partial(_dgc, collective=_collective("all_gather")),
        "DGC by gather at its full density, as in the paper: whatever any worker sends is in the update",
        stages=warm_up_stages,
    ),
    "dgc-put-back": Recipe(
        functools.partial(_dgc, collective=_collective("put_back")),
        "DGC whose workers take back all that owners do not keep",
        stages=warm_up_stages,
    ),
    "sparse-adamw": Recipe(_sparse_adamw, "AdamW after the largest entries, in two bits each; of tasks with AdamW"),
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

RECIPES |= {
    command_name(name): Recipe(
        functools.partial(make_registered, name=name), summary(method), stages=functools.partial(dense_stage, name=name)
    )
    for name, method in METHODS.items()
    if command_name(name) not in RECIPES
}

_NARROW = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}

RECIPES |= {
    f"dgc-{short}-memory": Recipe(
        functools.partial(_dgc, memory_dtype=dtype), f"DGC with its memories in {dtype}", stages=warm_up_stages
    )
    for short, dtype in _NARROW.items()
}
RECIPES |= {
    f"topk-sgd-{short}-memory": Recipe(
        functools.partial(make_registered, name="topk_sgd", memory_dtype=dtype), f"top-k with its memory in {dtype}"
    )
    for short, dtype in _NARROW.items()
}

RECIPES |= {
    f"{command_name(name)}-{bits}-bit": Recipe(
        functools.partial(make_registered, name=name, bits=bits), f"{summary(METHODS[name])}; {bits} bits a value"
    )
    for name, bits in (("block_quantized", 4), ("eden", 1), ("eden", 2))
}

RECIPES |= REPLICA_RECIPES

COLLECTIVES = (
    "dense-bf16",
    "dgc",
    *(name for name in RECIPES if name.rpartition("-")[2] in ("gather", "back", "server")),
)
ALL = tuple(map(command_name, METHODS))
"""One recipe for each registered method, both baselines among them."""

MEMORIES = (
    "dense-bf16",
    *(name for of in ("dgc", "topk-sgd") for name in (of, *(f"{of}-{x}-memory" for x in _NARROW))),
)
"""Memories in float32, in two bytes and in one."""

REPLICAS = ("dense", *REPLICA_RECIPES)
"""Whatever is not synchronous, beside what is."""

ABLATIONS = ("dense-bf16", "dgc", *(name for name in RECIPES if name.startswith("dgc-no-")))

GROUPS = {"all": ALL, "ablations": ABLATIONS, "collectives": COLLECTIVES, "memories": MEMORIES, "replicas": REPLICAS}
"""By the name that stands for them."""
