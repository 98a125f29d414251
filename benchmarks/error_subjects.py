"""What ``errors.py`` measures: every compressor, by family and from few bits to many, and what goes through them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import compressors, experiments
from gradcomp_jax.compressors import Compressor

FRACTION_BITS = {16: 12, 8: 5}
"""Of fixed point, by width: ranges of 8 and 4 standard deviations of an input of unit variance."""
TASK = experiments.task("digits")
LEAVES = 2
"""How many of a gradient's matrices are taken, the largest first."""


@dataclasses.dataclass(frozen=True)
class Code:
    """A row of the table.

    Attributes:
        family: codes that share a marker, a line and a law: within one that is ``ordered``, more bits mean less error.
        name: the compressor and what is set.
        make: the compressor for a matrix of this many rows and columns.
        ordered: whether the family's codes differ in their bits alone.
    """

    family: str
    name: str
    make: Callable[[tuple[int, int]], Compressor]
    ordered: bool = True


def fixed(family: str, name: str, compressor: Compressor, *, ordered: bool = True) -> Code:
    """A code that does not depend on the shape."""
    return Code(family, name, lambda shape: compressor, ordered)


def rank(r: int) -> Code:
    return Code("low rank", f"low_rank, rank {r}", lambda shape: compressors.low_rank(r, shape))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as the matrix of its last dimension against all others."""
    return int(np.prod(shape[:-1])), shape[-1]


def integers() -> list[Code]:
    return [
        fixed(
            f"integers, {norm}, {how}",
            f"block_quantized, {bits} bits, {norm}, {how}",
            compressors.block_quantized(bits=bits, norm=norm, stochastic=how == "stochastic"),
        )
        for norm in ("max", "l2")
        for how in ("nearest", "stochastic")
        for bits in (2, 4, 8)
    ]


def ternaries() -> list[Code]:
    return [
        fixed(
            "ternary",
            f"ternary, clip {clip}, by {granularity}",
            compressors.ternary(clip=clip, granularity=granularity),
            ordered=False,
        )
        for clip in (2.5, None)
        for granularity in ("tensor", "bucket")
    ]


def selections() -> list[Code]:
    densities = (0.001, 0.01, 0.05)
    return [
        *(
            fixed(f"top-k, {dtype}", f"topk, {d:g}, {dtype}", compressors.topk(d, dtype=dtype))
            for dtype in ("bfloat16", "int8")
            for d in densities
        ),
        *(
            fixed("top-k of frequencies", f"in_frequency(topk), {d:g}", compressors.in_frequency(compressors.topk(d)))
            for d in densities
        ),
        *(
            fixed(
                f"random-k{', rescaled' * rescale}",
                f"random_k, {d:g}{', rescaled' * rescale}",
                compressors.random_k(d, rescale=rescale),
            )
            for rescale in (False, True)
            for d in densities
        ),
    ]


CODES: list[Code] = [
    fixed("bfloat16", "dense, bfloat16", compressors.dense(jnp.bfloat16)),
    *(fixed("float8", f"float8, {f}", compressors.float8(f), ordered=False) for f in ("e4m3", "e5m2")),
    *(
        fixed(
            "fixed point",
            f"fixed_point, {bits} bits, {fraction} of fraction",
            compressors.fixed_point(bits=bits, fraction_bits=fraction),
        )
        for bits, fraction in sorted(FRACTION_BITS.items())
    ),
    *integers(),
    *(
        fixed(
            f"powers of two, {how}",
            f"block_quantized, e3m0, {how}",
            compressors.block_quantized(format="e3m0", stochastic=how == "stochastic"),
            ordered=False,
        )
        for how in ("nearest", "stochastic")
    ),
    *(
        fixed("matrix units", f"block_quantized, {f}", compressors.block_quantized(format=f), ordered=False)
        for f in ("mxfp8", "mxfp4", "nvfp4")
    ),
    *ternaries(),
    *(fixed("sign", f"sign, {s}", compressors.sign(s), ordered=False) for s in ("l1", "means")),
    *(
        fixed(f"rotated, {how}", f"rotated, {bits} bits, {how}", compressors.rotated(bits, unbiased=how == "unbiased"))
        for how in ("unbiased", "biased")
        for bits in (1, 2, 3, 4)
    ),
    *map(rank, (1, 4)),
    *selections(),
]


def unit(x: np.ndarray) -> np.ndarray:
    """Scaled to a root mean square of 1, float32."""
    return (x / np.sqrt(np.mean(np.square(x, dtype=np.float64)))).astype(np.float32)


def gaussian(seeds: int, side: int) -> list[np.ndarray]:
    return [unit(np.random.default_rng(seed).standard_normal((side, side))) for seed in range(seeds)]


def heavy_tailed(seeds: int, side: int) -> list[np.ndarray]:
    """Student's t with 3 degrees of freedom: a variance, and no fourth moment."""
    return [unit(np.random.default_rng(seed).standard_t(3, (side, side))) for seed in range(seeds)]


class Snapshots(experiments.Listener):
    """Keeps the parameters after some epochs."""

    def __init__(self, epochs: Sequence[int]) -> None:
        self.params: list[Any] = []
        self._epochs = epochs

    def finished_epoch(self, method: str, seed: int, epoch: int, past: experiments.Past) -> None:
        del method, seed
        if epoch in self._epochs:
            self.params.append(jax.tree.map(np.asarray, past.state.params))


def gradients(seeds: int, epochs: Sequence[int]) -> list[np.ndarray]:
    """One worker's gradient, largest matrices, at the first step after each of these epochs of dense training."""
    data = experiments.load(TASK.dataset)
    settings = dataclasses.replace(TASK.settings, epochs=max(epochs))
    problem = TASK.on(data)
    trainer = experiments.Trainer("dense", problem, settings)
    # Any examples that one worker may see next.
    draw = np.random.default_rng(0)

    @jax.jit
    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(problem.loss)(params, (x, y))

    found = []
    for seed in range(seeds):
        snapshots = Snapshots(epochs)
        trainer.run(seed, listener=snapshots)
        for params in snapshots.params:
            batch = draw.choice(len(data.train_x), settings.batch_per_worker, replace=False)
            leaves = jax.tree.leaves(gradient(params, data.train_x[batch], data.train_y[batch]))
            matrices = sorted((leaf for leaf in leaves if leaf.ndim > 1), key=lambda leaf: -leaf.size)
            found += [unit(np.asarray(leaf)) for leaf in matrices[:LEAVES]]
    return found
