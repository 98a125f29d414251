"""The methods that can be compared, each as an optax chain that takes per-device gradients.

Recipes train with the same momentum and learning rate, but for the few whose updates have another length
(``registered.RATES``). What differs is how the gradient crosses the axis and, for DGC, where the momentum lives.
"""

import dataclasses
import functools
from typing import Any, Literal

from gradcomp_jax._errors import SettingError, look_up
from gradcomp_jax.compressors import dense as dense_code
from gradcomp_jax.compressors import ternary
from gradcomp_jax.core import masks
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
from gradcomp_jax.methods import dgc, sparse_adamw, terngrad
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.transforms.warm_up import Stages


def build(method: str, settings: Settings, steps_per_epoch: int, *, seed: int = 0) -> Transformation:
    """Makes the transformation of a name of :data:`RECIPES`, whose warm-up goes by epochs.

    The seed of random rounding is part of the state: transformations that differ in nothing but their seed have states of one
    structure and the same ``update``, so a step that was compiled with one of them runs with the state of another.
    """
    recipe = look_up("method", method, RECIPES)
    counted = CountedSettings(**dataclasses.asdict(settings), steps=settings.epochs * steps_per_epoch)
    try:
        return recipe.make(counted, recipe.warm_up(settings, steps_per_epoch), seed)
    except ValueError as error:
        raise SettingError(f"{method}: {error}") from error


def make_terngrad(
    settings: Settings,
    warm_up: Stages,
    seed: int,
    *,
    downlink: Literal["exact", "ternary"] = "exact",
    clip: float | None = 2.5,
) -> Transformation:
    """Makes TernGrad as its authors train it: the last classification layer stays dense."""
    mask = masks.without(CLASSIFIER, masks.gains(ternary(downlink=downlink), dense_code()))
    make = functools.partial(terngrad, axis_name=settings.axis_name, downlink=downlink, clip=clip, mask=mask)
    return after(seeded(make, seed), settings)


def make_dgc(settings: Settings, warm_up: Stages, seed: int, **ablation: Any) -> Transformation:
    """Makes DGC, with ``ablation`` instead of some of its options.

    The momentum is inside, so plain SGD follows; before Adam there is none.
    """
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


def _sparse_adamw(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    if settings.optimizer != "adamw":
        raise SettingError(
            f"AdamW is a part of it, and this task trains with {settings.optimizer}: take one that trains with AdamW, such as"
            " --task language-model, or the method topk-sgd"
        )
    return sparse_adamw(settings.rate(), axis_name=settings.axis_name, density=settings.density)


def with_bits(name: str, bits: int) -> Recipe:
    """Returns the recipe of a registered method with an option ``bits``."""
    made = functools.partial(make_registered, name=name, bits=bits)
    return Recipe(made, f"{summary(METHODS[name])}; {bits} bits a value")


RECIPES: dict[str, Recipe] = {
    "dense": Recipe(functools.partial(make_registered, name="dense"), "float32 all-reduce"),
    "dense-bf16": Recipe(functools.partial(make_registered, name="dense_bf16"), "bfloat16 on the wire, float32 sums"),
    "terngrad": Recipe(make_terngrad, "TernGrad, exact downlink, last layer dense"),
    "dgc": Recipe(make_dgc, "Deep Gradient Compression, complete", stages=warm_up_stages),
    "sparse-adamw": Recipe(_sparse_adamw, "AdamW after the largest entries, in two bits each; of tasks with AdamW"),
}

RECIPES |= {
    command_name(name): Recipe(
        functools.partial(make_registered, name=name), summary(method), stages=functools.partial(dense_stage, name=name)
    )
    for name, method in METHODS.items()
    if command_name(name) not in RECIPES
}
RECIPES["block-quantized-4-bit"] = with_bits("block_quantized", 4)
RECIPES |= REPLICA_RECIPES

ALL = tuple(map(command_name, METHODS))
"""One recipe for each registered method, both baselines among them."""

REPLICAS = ("dense", *REPLICA_RECIPES)
"""Whatever is not synchronous, beside what is."""

GROUPS = {"all": ALL, "replicas": REPLICAS}
"""By the name that stands for them."""
