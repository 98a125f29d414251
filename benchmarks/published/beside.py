"""The library beside peers' published algorithms: the same gradients, step by step, and how far the updates are apart.

How far they may be apart comes from the peer. Its algorithm runs twice, the second time with every entry of every
gradient off by up to a part of 2**-16. That is 256 roundings of float32, about ten for each of the steps: the library,
in float32, may be as far from the first run as the second run is.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import gradcomp_jax as gc

Tree = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Run = Callable[[float], Iterator[tuple[Tree, Tree]]]

AXIS, WORKERS, STEPS = "data", 4, 24
NOISE = 2.0**-16
MOST = 0.01
"""A larger bound would say nothing: the algorithm magnifies rounding, or one of its decisions hangs on it."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Attributes:
    peer: whose algorithm.
    what: of it is replayed, and with which options of ours.
    run: ``run(noise)`` yields the peer's update and ours of each step; with a noise ours is the peer's with noisy gradients.
    """

    peer: str
    what: str
    run: Run
    steps: int = STEPS

    def distance(self, noise: float = 0.0) -> float:
        """The largest difference of an entry in any step, as a part of the largest entry of its tensor."""
        found = [0.0]
        for want, got in self.run(noise):
            for name, w in want.items():
                found.append(float(np.abs(np.asarray(got[name]) - w).max() / np.abs(w).max()))
        if len(found) == 1:
            raise AssertionError(f"{self.peer}: nothing was compared")
        return max(found)

    def bound(self) -> float:
        """How far the peer is from itself."""
        return self.distance(NOISE)


def gaussian(shapes: Shapes, seed: int, *, workers: int = WORKERS, steady: float = 0.5) -> Iterator[Tree]:
    """Gradients with a part that stays, different by worker."""
    rng = np.random.default_rng(seed)
    stays = {name: rng.standard_normal((workers, *s)) for name, s in shapes.items()}
    while True:
        yield {
            name: (steady * part + rng.standard_normal(part.shape)).astype(np.float32) for name, part in stays.items()
        }


def smooth(shapes: Shapes, seed: int) -> Iterator[Tree]:
    """Gradients of which neighbours are alike: noise under a wide window along both dimensions."""

    def blurred(x: np.ndarray, axis: int) -> np.ndarray:
        return sum(np.roll(x, shift, axis) for shift in range(-6, 7)) / 13

    for drawn in gaussian(shapes, seed):
        yield {name: blurred(blurred(g, 1), 2).astype(np.float32) for name, g in drawn.items()}


def spread(shapes: Shapes, seed: int) -> Callable[[], Iterator[Tree]]:
    """Gradients around a matrix whose singular values are far apart: of others a power iteration magnifies all rounding."""

    def draws() -> Iterator[Tree]:
        rng = np.random.default_rng(seed)
        part = {}
        for name, (a, c) in shapes.items():
            u, v = (np.linalg.qr(rng.standard_normal((n, 4)))[0] for n in (a, c))
            part[name] = 20 * (u * [8, 4, 2, 1]) @ v.T + rng.standard_normal((WORKERS, a, c))
        for noise in gaussian(shapes, seed + 1):
            yield {name: (part[name] + noise[name] / 8).astype(np.float32) for name in shapes}

    return draws


def of_updates(
    make: Callable[[], Any],
    tx: Callable[[], Any],
    shapes: Shapes,
    draws: Callable[[], Iterator[Tree]],
    *,
    then: Callable[[int, Tree], Tree] = lambda step, update: update,
) -> Run:
    """A peer's class against a transformation under ``vmap``. ``then`` brings the peer's update to our units."""

    def run(noise: float) -> Iterator[tuple[Tree, Tree]]:
        rng, peer = np.random.default_rng(1), make()
        beside = make() if noise else mapped(tx(), shapes)
        for step, gradients in zip(range(1, STEPS + 1), draws(), strict=False):
            want = then(step, peer.step(gradients))
            if noise:
                off = {name: g * (1 + noise * rng.uniform(-1, 1, g.shape)) for name, g in gradients.items()}
                yield want, then(step, beside.step(off))
            else:
                yield want, beside(gradients)

    return run


def mapped(tx: Any, shapes: Shapes) -> Callable[[Tree], Tree]:
    """A transformation on all workers, as a function that remembers its state; the workers' updates are one."""
    zeros = {name: np.zeros(s, np.float32) for name, s in shapes.items()}
    axes = gc.state_axes(jax.eval_shape(tx.init, zeros))
    init = jax.vmap(tx.init, axis_name=AXIS, in_axes=None, out_axes=axes, axis_size=WORKERS)
    state = jax.jit(init)(zeros)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes), out_axes=(0, axes)))

    def step(gradients: Tree) -> Tree:
        nonlocal state
        updates, state = update(gradients, state)
        got = {name: np.asarray(u) for name, u in updates.items()}
        if not all((u == u[:1]).all() for u in got.values()):
            raise AssertionError("the workers' updates differ")
        return {name: u[0] for name, u in got.items()}

    return step
