"""Methods of the library beside peers' published algorithms, and the list of all comparisons."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp_jax as gc
from benchmarks.published import frequencies, low_rank, momentum_correction, rotations, signs, streaming
from benchmarks.published.beside import (
    AXIS,
    STEPS,
    WORKERS,
    Comparison,
    Run,
    Shapes,
    Tree,
    gaussian,
    of_updates,
    smooth,
    spread,
)

ALL_LEAVES = gc.masks.at_least(0)
MATRICES: Shapes = {"long": (40, 12), "wide": (10, 24)}


def first_q(shapes: Shapes, side: int, rank: int) -> Tree:
    """Which all workers share, and draw from their seed: an input."""
    draw = jax.random.normal
    return {name: np.asarray(draw(jax.random.key(0), (1, s[side], rank), jnp.float32))[0] for name, s in shapes.items()}


def powersgd(rank: int) -> Comparison:
    return Comparison(
        "PyTorch's PowerSGD hook",
        f"updates, rank {rank}, warm start, error of the mean Q",
        of_updates(
            lambda: low_rank.PowerSgd(MATRICES, WORKERS, first_q(MATRICES, 1, rank)),
            lambda: gc.powersgd(axis_name=AXIS, rank=rank),
            MATRICES,
            spread(MATRICES, 4),
        ),
    )


def dion(rank: int, side: str, shapes: Shapes) -> Comparison:
    return Comparison(
        "Dion",
        f"updates, rank {rank}, orthonormal columns on the side of the fan-in" + ("" if side == "in" else f" ({side})"),
        of_updates(
            lambda: low_rank.Dion(shapes, WORKERS, first_q(shapes, 1, rank), momentum=0.9, side=side),
            lambda: gc.dion(axis_name=AXIS, rank=rank, momentum=0.9),
            shapes,
            spread(shapes, 5),
        ),
    )


DGC_SHAPES: Shapes = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}


def dgc(what: str, *, clip: float | None = None, shapes: Shapes = DGC_SHAPES, **options: bool) -> Comparison:
    # Of 180 and 330 entries both ways of rounding give 18 and 33.
    ours = {"density": 0.1, "momentum": 0.9, "exact": True, "dtype": "float32", "collective": "all_gather"} | options
    return Comparison(
        "DGC's authors",
        what,
        of_updates(
            lambda: momentum_correction.Dgc(
                shapes, WORKERS, ratio=0.1, momentum=0.9, clip=None if clip is None else clip / WORKERS**0.5, **options
            ),
            lambda: gc.dgc(axis_name=AXIS, clip_norm=clip, **ours),
            shapes,
            lambda: gaussian(shapes, 12),
        ),
    )


TILES: Shapes = {"one": (64, 64), "two": (128, 64)}


WIDE: Shapes = {"wide": (64, 256)}
"""Of which a tile is 64 rows of 64 entries, and a chunk of ours 16 rows of 256."""


def demo(*, exact: bool, shapes: Shapes = TILES) -> Run:
    """The paper's 32 of 64 x 64, on smooth gradients. Tiles as wide as their tensor are our chunks."""
    options = {"momentum": 0.99, "signed": False, "dtype": "float32", "average": "senders"}
    return of_updates(
        lambda: frequencies.TiledSelection(shapes, WORKERS, chunk=64, k=32, decay=0.99, transform=True),
        lambda: gc.demo(axis_name=AXIS, exact=exact, **options),
        shapes,
        lambda: smooth(shapes, 10),
    )


def sparse_loco() -> Any:
    """Without the two bits: chunks that are whole tensors."""
    code = gc.compressors.topk(4 / 256, block=256, dtype="float32", exact=True)
    return gc.exchange(
        code, axis_name=AXIS, memory=gc.memory.residual(decay=0.95), collective="all_gather", mask=ALL_LEAVES
    )


ADAM_SHAPES: Shapes = {"matrix": (16, 16), "small": (5, 12)}


def one_bit_adam(freeze: int) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[int, Tree], Tree]]:
    """With a mean magnitude for each block, and Adam's corrections put on DeepSpeed's update."""

    def corrected(step: int, update: Tree) -> Tree:
        factor = np.sqrt(1 - 0.999 ** min(step, freeze)) / (1 - 0.9**step)
        return {name: factor * u for name, u in update.items()}

    def ours() -> Any:
        return gc.one_bit_adam(axis_name=AXIS, warm_up_steps=freeze, block=64, floor=0.0, eps=1e-30, mask=ALL_LEAVES)

    return (
        lambda: signs.OneBitAdam(ADAM_SHAPES, WORKERS, freeze=freeze, block=64, scale="mean", eps=1e-30),
        ours,
        corrected,
    )


def eden(bits: int, block: int = 64) -> Run:
    """Each worker's rotation of each step is an input: our code's, as a matrix."""
    code = gc.compressors.rotated(bits, block=block, unbiased=True)
    count = jnp.full((1,), block, jnp.int32)

    @jax.jit
    def round_trip(rows: Any, seeds: Any) -> tuple[Any, Any]:
        info = gc.compressors.RowInfo(count, side=seeds)
        identity = jnp.eye(block)
        for each in code._seeds(info._replace(side=jnp.broadcast_to(seeds, (block,)))):
            identity = gc.kernels.rotate(identity, each, planes=True)
        return code.decode(code.encode(rows, (), info)[0], info), identity.T

    def run(noise: float) -> Iterator[tuple[Tree, Tree]]:
        peer, rng = rotations.Eden(bits), np.random.default_rng(7)
        for step, drawn in zip(range(STEPS), gaussian({"x": (block,)}, 8), strict=False):
            x, decoded, turned = drawn["x"] ** 3, [], []
            for worker in range(WORKERS):
                seeds = jnp.full((1,), 1000 * step + worker, jnp.uint32)
                y, rotation = round_trip(x[worker : worker + 1], seeds)
                decoded.append(np.asarray(y[0]))
                turned.append(np.asarray(rotation))
            want = {"x": peer.mean(x, np.stack(turned))}
            if noise:
                off = x * (1 + noise * rng.uniform(-1, 1, x.shape))
                yield want, {"x": peer.mean(off, np.stack(turned))}
            else:
                yield want, {"x": np.mean(decoded, axis=0)}

    return run


TALL: Shapes = {"tall": (40, 12), "square": (16, 16)}

COMPARISONS = [
    *streaming.COMPARISONS,
    dion(2, "longer", TALL),
    dion(2, "in", MATRICES),
    powersgd(2),
    powersgd(4),
    dgc("updates, the largest of whole tensors, rounded alike"),
    dgc("the same with Nesterov's momentum, not masked", nesterov=True, masking=False),
    dgc("the same of a tree of one tensor, clipped", clip=4.0, shapes={"matrix": (30, 11)}),
    *(Comparison("EDEN", f"mean of round trips, {bits} bits, rotations given", eden(bits)) for bits in (1, 2, 4)),
    *(
        Comparison(
            "DeepSpeed's 1-bit Adam",
            f"updates, {what}, times Adam's corrections, a mean magnitude for each block",
            of_updates(peer, ours, ADAM_SHAPES, lambda: gaussian(ADAM_SHAPES, 9), then=then),
        )
        for what, (peer, ours, then) in (
            ("warm-up alone", one_bit_adam(STEPS)),
            ("frozen from step 7 on", one_bit_adam(6)),
        )
    ),
    Comparison(
        "DeMo's authors",
        "mean over senders before its sign, exact=True",
        demo(exact=True),
    ),
    Comparison(
        "SparseLoCo's first code",
        "mean over all workers of one tile's largest, as in the paper",
        of_updates(
            lambda: frequencies.TiledSelection(
                {"one": (16, 16)}, WORKERS, chunk=16, k=4, decay=0.95, transform=False, senders=False
            ),
            sparse_loco,
            {"one": (16, 16)},
            lambda: gaussian({"one": (16, 16)}, 11),
        ),
    ),
]


def signs_apart(*, exact: bool, shapes: Shapes = TILES) -> float:
    """The part of DeMo's signs on smooth gradients that are not the authors'."""
    apart = total = 0
    for want, got in demo(exact=exact, shapes=shapes)(0.0):
        for name in want:
            apart += int((np.sign(want[name]) != np.sign(got[name])).sum())
            total += want[name].size
    return apart / total
