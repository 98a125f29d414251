"""Outer steps of replicas beside torchft's and MaxText's: parameters of all replicas, and when which fragment has its turn."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import gradcomp_jax as gc
from benchmarks.published import outer_steps
from benchmarks.published.beside import AXIS, STEPS, WORKERS, Comparison, Run, Shapes, Tree, gaussian

FRAGMENTS: list[set[str]] = [{"a"}, {"b", "c"}, {"d"}]
NUMBERS = {name: number for number, names in enumerate(FRAGMENTS) for name in names}
EVERY = 12
SHOWN = 2
"""The delay of :func:`turns`."""
OUTER = {"rate": 0.7, "momentum": 0.9}
LAYERS: Shapes = {"a": (3,), "b": (2, 2), "c": (), "d": (5,)}


def of_outer_steps(make: Callable[[Tree], Any], tx: Callable[[], Any]) -> Run:
    """Replicas whose own steps are given; compared are all parameters of all of them."""

    def run(noise: float) -> Iterator[tuple[Tree, Tree]]:
        rng = np.random.default_rng(2)
        start = {name: rng.standard_normal(s).astype(np.float32) for name, s in LAYERS.items()}
        peer = make(start)
        beside = make(start) if noise else replicas(tx(), start)
        for _, own in zip(range(STEPS), gaussian(LAYERS, 3), strict=False):
            own = {name: 0.1 * u for name, u in own.items()}
            want = dict(peer.step(own))
            off = {name: u * (1 + noise * rng.uniform(-1, 1, u.shape)) for name, u in own.items()}
            yield want, beside.step(off) if noise else beside(own)

    return run


def replicas(tx: Any, start: Tree) -> Callable[[Tree], Tree]:
    """Parameters ``[N, *shape]`` after each step."""
    axes = gc.state_axes(jax.eval_shape(tx.init, start))
    init = jax.vmap(tx.init, axis_name=AXIS, in_axes=0, out_axes=axes)
    x = {name: np.stack([p] * WORKERS) for name, p in start.items()}
    state = jax.jit(init)(x)

    def moved(own: Tree, state: Any, x: Tree) -> Any:
        updates, state = tx.update(own, state, x)
        return optax.apply_updates(x, updates), state

    update = jax.jit(jax.vmap(moved, axis_name=AXIS, in_axes=(0, axes, 0), out_axes=(0, axes)))

    def step(own: Tree) -> Tree:
        nonlocal state, x
        x, state = update(own, state, x)
        return x

    return step


def streaming(delay: int, mix: float) -> Callable[[], Any]:
    return lambda: gc.diloco(
        gc.dense(axis_name=AXIS),
        axis_name=AXIS,
        every=EVERY,
        learning_rate=OUTER["rate"],
        momentum=OUTER["momentum"],
        parts=lambda params: NUMBERS,
        delay=delay,
        mix=mix,
    )


def torchft(start: Tree, *, delay: int, mix: float, begin: int | None = None) -> outer_steps.Torchft:
    """Which begins to count so late that its means depart when ours do."""
    options = {"fragments": FRAGMENTS, "every": EVERY, "delay": delay, "mix": mix, **OUTER}
    return outer_steps.Torchft(start, WORKERS, begin=-delay if begin is None else begin, **options)


def maxtext(start: Tree, *, delay: int, mix: float) -> outer_steps.MaxText:
    """Whose fragment of the end of a period has number 0."""
    turned = [*FRAGMENTS[-1:], *FRAGMENTS[:-1]]
    return outer_steps.MaxText(start, WORKERS, fragments=turned, every=EVERY, delay=delay, mix=mix, **OUTER)


Turns = list[tuple[int, int]]


def turns() -> dict[str, tuple[Turns, Turns]]:
    """With a delay of :data:`SHOWN`, of two periods: ``(step, fragment)`` of departures and of arrivals, by whose they are."""
    nothing = {name: np.zeros((WORKERS, *s)) for name, s in LAYERS.items()}
    start = {name: np.zeros(s) for name, s in LAYERS.items()}
    first, second = torchft(start, delay=SHOWN, mix=0.0, begin=0), maxtext(start, delay=SHOWN, mix=0.0)
    for _ in range(2 * EVERY):
        first.step(nothing)
        second.step(nothing)
    renumbered = [[(step, (n - 1) % len(FRAGMENTS)) for step, n in of] for of in (second.departures, second.arrivals)]
    return {
        "torchft": (first.departures, first.arrivals),
        "MaxText, numbered as ours": (renumbered[0], renumbered[1]),
        "ours": our_turns(2 * EVERY),
    }


def our_turns(steps: int) -> tuple[Turns, Turns]:
    """Read from the state of one worker: what has departed is on its way, and what is on its way no longer has arrived."""
    tx = gc.diloco(gc.dense(axis_name=None), axis_name=None, every=EVERY, parts=lambda params: NUMBERS, delay=SHOWN)
    x = {name: np.zeros(s, np.float32) for name, s in LAYERS.items()}
    own = {name: np.ones(s, np.float32) for name, s in LAYERS.items()}
    state, update = jax.jit(tx.init)(x), jax.jit(tx.update)
    departures, arrivals, before = [], [], set()
    for step in range(1, steps + 1):
        updates, state = update(own, state, x)
        x = {name: x[name] + np.asarray(u) for name, u in updates.items()}
        now = {NUMBERS[name] for part in state.flying for name, leaf in named(part) if np.asarray(leaf).any()}
        departures += [(step, number) for number in now - before]
        arrivals += [(step, number) for number in before - now]
        before = now
    return departures, arrivals


def named(part: Tree) -> list[tuple[str, Any]]:
    """The leaves of a part of the model, by the names of the model's."""
    return [(path[0].key, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(part)]


COMPARISONS = [
    *(
        Comparison(
            "torchft",
            f"replicas of Streaming DiLoCo, delay {delay}, mix {mix}, its counter {delay} steps late",
            of_outer_steps(lambda start, d=delay, m=mix: torchft(start, delay=d, mix=m), streaming(delay, mix)),
        )
        for delay, mix in ((0, 0.0), (2, 0.5))
    ),
    *(
        Comparison(
            "MaxText",
            f"replicas of Streaming DiLoCo, delay {delay}, mix {mix}",
            of_outer_steps(lambda start, d=delay, m=mix: maxtext(start, delay=d, mix=m), streaming(delay, mix)),
        )
        for delay, mix in ((0, 0.0), (3, 0.25))
    ),
]
