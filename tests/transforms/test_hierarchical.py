"""Two levels of links: what is the same as an exchange of the workers' means, and what crosses where."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state, means_kept
from tests.marks import slow_but

OUTER, INNER = "slices", "chips"
AXES = (OUTER, INNER)
N, DEVICES = 2, 4
SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 16), "matrix": (42, 64), "scalar": ()}
P = PartitionSpec
METHODS = {
    "dense": lambda: gc.dense(axis_name=OUTER),
    "dgc": lambda: gc.dgc(axis_name=OUTER, density=1 / 32, block=64, clip_norm=5.0, weight_decay=0.1),
    "topk": lambda: gc.topk_sgd(axis_name=OUTER, density=1 / 32, block=64, dtype="float32", collective="all_gather"),
    "int8": lambda: gc.block_quantized(axis_name=OUTER, block=64),
    "server": lambda: gc.exchange(
        gc.compressors.block_quantized(block=64), axis_name=OUTER, collective=gc.collectives.TwoPhase("server")
    ),
    "powersgd": lambda: gc.powersgd(axis_name=OUTER, rank=1),
    "one_bit_adam": lambda: gc.one_bit_adam(axis_name=OUTER, warm_up_steps=2, block=64),
    "dion": lambda: gc.dion(axis_name=OUTER, rank=2),
    "ef21": lambda: gc.ef21(axis_name=OUTER, density=1 / 32, block=64, collective="two_phase"),
    "terngrad": lambda: gc.terngrad(axis_name=OUTER, bucket_size=80),
    "moving": lambda: gc.density_controller((1 / 64, 1 / 16), 0.5, axis_name=OUTER, every=1),
}
EXACT = [name for name in METHODS if name not in ("terngrad", "moving")]


def mesh_of(kind=AxisType.Auto, shape=(N, DEVICES)):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, AXES, axis_types=(kind, kind), devices=jax.devices()[:count])


def params():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def draw(rng, devices=N * DEVICES):
    return {name: rng.standard_normal((devices, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


class World:
    """A hierarchical transformation on a mesh of two axes; gradients are stacked by device, outer axis first."""

    def __init__(self, name, *, kind=AxisType.Auto, check_vma=True, shape=(N, DEVICES)):
        self.mesh, self.check_vma = mesh_of(kind, shape), check_vma
        self.tx = gc.hierarchical(METHODS[name](), axis_name=OUTER, inner_axis_name=INNER)
        self.step = jax.jit(self._step)

    def init(self):
        return gc.init_state(params(), self.tx, self.mesh, axis_name=AXES).opt_state

    def _step(self, gradient, state):
        def local(gradient, state):
            updates, state = self.tx.update(jax.tree.map(lambda g: g[0], gradient), state, params())
            return jax.tree.map(lambda u: u[None], updates), state

        specs = gc.state_specs(state, axis_name=AXES)
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=(P(AXES), specs), out_specs=(P(AXES), specs), check_vma=self.check_vma
        )
        return mapped(gradient, state)

    def update(self, gradient, state):
        placed = jax.device_put(gradient, jax.NamedSharding(self.mesh, P(AXES)))
        return self.step(placed, state)


def shard(x, j):
    """Device j's shard of a tensor: rows of the matrix of its last dimension against all others."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1)
    size = -(-rows.shape[0] // DEVICES)
    padded = np.pad(rows, [(0, size * DEVICES - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1))
    return padded[j * size : (j + 1) * size]


def test_a_shard_of_stacked_layers_is_whole_layers(monkeypatch) -> None:
    """Where the devices divide the layers, each device has matrices of its own, and a mean of their rank is reproduced;
    with momentum, twice at first."""
    rng, shape = np.random.default_rng(0), (2 * DEVICES, 10, 12)
    monkeypatch.setitem(
        METHODS, "stacked", lambda: gc.powersgd(axis_name=OUTER, rank=1, matrix={"layers": 1}, momentum=0.5)
    )
    monkeypatch.setitem(globals(), "SHAPES", {"layers": shape})
    world = World("stacked")
    state = world.init()
    (right,) = jax.tree.leaves(exchange_state(state).compressor)
    assert right.shape[1:] == (12, 1), "a matrix for each layer, none of them dense"
    mean = rng.standard_normal((*shape[:2], 1)) @ rng.standard_normal((shape[0], 1, shape[2]))
    apart = rng.standard_normal((N * DEVICES, *shape))
    gradient = {"layers": (mean + apart - apart.mean(axis=0)).astype(np.float32)}
    for times in (2, 2.5):
        updates, state = world.update(gradient, state)
        np.testing.assert_allclose(
            updates["layers"], np.broadcast_to(times * mean, apart.shape), atol=1e-5 * np.abs(mean).max()
        )


def whole(parts, shape):
    return np.concatenate([np.asarray(p).reshape(-1) for p in parts])[: int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("name", slow_but(("dgc",), EXACT))
def test_each_shard_is_an_exchange_of_the_workers_means(name: str) -> None:
    """Device j's workers exchange the means of their devices' gradients, shard j of each tensor, and nothing else.

    Local clipping is by the norm of a worker's whole gradient: the reference is handed gradients that are clipped already.
    """
    world, rng = World(name), np.random.default_rng(0)
    state = world.init()
    alone = gc.dgc(axis_name=OUTER, density=1 / 32, block=64, weight_decay=0.0) if name == "dgc" else METHODS[name]()
    own_params = {k: jnp.asarray(shard(np.ones(s, np.float32), 0)) for k, s in SHAPES.items()}
    axes = gc.state_axes(jax.eval_shape(alone.init, own_params))
    init = jax.jit(jax.vmap(alone.init, axis_name=OUTER, in_axes=None, out_axes=axes, axis_size=N))
    reference = jax.jit(jax.vmap(alone.update, axis_name=OUTER, in_axes=(0, axes, None), out_axes=(0, axes)))
    states = [init(own_params) for _ in range(DEVICES)]
    for _ in range(5):
        gradient = draw(rng)
        updates, state = world.update(gradient, state)
        means = {k: g.reshape(N, DEVICES, *g.shape[1:]).mean(axis=1) for k, g in gradient.items()}
        if name == "dgc":
            means = {k: m + np.float32(0.1) for k, m in means.items()}
            for worker in range(N):
                norm = np.sqrt(sum((m[worker].astype(np.float64) ** 2).sum() for m in means.values()))
                for m in means.values():
                    m[worker] *= min(1.0, 5.0 * N**-0.5 / norm)
        wanted = []
        for j in range(DEVICES):
            shards = {k: np.stack([shard(m[w], j) for w in range(N)]) for k, m in means.items()}
            if name == "dgc":
                # Decayed and clipped, the zeros that fill up the last shard are zeros still.
                shards = {
                    k: np.where(np.stack([shard(np.ones(SHAPES[k]), j)] * N) > 0, s, 0) for k, s in shards.items()
                }
            got, states[j] = reference(shards, states[j], own_params)
            wanted.append(got)
        for k, shape in SHAPES.items():
            assert len({np.asarray(u).tobytes() for u in updates[k]}) == 1, "devices differ"
            want = whole([w[k][0] for w in wanted], shape)
            np.testing.assert_allclose(updates[k][0], want, atol=2e-4, rtol=2e-4, err_msg=k)


WORLDS = ((AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Auto, False))


@pytest.mark.parametrize(
    ("name", "kind", "check_vma"), slow_but([("dgc", *WORLDS[1])], [(n, *WORLDS[i % 3]) for i, n in enumerate(METHODS)])
)
def test_a_bad_entry_skips_the_exchange_on_every_device(name: str, kind: AxisType, check_vma: bool) -> None:
    """The device that sees it has one shard of one worker; all shards of all workers must skip."""
    world, rng = World(name, kind=kind, check_vma=check_vma), np.random.default_rng(1)
    _, state = world.update(draw(rng), world.init())
    bad = draw(rng)
    bad["matrix"][5, 10, 3] = np.nan
    updates, after = world.update(bad, state)
    assert not any(np.asarray(u).any() for u in updates.values())
    assert int(exchange_state(after).skipped) == int(exchange_state(state).skipped) + 1
    for old, new in zip(
        jax.tree.leaves(exchange_state(state).memory), jax.tree.leaves(exchange_state(after).memory), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    updates, _ = world.update(draw(rng), after)
    for value in updates.values():
        assert len({np.asarray(u).tobytes() for u in value}) == 1
    assert np.asarray(updates["matrix"]).any()
    assert world.step._cache_size() == 1


def test_only_the_shard_crosses_the_slow_axis() -> None:
    world = World("int8")
    state = world.init()
    compiled = world.step.lower(draw(np.random.default_rng(2)), state).compile()
    sent = gc.wire_bytes(compiled, mesh=world.mesh).by("axis", "kind")
    sizes = {k: int(np.prod(shard(np.ones(s), 0).shape)) for k, s in SHAPES.items()}
    rows = -(-sizes["kernel"] // 64) + -(-sizes["matrix"] // 64)
    # What goes dense rides along: the shard of it, and no more.
    dense = -(-(sizes["bias"] + sizes["scalar"]) // N) * 4
    each_phase = (N - 1) * (-(-rows // N) * (64 + 4) + dense)
    assert sent[(OUTER,), "all-to-all"].sent == each_phase
    assert each_phase <= sent[(OUTER,), "all-gather"].sent <= each_phase + 4
    assert ((OUTER,), "all-reduce") not in sent
    total = sum(sizes.values())
    assert sent[(INNER,), "reduce-scatter"].sent == (DEVICES - 1) * total * 4
    assert sent[(INNER,), "all-gather"].sent == (DEVICES - 1) * total * 4


def test_memories_are_of_the_shard() -> None:
    """Each device's residual has 1 / n of a worker's rows."""
    state = World("topk").init()
    held = [leaf for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, gc.PerDevice))]
    rows = {leaf.rows for leaf in held if isinstance(leaf, gc.PerDevice)}
    assert rows == {-(-(9 * 16) // 64), 11, 1}, "and one number, of how much is held back"
    assert all(leaf.shards == DEVICES for leaf in held if isinstance(leaf, gc.PerDevice))


@pytest.mark.parametrize("name", slow_but(("server",), ("server", "ef21")))
def test_another_number_of_workers(name: str, tmp_path) -> None:
    """From two workers of two devices to four: residuals' means, owners' rows and replicas are what they were."""
    world, rng = World(name, shape=(2, 2)), np.random.default_rng(3)
    state = world.init()
    for _ in range(4):
        _, state = world.update(draw(rng, 4), state)
    gc.save_checkpoint(tmp_path / "saved", state)
    like = World(name, shape=(4, 2)).init()
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    marked = [
        [x for x in jax.tree.leaves(s, is_leaf=lambda x: isinstance(x, gc.PerDevice)) if isinstance(x, gc.PerDevice)]
        for s in (state, restored)
    ]
    for old, new in zip(*marked, strict=True):
        a, b = np.asarray(old.value, np.float64), np.asarray(new.value, np.float64)
        if old.kind == "shard":
            rows = [-(-old.rows // n) for n in (2, 4)]
            a, b = (
                np.moveaxis(x.reshape(n, 2, r, -1), 0, 2).reshape(2, n * r, -1)[:, : old.rows]
                for x, n, r in ((a, 2, rows[0]), (b, 4, rows[1]))
            )
        else:
            a, b = (x.reshape(n, 2, old.rows, -1).mean(axis=0) for x, n in ((a, 2), (b, 4)))
        np.testing.assert_allclose(b, a, rtol=1e-12)
        assert a.any()
    updates, _ = World(name, shape=(4, 2)).update(draw(rng, 8), restored)
    assert np.asarray(updates["matrix"]).any()


def test_two_workers_of_several_devices_have_no_owners() -> None:
    """From four workers of two devices to two: what each device's owners held goes to that device of every worker."""
    world, rng = World("dgc", shape=(4, 2)), np.random.default_rng(3)
    state = world.init()
    for _ in range(4):
        _, state = world.update(draw(rng, 8), state)
    like = World("dgc", shape=(2, 2)).init()
    resized = gc.resize_workers(state, old=4, new=2)
    assert jax.tree.map(np.shape, resized) == jax.tree.map(np.shape, like)
    before, after = exchange_state(state), exchange_state(resized)
    assert np.abs(before.server[0].value).max() > 0.01 and not np.any(after.server[0].value)
    for want, got in zip(means_kept(before, 4), means_kept(after, 2), strict=True):
        assert len(want) == 2
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="must differ, got 'a' for both"):
        gc.hierarchical(gc.dense(axis_name="a"), axis_name="a", inner_axis_name="a")
    tx = World("topk").tx
    with pytest.raises(NameError, match="the axis 'chips' is not bound here"):
        tx.init(params())


@pytest.mark.parametrize("over", [AXES, INNER], ids=["both", "inner"])
def test_an_exchange_over_the_devices_of_a_worker_is_refused(over) -> None:
    """It would average different shards."""
    tx = gc.hierarchical(gc.dense(axis_name=over), axis_name=OUTER, inner_axis_name=INNER)
    with pytest.raises(ValueError, match=r"along 'chips' each device has another part.*between workers alone"):
        gc.lower_update(params(), tx, mesh_of(), axis_name=AXES)
    with pytest.raises(ValueError, match="must differ"):
        gc.hierarchical(gc.dense(axis_name=OUTER), axis_name=AXES, inner_axis_name=INNER)


def test_axes_in_another_order_are_refused() -> None:
    """The rows of its state would be taken for those of other devices."""
    tx = gc.hierarchical(METHODS["topk"](), axis_name=OUTER, inner_axis_name=INNER)
    state = gc.init_state(params(), tx, mesh_of(), axis_name=AXES)
    step = gc.make_train_step(
        lambda p, b: sum(jnp.sum(x) for x in p.values()) * b.mean(), tx, mesh_of(), axis_name=AXES[::-1]
    )
    with pytest.raises(ValueError, match="give axis_name the axis between workers first"):
        step(state, jnp.ones(8))


SHARDED = {"bias": P(), "kernel": P(None, None, INNER), "matrix": P(None, INNER), "scalar": P()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dgc", "int8", "one_bit_adam"))
def test_a_sharded_parameter_gets_its_shard_of_the_update(name: str) -> None:
    """Fully sharded: whole gradients in, and each device's shard out is an exchange of that shard of the means."""
    rng, mesh = np.random.default_rng(7), mesh_of()
    method = gc.dgc(axis_name=OUTER, density=1 / 32, block=64) if name == "dgc" else METHODS[name]()
    tx = gc.hierarchical(method, axis_name=OUTER, inner_axis_name=INNER, param_specs=SHARDED)
    state = gc.init_state(params(), tx, mesh, axis_name=AXES, param_specs=SHARDED).opt_state

    @jax.jit
    def step(gradient, state):
        def local(gradient, state, values):
            return tx.update(jax.tree.map(lambda g: g[0], gradient), state, values)

        specs = gc.state_specs(state, axis_name=AXES)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(AXES), specs, SHARDED), out_specs=(SHARDED, specs))
        return mapped(gradient, state, params())

    def mine(k, x, j):
        if INNER not in SHARDED[k]:
            return shard(x, j)
        return np.split(x, DEVICES, axis=SHARDED[k].index(INNER))[j]

    own_params = {k: jnp.asarray(mine(k, np.ones(s, np.float32), 0)) for k, s in SHAPES.items()}
    axes = gc.state_axes(jax.eval_shape(method.init, own_params))
    init = jax.jit(jax.vmap(method.init, axis_name=OUTER, in_axes=None, out_axes=axes, axis_size=N))
    reference = jax.jit(jax.vmap(method.update, axis_name=OUTER, in_axes=(0, axes, None), out_axes=(0, axes)))
    states = [init(own_params) for _ in range(DEVICES)]
    for _ in range(4):
        gradient = draw(rng)
        updates, state = step(jax.device_put(gradient, jax.NamedSharding(mesh, P(AXES))), state)
        means = {k: g.reshape(N, DEVICES, *g.shape[1:]).mean(axis=1) for k, g in gradient.items()}
        for j in range(DEVICES):
            shards = {k: np.stack([mine(k, m[w], j) for w in range(N)]) for k, m in means.items()}
            want, states[j] = reference(shards, states[j], own_params)
            for k in ("kernel", "matrix"):
                np.testing.assert_allclose(mine(k, np.asarray(updates[k]), j), want[k][0], atol=2e-4, rtol=2e-4)
    assert updates["matrix"].sharding.shard_shape((42, 64)) == (42, 16)


def test_fully_sharded_training_gathers_parameters_and_no_updates() -> None:
    mesh, rng = mesh_of(), np.random.default_rng(8)
    specs = {"w": P(INNER, None), "b": P()}
    tx = optax.chain(
        gc.hierarchical(
            gc.block_quantized(axis_name=OUTER, block=64), axis_name=OUTER, inner_axis_name=INNER, param_specs=specs
        ),
        optax.sgd(0.5, momentum=0.5),
    )
    target = rng.standard_normal((64, 32)).astype(np.float32)
    state = gc.init_state(
        {"w": np.zeros((64, 32), np.float32), "b": np.zeros((32,), np.float32)},
        tx,
        mesh,
        axis_name=AXES,
        param_specs=specs,
    )
    step = gc.make_train_step(
        lambda p, b: jnp.mean((b[0] @ p["w"] + p["b"] - b[1]) ** 2), tx, mesh, axis_name=AXES, param_specs=specs
    )

    def batch():
        x = rng.standard_normal((64, 64)).astype(np.float32)
        return jax.device_put((x, x @ target), jax.NamedSharding(mesh, P(AXES)))

    sent = gc.wire_bytes(step.lower(state, batch()).compile(), mesh=mesh).by("axis", "kind")
    # The parameters' way to every device, and the bias's update, of which each has a shard; no more.
    assert sent[(INNER,), "all-gather"].sent == (DEVICES - 1) * 4 * (16 * 32 + 8)
    assert sent[(INNER,), "reduce-scatter"].sent == (DEVICES - 1) * 4 * (16 * 32 + 8)
    losses = []
    for _ in range(100):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 * losses[0]
    assert step._cache_size() == 1
    assert state.params["w"].sharding.shard_shape((64, 32)) == (16, 32)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (64, 32)]
    assert [leaf.sharding.shard_shape(leaf.shape) for leaf in moments] == [(16, 32)]


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    tx = gc.hierarchical(
        gc.dense(axis_name=OUTER), axis_name=OUTER, inner_axis_name=INNER, param_specs={**SHARDED, "matrix": P(INNER)}
    )
    gradient = draw(np.random.default_rng(9))

    def local(g):
        shards = {**params(), "matrix": np.ones((10, 64), np.float32), "kernel": np.ones((3, 3, 1, 16), np.float32)}
        return tx.update(jax.tree.map(lambda x: x[0], g), tx.init(shards), shards)[0]["bias"]

    with pytest.raises(ValueError, match=r"dimension 0 of 'matrix', of shape \(42, 64\), does not divide among 4"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh_of(), in_specs=P(AXES), out_specs=P()), gradient)
