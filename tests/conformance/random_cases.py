"""Random trees, exchanges, workers, environments, poison and restores, and what must hold of every one of them."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import gradcomp_jax as gc

from .environments import AXIS, environment, exchange_state, means_kept
from .methods import METHODS

codes = gc.compressors
CODES: dict[str, gc.compressors.Compressor] = {
    "dense": codes.dense(),
    "bf16": codes.dense(jnp.bfloat16),
    "ternary": codes.ternary(bucket_size=20),
    "own-ternary": codes.ternary(share_scale=False, downlink="ternary", granularity="bucket", bucket_size=20),
    "topk": codes.topk(0.25, block=16),
    "topk-f32": codes.topk(0.1, block=60, dtype=jnp.float32),
    "topk-int8": codes.topk(0.25, block=16, dtype=jnp.int8),
    "topk-wide": codes.topk(0.01, block=300),
    "union": codes.topk(0.1, block=20, downlink="union"),
    "random-k": codes.random_k(0.25, block=16),
    "random-k-f32": codes.random_k(0.1, block=50, dtype=jnp.float32),
    "int8": codes.block_quantized(block=16),
    "int4": codes.block_quantized(bits=4, block=50),
    "sign-means": codes.sign("means", block=16),
    "sign-l1": codes.sign("l1", block=100),
    "float8": codes.float8(block=16),
    "fixed": codes.fixed_point(block=16),
    "rotated": codes.rotated(2, block=16, unbiased=False),
    "frequencies": codes.in_frequency(codes.topk(0.25, block=16, dtype=jnp.float32)),
    "frequencies-sign": codes.in_frequency(codes.sign("l1", block=16)),
    "frequencies-int8": codes.in_frequency(codes.block_quantized(block=16)),
}
COLLECTIVES: dict[str, Any] = {
    "auto": "auto",
    "all_gather": "all_gather",
    "two_phase": "two_phase",
    "server": gc.collectives.TwoPhase("server"),
    "put_back": gc.collectives.TwoPhase("put_back"),
    "all_reduce": "all_reduce",
    "recursive_doubling": "recursive_doubling",
}
MEMORIES: dict[str, Any] = {"residual": gc.memory.residual(), "momentum": gc.memory.momentum_correction(0.5)}
KINDS = ("normal", "zero", "constant", "one-worker", "small")
POISONS = (math.nan, math.inf, -math.inf, 1e38, -3.4e38)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Shapes and dtypes, in containers of one kind."""

    leaves: tuple[tuple[tuple[int, ...], str], ...]
    form: str

    def of(self, values: list[Any]) -> Any:
        if self.form == "list":
            return values
        if self.form == "nested":
            return {"first": values[0], "rest": (values[1:], None)}
        return {f"leaf {number}": value for number, value in enumerate(values)}

    def params(self) -> Any:
        return self.of([np.ones(shape, dtype) for shape, dtype in self.leaves])

    def gradients(self, kind: str, workers: int, seed: tuple[int, ...]) -> Any:
        """Of all workers, stacked."""
        values = []
        for number, (shape, dtype) in enumerate(self.leaves):
            rng = np.random.default_rng((*seed, number))
            value = rng.standard_normal((workers, *shape)) * rng.choice([1e-3, 1.0, 30.0], (workers, *shape))
            if kind == "zero":
                value[:] = 0
            elif kind == "constant":
                value[:] = 0.37
            elif kind == "small":
                value *= 1e-20
            elif kind == "one-worker":
                value[1:] = 0
            values.append(np.asarray(value, dtype))
        return self.of(values)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of a few steps.

    Attributes:
        tree: of the parameters.
        exchange: the name of a method's case, or of a code, a collective, a view and a memory.
        workers: at first.
        env: where the exchange is mapped over them.
        kinds: of the gradients of each step.
        poison: the step before which a poisoned one comes, the number of the worker and of the entry, and what is put there.
        restore: how many workers go on after a checkpoint, half-way; ``None`` leaves it out.
    """

    tree: Tree
    exchange: str | tuple[str, str, str | None, str]
    workers: int
    env: str
    kinds: tuple[str, ...]
    poison: tuple[int, int, int, float] | None
    restore: int | None

    def make(self) -> optax.GradientTransformationExtraArgs:
        if isinstance(self.exchange, str):
            return METHODS[self.exchange].make(AXIS)
        code, collective, view, memory = self.exchange
        return gc.exchange(
            CODES[code],
            axis_name=AXIS,
            collective=COLLECTIVES[collective],
            view=view,
            memory=MEMORIES[memory],
            mask=True,
        )

    @property
    def law(self) -> str:
        if isinstance(self.exchange, str):
            return METHODS[self.exchange].law
        return self.exchange[3]


sizes = st.sampled_from((1, 1, 2, 3, 5, 8, 17, 33, 64))
shapes = st.one_of(
    st.just(()),
    st.just((0,)),
    st.tuples(sizes),
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes),
    st.tuples(st.sampled_from((1, 2, 3)), sizes, sizes),
)
dtypes = st.sampled_from(("float32",) * 6 + ("bfloat16", "float16"))
trees = st.builds(
    Tree,
    st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda leaves: any(math.prod(shape) for shape, _ in leaves)),
    st.sampled_from(("dict", "list", "nested")),
)
exchanges = st.one_of(
    st.sampled_from(sorted(METHODS)),
    st.tuples(
        st.sampled_from(sorted(CODES)),
        st.sampled_from(sorted(COLLECTIVES)),
        st.sampled_from((None, "rows", "dealt", "columns", "tree")),
        st.sampled_from(("residual", "residual", "momentum")),
    ),
)
counts = st.sampled_from((1, 2, 3, 5, 7, 8))


def cases(envs: tuple[str, ...]) -> st.SearchStrategy[Case]:
    """Draws cases in some environments."""
    drawn = st.builds(
        Case,
        trees,
        exchanges,
        counts,
        st.sampled_from(envs),
        st.tuples(*[st.sampled_from(KINDS)] * 4),
        st.none() | st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 10**6), st.sampled_from(POISONS)),
        st.none() | counts,
    )
    return drawn.filter(_comes_out_even).filter(_goes_together)


def _comes_out_even(case: Case) -> bool:
    """Recursive doubling takes powers of two only, and says so in the first step."""
    name = case.exchange if isinstance(case.exchange, str) else case.exchange[1]
    return "doubling" not in name or not any(n & (n - 1) for n in (case.workers, case.restore or 1))


def _goes_together(case: Case) -> bool:
    """Codes, collectives and memories that do not are refused with a sentence when they are put together."""
    try:
        case.make()
    except (TypeError, ValueError) as refused:
        assert len(str(refused)) > 20
        return False
    return True


def run(case: Case, folder: pathlib.Path) -> bool:
    """Runs a case; returns whether the library took it, or refused its tree with a sentence."""
    params, workers = case.tree.params(), case.workers
    try:
        tx = case.make()
        world = environment(case.env, tx, workers)
        state = world.init(params)
    except (TypeError, ValueError) as refused:
        # A user reads it, and nothing was lost yet.
        assert len(str(refused)) > 20
        return False
    ledger = _Ledger(case, params)
    for step, kind in enumerate(case.kinds):
        if case.restore and step == len(case.kinds) // 2:
            world, state = _restored(case, tx, state, params, folder)
            workers = case.restore
        if case.poison and case.poison[0] == step:
            state = _poisoned(case, world, state, params, workers)
        gradient = case.tree.gradients(kind, workers, (step,))
        updates, new = world.update(gradient, state, params)
        old_counts, counts = ((int(exchange_state(s).step), int(exchange_state(s).skipped)) for s in (state, new))
        assert counts == (old_counts[0] + 1, old_counts[1])
        ledger.enter(gradient, updates, state, new, workers)
        state = new
    if world.jitted is not None:
        assert world.jitted._cache_size() == 1, "a later step was compiled again"
    return True


def _floats(state: Any) -> list[np.ndarray]:
    return [np.asarray(a) for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]


def _poisoned(case: Case, world: Any, state: Any, params: Any, workers: int) -> Any:
    """A step in which one worker's gradient is bad: all skip it, or it was no poison to this code and all stays finite."""
    assert case.poison is not None
    _, worker, entry, value = case.poison
    gradient = case.tree.gradients("normal", workers, (99,))
    leaves = [leaf for leaf in jax.tree.leaves(gradient) if leaf.size]
    if not leaves:
        return state
    leaf = leaves[entry % len(leaves)]
    with np.errstate(over="ignore"):
        leaf.reshape(workers, -1)[worker % workers, entry % leaf[0].size] = value
    updates, new = world.update(gradient, state, params)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in (*_floats(updates), *_floats(new)))
    old_state, new_state = exchange_state(state), exchange_state(new)
    skipped = int(new_state.skipped) - int(old_state.skipped)
    is_seen = not np.isfinite(value)
    assert skipped >= 1 if is_seen else skipped in (0, 1)
    if skipped:
        assert not any(x.any() for x in _floats(updates))
        kept = zip(
            _floats((old_state.memory, old_state.server)), _floats((new_state.memory, new_state.server)), strict=True
        )
        assert all((a == b).all() for a, b in kept)
        return new
    # It was taken: what came of it is not followed, and the run goes on from before.
    return state


def _restored(case: Case, tx: Any, state: Any, params: Any, folder: pathlib.Path) -> tuple[Any, Any]:
    """Writes the state, reads it bit for bit, and gives it to another number of workers with the same means."""
    assert case.restore is not None
    before = [k.sum() for k in _kept(state, case.workers)]
    if case.env.startswith("shard_map"):
        gc.save_checkpoint(folder / "state", state)
        read = gc.restore_checkpoint(folder / "state", state)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(read), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        state = read
    resized = gc.resize_workers(state, old=case.workers, new=case.restore)
    world = environment(case.env, tx, case.restore)
    after = [k.sum() for k in _kept(resized, case.restore)]
    scale = sum(np.abs(x).sum() for x in _floats(state))
    np.testing.assert_allclose(sum(after), sum(before), atol=1e-6 * scale, rtol=0)
    return world, resized


def _kept(state: Any, workers: int) -> list[np.ndarray]:
    """What workers and owners keep, on the mean: a tensor each, or where rows of owners always stay with them, these too."""
    found = exchange_state(state)
    apart = [s for s in found.server if isinstance(s, gc.PerDevice) and s.returns is None]
    others = found._replace(
        server=tuple(() if isinstance(s, gc.PerDevice) and s.returns is None else s for s in found.server)
    )
    return [*means_kept(others, workers), *(np.asarray(s.value, np.float64) for s in apart)]


class _Ledger:
    """What was seen, sent and kept."""

    def __init__(self, case: Case, params: Any) -> None:
        self.case = case
        self.owed = [np.zeros(p.shape) for p in jax.tree.leaves(params)]
        self.slack = 0.0

    def enter(self, gradient: Any, updates: Any, old: Any, new: Any, workers: int) -> None:
        law = self.case.law
        each = [np.asarray(u).astype(np.float64) for u in jax.tree.leaves(updates)]
        means = [np.asarray(g).astype(np.float64).mean(axis=0) for g in jax.tree.leaves(gradient)]
        for value, like in zip(jax.tree.leaves(updates), jax.tree.leaves(gradient), strict=True):
            assert value.dtype == like.dtype
            assert len({replica.tobytes() for replica in np.asarray(value)}) <= 1, "replicas differ"
        assert all(np.isfinite(u).all() for u in each)
        if law == "residual":
            self._residual(means, [u[0] for u in each], new, workers)
        elif law == "momentum":
            self._momentum(means, [u[0] for u in each], old, new, workers)

    def _tolerance(self, sent: list[np.ndarray], new: Any) -> float:
        largest = max(
            (np.abs(x).max(initial=0) for x in (*sent, *self.owed, *_floats(exchange_state(new).memory))), default=0
        )
        self.slack += 4e-6 * largest
        for value, (_, dtype) in zip(sent, self.case.tree.leaves, strict=True):
            # What the cast to the leaf's dtype rounds away.
            self.slack += float(jnp.finfo(dtype).eps if dtype != "float32" else 0) * np.abs(value).max(initial=0)
        return self.slack + 1e-30

    def _residual(self, means: list[np.ndarray], sent: list[np.ndarray], new: Any, workers: int) -> None:
        """What is owed, entry by entry, is what is kept: the same numbers, in whatever order the memory lies."""
        decay = METHODS[self.case.exchange].decay if isinstance(self.case.exchange, str) else 1.0
        self.owed = [decay * o + m - s for o, m, s in zip(self.owed, means, sent, strict=True)]
        kept = np.concatenate([*(k.reshape(-1) for k in _kept(new, workers)), np.zeros(0)])
        owed = np.concatenate([o.reshape(-1) for o in self.owed])
        if any(isinstance(s, gc.PerDevice) and s.returns is None for s in exchange_state(new).server):
            # Entries of owners lie otherwise than those of memories.
            atol = self._tolerance(sent, new) * 4 * math.sqrt(len(owed))
            np.testing.assert_allclose(kept.sum(), owed.sum(), atol=atol, rtol=0)
            return
        size = max(len(owed), len(kept))
        a, b = (np.sort(np.pad(x, (0, size - len(x)))) for x in (owed, kept))
        np.testing.assert_allclose(b, a, atol=self._tolerance(sent, new), rtol=0)

    def _momentum(self, means: list[np.ndarray], sent: list[np.ndarray], old: Any, new: Any, workers: int) -> None:
        """Sums of all entries: masking moves with the velocity, whose order only the memory knows."""
        name = self.case.exchange
        nesterov, factor = (METHODS[name].nesterov, 0.9) if isinstance(name, str) else (False, 0.5)
        velocity = sum(
            np.asarray(m.velocity.value, np.float64).sum() / workers
            for members in exchange_state(old).memory
            for m in members
            if jax.tree.leaves(m)
        )
        before, after = (sum(k.sum() for k in _kept(s, workers)) for s in (old, new))
        seen = sum(m.sum() for m in means)
        pushed = factor * (velocity + seen) + seen if nesterov else factor * velocity + seen
        total = sum(s.sum() for s in sent)
        entries = sum(s.size for s in sent)
        atol = self._tolerance(sent, new) * math.sqrt(entries + 1) * 4
        np.testing.assert_allclose(total + after, before + pushed, atol=atol, rtol=0)
