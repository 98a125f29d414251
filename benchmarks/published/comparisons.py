"""The library beside peers' published algorithms: the same gradients, step by step, and how far the updates are apart.

How far they may be apart comes from the peer. Its algorithm runs twice, the second time with every entry of every
gradient off by up to a part of 2**-16. That is 256 roundings of float32, about ten for each of the steps: the library,
in float32, may be as far from the first run as the second run is.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp_jax as gc
from benchmarks.published import frequencies, low_rank, momentum_correction, outer_steps, rotations, signs

Tree = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Run = Callable[[float], Iterator[tuple[Tree, Tree]]]

AXIS, WORKERS, STEPS = "data", 4, 24
NOISE = 2.0**-16
MOST = 0.01
"""A larger bound would say nothing: the algorithm magnifies rounding, or one of its decisions hangs on it."""

ALL_LEAVES = gc.masks.at_least(0)
MATRICES = {"long": (40, 12), "wide": (10, 24)}


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


# Outer steps.

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


# Methods.


def first_q(shapes: Shapes, side: int, rank: int) -> Tree:
    """Which all workers share, and draw from their seed: an input."""
    draw = jax.random.normal
    return {name: np.asarray(draw(jax.random.key(0), (1, s[side], rank), jnp.float32))[0] for name, s in shapes.items()}


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


def demo(*, exact: bool) -> Run:
    """The paper's 32 of 64 x 64, on smooth gradients. Tiles as wide as their tensor are our chunks."""
    options = {"momentum": 0.99, "signed": False, "dtype": "float32", "average": "senders"}
    return of_updates(
        lambda: frequencies.TiledSelection(TILES, WORKERS, chunk=64, k=32, decay=0.99, transform=True),
        lambda: gc.demo(axis_name=AXIS, exact=exact, **options),
        TILES,
        lambda: smooth(TILES, 10),
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


def signs_apart(*, exact: bool) -> float:
    """The part of DeMo's signs on smooth gradients that are not the authors'."""
    apart = total = 0
    for want, got in demo(exact=exact)(0.0):
        for name in want:
            apart += int((np.sign(want[name]) != np.sign(got[name])).sum())
            total += want[name].size
    return apart / total
