"""Parameters that lie along the axis, gathered in few bits: against NumPy, bit by bit, and in the bytes of whole steps."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax.collectives import ReduceScatter
from tests.training.problem import mesh_of

N, BLOCK = 4, 32
SPECS = {"bias": P(), "half": P("data"), "kernel": P(None, None, "data"), "matrix": P(None, "data"), "scale": P("data")}
COMPRESSED = ("half", "kernel", "matrix")


def params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"bias": (7,), "half": (8, 12), "kernel": (3, 3, 8, 5), "matrix": (40, 24), "scale": (16,)}
    tree = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return tree | {"half": tree["half"].astype(ml_dtypes.bfloat16)}


def int_of(bits, **options):
    return gc.compressors.block_quantized(bits=bits, block=BLOCK, **options)


def dim_of(name):
    return SPECS[name].index("data")


def rounded(whole, name, bits):
    """What all workers decode of a tensor: each worker's shard in blocks of its own, in NumPy."""
    top, parts = 2 ** (bits - 1) - 1, []
    for shard in np.split(np.asarray(whole, np.float32), N, axis=dim_of(name)):
        flat = shard.reshape(-1)
        rows = np.concatenate([flat, np.zeros(-flat.size % BLOCK, np.float32)]).reshape(-1, BLOCK)
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(top)
        codes = np.rint(rows / np.where(scale > 0, scale, 1))
        parts.append((codes * scale).reshape(-1)[: flat.size].reshape(shard.shape))
    return np.concatenate(parts, axis=dim_of(name))


def gathered(compressor, *, check_vma=True, base=None, **options):
    """Compiles a gather of whole parameters, by ``gather(tree)`` or, with a base, ``gather(tree, base)``."""

    def local(shards, *base):
        whole = gc.gather_params(
            shards, SPECS, axis_name="data", compressor=compressor, base=(*base, None)[0], **options
        )
        return whole if check_vma else jax.tree.map(lambda x: x[None], whole)

    in_specs = (SPECS,) if base is None else (SPECS, P())
    out_specs = P() if check_vma else P("data")
    return jax.jit(jax.shard_map(local, mesh=mesh_of(N), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def test_every_worker_decodes_the_same_bits() -> None:
    """And those are what NumPy rounds to; leaves that are not compressed come as they are."""
    tree = params()
    whole = gathered(int_of(4), check_vma=False)(tree)
    for name, value in tree.items():
        every = np.asarray(whole[name])
        assert every.dtype == value.dtype
        for one in every:
            np.testing.assert_array_equal(one, every[0])
        if name in COMPRESSED:
            loose = {"rtol": 2**-8} if name == "half" else {"rtol": 1e-6}
            np.testing.assert_allclose(every[0].astype(np.float32), rounded(value, name, 4), atol=1e-6, **loose)
            assert np.abs(every[0].astype(np.float32) - value.astype(np.float32)).max() > 1e-2
        else:
            np.testing.assert_array_equal(every[0], value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32"])
def test_differences_are_error_feedback(dtype: str) -> None:
    """The base follows the shards: what was sent adds up to it, and what was not is sent later."""
    tree = params()
    gather = gathered(int_of(4), base=True)
    start = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params(1))
    # On every device from the beginning: no second program for another sharding.
    base = jax.device_put(start, NamedSharding(mesh_of(N), P()))
    moved = {name: np.asarray(value, np.float64) for name, value in start.items()}
    rng = np.random.default_rng(2)
    for step in range(8):
        if step < 3:
            tree = {k: (v + 0.1 * rng.standard_normal(v.shape)).astype(v.dtype) for k, v in tree.items()}
        sent = {k: rounded(np.asarray(tree[k], np.float32) - np.asarray(base[k], np.float32), k, 4) for k in COMPRESSED}
        base = gather(tree, base)
        for name in COMPRESSED:
            assert base[name].dtype == dtype
            moved[name] = moved[name] + sent[name]
            if dtype == "float32":
                np.testing.assert_allclose(base[name], moved[name], atol=1e-5)
        for name in ("bias", "scale"):
            expected = tree[name] if name == "bias" else tree[name].astype(base[name].dtype)
            np.testing.assert_array_equal(base[name], expected)
    # Five times at rest: a fourteenth of what was left each time, down to the dtype's own rounding.
    for name in ("kernel", "matrix"):
        left = np.abs(np.asarray(base[name], np.float32) - tree[name]).max()
        assert left < (1e-4 if dtype == "float32" else 2**-6)
        plain = np.abs(rounded(tree[name], name, 4) - tree[name]).max()
        assert left < plain / 8


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_entry_is_seen_in_its_block_and_leaves_no_trace(bad: float) -> None:
    tree = params()
    gather = gathered(int_of(4), base=True)
    base = jax.device_put(params(1), NamedSharding(mesh_of(N), P()))
    good = gather(tree, base)
    broken = tree | {"matrix": tree["matrix"].copy()}
    broken["matrix"][5, 7] = bad
    seen = gather(broken, base)
    # Shards are six columns wide: columns 6 to 11, the entries of one block of its 240.
    lost = np.isnan(np.asarray(seen["matrix"]))
    assert lost[5, 7]
    assert lost.sum() == BLOCK
    assert lost[:, 6:12].sum() == BLOCK
    np.testing.assert_array_equal(np.asarray(seen["matrix"])[~lost], np.asarray(good["matrix"])[~lost])
    np.testing.assert_array_equal(seen["kernel"], good["kernel"])
    for _ in range(6):
        seen = gather(tree, seen)
    np.testing.assert_allclose(seen["matrix"], tree["matrix"], atol=1e-4)


def transposed(weights, name):
    """The sum over the workers of what each weighs a tensor with: the gradient of a dense gather."""
    return np.asarray(weights[name], np.float64).sum(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["tracked", "untracked", "vmap"])
def test_the_gradient_goes_straight_through(world: str) -> None:
    """As through a dense all-gather, though the rounding that it goes through is flat."""
    tree, rng = params(), np.random.default_rng(3)
    weights = {k: rng.standard_normal((N, *v.shape)).astype(np.float32) for k, v in tree.items()}

    def local(shards, weights):
        def loss(shards):
            whole = gc.gather_params(
                shards, SPECS, axis_name="data", compressor=int_of(2), gradient=gc.compressors.dense()
            )
            return sum(jnp.sum(whole[k].astype(jnp.float32) * weights[k]) for k in SPECS if k != "bias")

        return jax.grad(loss)(shards)

    if world == "vmap":
        split = {k: v if k == "bias" else np.stack(np.split(v, N, axis=dim_of(k))) for k, v in tree.items()}
        axes = {k: None if k == "bias" else 0 for k in SPECS}
        gradient = jax.jit(jax.vmap(local, in_axes=(axes, 0), axis_name="data"))(split, weights)
        joined = {k: np.concatenate(list(np.asarray(gradient[k])), axis=dim_of(k)) for k in SPECS if k != "bias"}
    else:

        def one(shards, weights):
            found = local(shards, jax.tree.map(lambda w: w[0], weights))
            return {k: v for k, v in found.items() if k != "bias"}

        specs = {k: v for k, v in SPECS.items() if k != "bias"}
        joined = jax.jit(
            jax.shard_map(
                one, mesh=mesh_of(N), in_specs=(SPECS, P("data")), out_specs=specs, check_vma=world == "tracked"
            )
        )(tree, weights)
    for name, found in joined.items():
        tolerance = {"rtol": 2**-8, "atol": 1e-2} if name == "half" else {"rtol": 1e-5, "atol": 1e-5}
        assert found.dtype == tree[name].dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), transposed(weights, name), **tolerance)


def step_bytes(compressor, tx):
    """What one device sends in a whole FSDP step of two matrices, by kind and in all."""
    mesh, specs = mesh_of(N), {"a": P("data"), "b": P(None, "data")}
    tree = {"a": np.zeros((256, 1024), np.float32), "b": np.zeros((1024, 256), np.float32)}
    tx = optax.chain(tx(ReduceScatter(specs)), optax.sgd(0.1))
    state = gc.init_state(tree, tx, mesh, param_specs=specs)
    step = gc.make_train_step(
        lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2), tx, mesh, param_specs=specs, param_compressor=compressor
    )
    report = gc.wire_bytes(step.lower(state, np.zeros((N, 256), np.float32)).compile())
    return report.by("kind"), report.sent


@pytest.mark.slow
def test_the_bytes_of_a_whole_step() -> None:
    """Four bits and their scales are just above a quarter of bfloat16's sixteen; gradients of three bits are below."""
    entries, block = 2 * 256 * 1024 // N, 2048
    weights = {bits: gc.compressors.block_quantized(bits=bits, block=block) for bits in (8, 4)}

    def quantized(bits):
        return lambda c: gc.block_quantized(axis_name="data", bits=bits, block=block, collective=c)

    by_kind, dense = step_bytes(
        gc.compressors.dense(jnp.bfloat16), lambda c: gc.dense(axis_name="data", dtype=jnp.bfloat16, collective=c)
    )
    assert by_kind["all-gather"].sent == by_kind["all-to-all"].sent == (N - 1) * 2 * entries
    ratios = {}
    for bits in (8, 4):
        by_kind, sent = step_bytes(weights[bits], quantized(bits))
        payload = entries * bits // 8 + entries // block * 4
        assert by_kind["all-gather"].sent == by_kind["all-to-all"].sent == (N - 1) * payload
        ratios[bits] = sent / dense
    assert 0.5 < ratios[8] < 0.502
    assert 0.25 < ratios[4] < 0.2511
    eden = step_bytes(weights[4], lambda c: gc.eden(axis_name="data", bits=3, block=block, collective=c))[1]
    assert eden / dense < 0.23


@pytest.mark.slow
def test_the_gradient_is_taken_at_what_was_gathered_and_moves_the_shards() -> None:
    """A train step against NumPy: owners' parameters are never rounded."""
    rng, mesh, specs = np.random.default_rng(5), mesh_of(N), {"matrix": P(None, "data")}
    tree = {"matrix": rng.standard_normal((40, 24)).astype(np.float32)}
    tx = optax.chain(gc.dense(axis_name="data", collective=ReduceScatter(specs)), optax.sgd(0.5))
    state = gc.init_state(tree, tx, mesh, param_specs=specs)
    step = gc.make_train_step(
        lambda p, b: jnp.mean((b[0] @ p["matrix"] - b[1]) ** 2), tx, mesh, param_specs=specs, param_compressor=int_of(4)
    )
    w = tree["matrix"].astype(np.float64)
    for _ in range(5):
        x, y = rng.standard_normal((16, 40)).astype(np.float32), rng.standard_normal((16, 24)).astype(np.float32)
        state, metrics = step(state, jax.device_put((x, y), gc.data_sharding(mesh)))
        apart = x @ rounded(w, "matrix", 4) - y
        np.testing.assert_allclose(metrics["loss"], np.mean(apart**2), rtol=1e-4)
        w -= 0.5 * 2 * x.T.astype(np.float64) @ apart / apart.size
        np.testing.assert_allclose(state.params["matrix"], w, atol=1e-5)
    assert state.params["matrix"].sharding.shard_shape((40, 24)) == (40, 6)
    assert step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_train_step_with_differences(dtype: str, tmp_path) -> None:
    """Against NumPy; and from a checkpoint, with another number of workers for the rest, the copy is what it was."""
    rng, specs = np.random.default_rng(6), {"matrix": P(None, "data"), "bias": P()}
    tree = {"matrix": rng.standard_normal((40, 24)).astype(np.float32), "bias": np.zeros(24, np.float32)}
    tx = optax.chain(gc.dense(axis_name="data", collective=ReduceScatter(specs)), optax.sgd(0.5))

    def start(workers):
        return gc.init_state(tree, tx, mesh_of(workers), param_specs=specs, param_copy=dtype)

    state = start(N)
    assert state.param_copy["bias"] == ()
    step = gc.make_train_step(
        lambda p, b: jnp.mean((b[0] @ p["matrix"] + p["bias"] - b[1]) ** 2),
        tx,
        mesh_of(N),
        param_specs=specs,
        param_compressor=int_of(4),
    )
    for _ in range(4):
        x, y = rng.standard_normal((16, 40)).astype(np.float32), rng.standard_normal((16, 24)).astype(np.float32)
        b, w = (np.asarray(state.params[name]) for name in ("bias", "matrix"))
        copy = np.asarray(state.param_copy["matrix"], np.float32)
        state, metrics = step(state, jax.device_put((x, y), gc.data_sharding(mesh_of(N))))
        copy = (copy + rounded(w - copy, "matrix", 4)).astype(dtype)
        tolerance = {"atol": 1e-5} if dtype == "float32" else {"rtol": 2**-7}
        assert state.param_copy["matrix"].dtype == dtype and state.params["matrix"].dtype == np.float32
        np.testing.assert_allclose(state.param_copy["matrix"].astype(np.float32), copy.astype(np.float32), **tolerance)
        apart = x @ np.asarray(state.param_copy["matrix"], np.float32) + b - y
        np.testing.assert_allclose(metrics["loss"], np.mean(apart**2), rtol=1e-4)
        np.testing.assert_allclose(state.params["matrix"], w - x.T @ apart / apart.size, atol=1e-5)
    assert step._cache_size() == 1
    dense = gc.make_train_step(lambda p, b: jnp.sum(p["matrix"]), tx, mesh_of(N), param_specs=specs)
    with pytest.raises(ValueError, match="not gathered as differences: give param_compressor"):
        dense.trace(state, x)
    gc.save_checkpoint(tmp_path / "saved", state)
    restored = gc.restore_checkpoint(tmp_path / "saved", start(2))
    np.testing.assert_array_equal(restored.param_copy["matrix"], state.param_copy["matrix"])
    np.testing.assert_array_equal(restored.params["matrix"], state.params["matrix"])


@pytest.mark.slow
def test_random_rounding_is_another_in_each_step() -> None:
    code, tree = int_of(4, stochastic=True), params()
    first, again, other = (np.asarray(gathered(code, key=seed)(tree)["matrix"]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_misuse_is_refused() -> None:
    tree = params()

    def trace(compressor, base=None, specs=SPECS, **options):
        args = (tree,) if base is None else (tree, base)
        return jax.eval_shape(gathered(compressor, base=base, **options), *args)

    with pytest.raises(ValueError, match="rounds at random: give key="):
        trace(int_of(4, stochastic=True))
    with pytest.raises(ValueError, match="has side information"):
        trace(gc.compressors.rotated(4))
    with pytest.raises(ValueError, match="sends integers alone"):
        trace(gc.compressors.fixed_point(), key=0)
    with pytest.raises(ValueError, match="the other parameters would be zeros: give base="):
        trace(gc.compressors.topk(0.1))
    with pytest.raises(ValueError, match=r"base has 'matrix' of shape \(40, 6\), and its 4 shards are \(40, 6\) each"):
        trace(int_of(4), base=tree | {"matrix": tree["matrix"][:, :6]})
    with pytest.raises(ValueError, match="base must be whole parameters, in a tree such as that of the shards"):
        trace(int_of(4), base={"matrix": tree["matrix"]})
    with pytest.raises(NameError, match="'data' is not bound here"):
        gc.gather_params(tree, SPECS, axis_name="data", compressor=int_of(4))
    with pytest.raises(ValueError, match="gather outside of the loss"):
        jax.eval_shape(
            jax.shard_map(
                jax.grad(lambda w: jnp.sum(gc.gather_params(w, P("data"), axis_name="data", compressor=int_of(4)))),
                mesh=mesh_of(N),
                in_specs=P("data"),
                out_specs=P("data"),
            ),
            np.ones((N, 8), np.float32),
        )
    with pytest.raises(ValueError, match="give their param_specs"):
        gc.make_train_step(lambda p, b: 0.0, optax.sgd(0.1), mesh_of(N), param_compressor=int_of(4))
    with pytest.raises(ValueError, match="give their param_specs"):
        gc.init_state(tree, optax.sgd(0.1), mesh_of(N), param_copy="float32")
