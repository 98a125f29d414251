"""Parameters that lie along an axis: of a model, left to the compiler or not, and of the data (FSDP)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.core.context import context_of
from gradcomp_jax.per_device import is_per_device
from tests.conformance.environments import exchange_state
from tests.marks import slow_but

P = PartitionSpec
N, MODEL = 4, 2
SHAPES = {"bias": (7,), "down": (32, 24), "up": (24, 32)}
SPECS = {"bias": P(), "down": P("model", None), "up": P(None, "model")}
METHODS = {
    "dense": lambda axis: gc.dense(axis_name=axis),
    "dgc": lambda axis: gc.dgc(axis_name=axis, density=1 / 32, block=64, clip_norm=3.0),
    "topk": lambda axis: gc.topk_sgd(axis_name=axis, density=1 / 32, block=64, collective="all_gather"),
    "int8": lambda axis: gc.block_quantized(axis_name=axis, block=64),
    "powersgd": lambda axis: gc.powersgd(axis_name=axis, rank=1),
    "one_bit_adam": lambda axis: gc.one_bit_adam(axis_name=axis, warm_up_steps=2, block=64),
    "terngrad": lambda axis: gc.terngrad(axis_name=axis, bucket_size=80),
}


def params():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def draw(rng, workers=N):
    return {name: rng.standard_normal((workers, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def mesh_of(shape=(N, MODEL), axes=("data", "model")):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:count])


class World:
    """A step on a mesh of data and model; gradients are stacked by worker, each of the whole model."""

    def __init__(self, tx, mesh, *, axis="data", manual=False, check_vma=True):
        self.tx, self.mesh, self.axis = tx, mesh, axis
        self.manual, self.check_vma = manual, check_vma
        self.step = jax.jit(self._step)

    def init(self):
        if not self.manual:
            return gc.init_state(params(), self.tx, self.mesh, axis_name=self.axis, param_specs=SPECS).opt_state
        both = (self.axis, "model")

        def probe(p):
            shapes.append(jax.eval_shape(self.tx.init, p))
            return np.zeros((), np.float32)

        shapes = []
        jax.eval_shape(jax.shard_map(probe, mesh=self.mesh, in_specs=(SPECS,), out_specs=P()), params())
        out = gc.state_specs(shapes[0], axis_name=both)
        return jax.jit(jax.shard_map(self.tx.init, mesh=self.mesh, in_specs=(SPECS,), out_specs=out))(params())

    def _step(self, gradient, state):
        def local(gradient, state, values):
            updates, state = self.tx.update(jax.tree.map(lambda g: g[0], gradient), state, values)
            return jax.tree.map(lambda u: u[None], updates), state

        if self.manual:
            specs = gc.state_specs(state, axis_name=(self.axis, "model"))
            stacked = {k: P(self.axis, *s) for k, s in SPECS.items()}
            mapping = {"in_specs": (stacked, specs, SPECS), "out_specs": (stacked, specs)}
        else:
            specs = gc.state_specs(state, axis_name=self.axis)
            names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
            mapping = {
                "in_specs": (P(self.axis), specs, P()),
                "out_specs": (P(self.axis), specs),
                "axis_names": set(names),
            }
        return jax.shard_map(local, mesh=self.mesh, check_vma=self.check_vma, **mapping)(gradient, state, params())

    def update(self, gradient, state):
        places = {k: NamedSharding(self.mesh, P(self.axis, *s)) for k, s in SPECS.items()}
        return self.step(jax.device_put(gradient, places), state)


def sharded(name, **options):
    tx = gc.model_parallel(METHODS[name]("data"), axis_name="data", model_axis_name="model", param_specs=SPECS)
    return World(tx, mesh_of(), **options)


def shard(name, x, j):
    """Model device j's shard of a tensor."""
    if name == "bias":
        flat = np.pad(x, (0, 8 - x.size))
        return flat.reshape(MODEL, 4)[j]
    return np.split(x, MODEL, axis=SPECS[name].index("model"))[j]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "terngrad"])
def test_each_shard_is_an_exchange_of_its_own(name: str) -> None:
    """Model device j of every worker exchange what they have of each tensor, as if there were nothing else."""
    world, rng = sharded(name), np.random.default_rng(0)
    state = world.init()
    alone = gc.dgc(axis_name="data", density=1 / 32, block=64) if name == "dgc" else METHODS[name]("data")
    own_params = {k: jnp.asarray(shard(k, np.ones(s, np.float32), 0)) for k, s in SHAPES.items()}
    axes = gc.state_axes(jax.eval_shape(alone.init, own_params))
    init = jax.jit(jax.vmap(alone.init, axis_name="data", in_axes=None, out_axes=axes, axis_size=N))
    reference = jax.jit(jax.vmap(alone.update, axis_name="data", in_axes=(0, axes, None), out_axes=(0, axes)))
    states = [init(own_params) for _ in range(MODEL)]
    for _ in range(4):
        gradient = draw(rng)
        updates, state = world.update(gradient, state)
        clipped = {k: g.copy() for k, g in gradient.items()}
        if name == "dgc":
            for worker in range(N):
                norm = np.sqrt(sum((g[worker].astype(np.float64) ** 2).sum() for g in gradient.values()))
                for g in clipped.values():
                    g[worker] *= min(1.0, 3.0 * N**-0.5 / norm)
        for j in range(MODEL):
            mine = {k: np.stack([shard(k, g[w], j) for w in range(N)]) for k, g in clipped.items()}
            want, states[j] = reference(mine, states[j], own_params)
            for k in SHAPES:
                got = np.stack([shard(k, np.asarray(u), j) for u in updates[k]])
                # What fills up the last shard is nobody's.
                np.testing.assert_allclose(got, want[k] * shard(k, np.ones(SHAPES[k]), j), atol=2e-4)
                assert len({g.tobytes() for g in got}) == 1, "workers differ"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dgc", "powersgd"))
def test_a_manual_axis_gives_the_same(name: str) -> None:
    world, manual, rng = sharded(name), sharded(name, manual=True), np.random.default_rng(1)
    state, other = world.init(), manual.init()
    for _ in range(3):
        gradient = draw(rng)
        updates, state = world.update(gradient, state)
        expected, other = manual.update(gradient, other)
        for k in SHAPES:
            np.testing.assert_allclose(updates[k], expected[k], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "check_vma"), slow_but([("dgc", False)], [(n, i % 2 == 0) for i, n in enumerate(METHODS)])
)
def test_a_bad_entry_skips_all_shards(name: str, check_vma: bool) -> None:
    """One model device of one worker sees it."""
    world, rng = sharded(name, check_vma=check_vma), np.random.default_rng(2)
    _, state = world.update(draw(rng), world.init())
    bad = draw(rng)
    bad["up"][2, 3, 30] = np.inf
    updates, after = world.update(bad, state)
    assert not any(np.asarray(u).any() for u in updates.values())
    assert int(exchange_state(after).skipped) == int(exchange_state(state).skipped) + 1
    for old, new in zip(
        jax.tree.leaves(exchange_state(state).memory), jax.tree.leaves(exchange_state(after).memory), strict=True
    ):
        np.testing.assert_array_equal(old, new)


def test_nothing_is_gathered_along_the_model_axis() -> None:
    """But the update of what lies on all of its devices; and each device sends its shard's payload, no more."""
    world = sharded("int8")
    compiled = world.step.lower(
        jax.device_put(
            draw(np.random.default_rng(3)), {k: NamedSharding(world.mesh, P("data", *s)) for k, s in SPECS.items()}
        ),
        world.init(),
    ).compile()
    sent = gc.wire_bytes(compiled, mesh=world.mesh).by("axis")
    rows = 2 * -(-24 * 32 // MODEL // 64)
    each_phase = (N - 1) * (rows // N) * (64 + 4)
    assert each_phase * 2 <= sent[("data",)].sent <= each_phase * 2 + 2 * 4 * 4 + 8
    # Half the bias to the other device, and a word about whether the step counts.
    assert sent[("model",)].sent <= 4 * 4 + 2 * 4
    residual = exchange_state(world.init()).memory[0][0].value
    assert residual.sharding.shard_shape(residual.shape)[0] == rows // 2


def test_inside_a_hierarchy() -> None:
    """Three levels: slices, chips of a slice, and a model axis that the compiler has."""
    mesh = mesh_of((2, 2, 2), ("slices", "chips", "model"))
    both, rng = ("slices", "chips"), np.random.default_rng(4)
    inner = gc.hierarchical(
        gc.dgc(axis_name="slices", density=1 / 32, block=64, clip_norm=3.0), axis_name="slices", inner_axis_name="chips"
    )
    tx = gc.model_parallel(inner, axis_name=both, model_axis_name="model", param_specs=SPECS)
    world = World(tx, mesh, axis=both)
    state = world.init()
    for _ in range(3):
        updates, state = world.update(draw(rng), state)
        for value in updates.values():
            assert len({np.asarray(u).tobytes() for u in value}) == 1
    bad = draw(rng)
    bad["down"][3, 30, 3] = np.nan
    updates, after = world.update(bad, state)
    assert not any(np.asarray(u).any() for u in updates.values())
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        if old.ndim:
            np.testing.assert_array_equal(old, new)
    resized = gc.resize_workers(after, old=2, new=3)
    marked = [jax.tree.leaves(s, is_leaf=is_per_device) for s in (after, resized)]
    for old, new in zip(*marked, strict=True):
        if is_per_device(old) and old.kind == "worker":
            a, b = (np.asarray(x.value, np.float64).reshape(n, 4, x.rows, -1).mean(0) for x, n in ((old, 2), (new, 3)))
            np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-12)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="must differ, got 'a' for both"):
        gc.model_parallel(gc.dense(axis_name="a"), axis_name="a", model_axis_name="a", param_specs=P())
    tx = gc.model_parallel(gc.dense(axis_name="data"), axis_name="data", model_axis_name="model", param_specs=[P()])
    with pytest.raises(ValueError, match="param_specs must be a tree"):
        World(tx, mesh_of()).init()
    crossed = gc.model_parallel(
        gc.dense(axis_name="data"),
        axis_name="data",
        model_axis_name="model",
        param_specs={**SPECS, "up": P(("data", "model"))},
    )
    with pytest.raises(ValueError, match="shard each dimension along one axis"):
        World(crossed, mesh_of()).init()


def test_buckets_reach_through_the_nested_mapping() -> None:
    """What is told through optax's extra arguments, arrays or not, arrives where the compiler has the model axis."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append({name: value for name, value in extra.items() if name in ("gradcomp_context", "value")})
        return inner.update(updates, state, params, **extra)

    inner = METHODS["int8"]("data")
    spy = optax.GradientTransformationExtraArgs(inner.init, update)
    tx = gc.bucketed(
        gc.model_parallel(spy, axis_name="data", model_axis_name="model", param_specs=SPECS), bucket_bytes=1
    )
    told = optax.GradientTransformationExtraArgs(
        tx.init, lambda u, s, p=None, **extra: tx.update(u, s, p, value=np.ones((), np.float32), **extra)
    )
    world, plain, rng = World(told, mesh_of()), sharded("int8"), np.random.default_rng(6)
    gradient = draw(rng)
    updates, _ = world.update(gradient, world.init())
    expected, _ = plain.update(gradient, plain.init())
    assert context_of(seen[-1]).buckets == ((2,), (1,), (0,)) and seen[-1]["value"].shape == ()
    for k in SHAPES:
        np.testing.assert_array_equal(updates[k], expected[k])
