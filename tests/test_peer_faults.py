"""Faults seen in other gradient-compression libraries: a test for each that would catch it here.

Each test is of all registered methods where the fault could be in any of them. One NaN that makes every worker's gradient
NaN, and one inf that empties it and the memories without a word: test_conformance.py, with a bad gradient. All zeros, of which
some send everything and some give NaN (a norm of zero, an orthogonalization of zeros): there, with its first gradient.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.methods.traffic import traffic_of
from tests.conformance.environments import environment, exchange_state
from tests.programs import compiled, kernels
from tests.quick import SOME
from tests.training.problem import batch, loss, mesh_of, on
from tests.training.problem import params as small_params

AXIS, N = "data", 8
SHAPE = (33, 37)
"""Does not fill its last block; one for all, so that a method has one program."""
codes = gc.compressors
OPTIONS = {"one_bit_adam": {"warm_up_steps": 1}}
AVERAGES = [name for name, method in METHODS.items() if method.update == "mean"]


@functools.cache
def world_of(name: str):
    return environment("vmap", METHODS[name].build(axis_name=AXIS, **OPTIONS.get(name, {})))


def matrix(value) -> dict:
    return {"w": np.asarray(value, np.float32)}


def steps(name: str, gradient: dict, count: int) -> tuple[list[np.ndarray], object]:
    """The updates of ``w`` in ``count`` steps of one gradient, and the state after them."""
    world, params = world_of(name), {"w": np.zeros(gradient["w"].shape[1:], np.float32)}
    state, updates = world.init(params), []
    for _ in range(count):
        update, state = world.update(gradient, state, params)
        updates.append(np.asarray(update["w"], np.float64)[0])
    return updates, state


def round_trip(code: codes.Compressor, x: np.ndarray) -> np.ndarray:
    rows = kernels.as_rows(np.asarray(x, np.float32), code.block)
    count = kernels.valid_counts(x.size, code.block)
    state = code.init(x.shape)
    seeds = kernels.row_seeds(jax.random.key(0), rows.shape[0]) if code.side_information else None
    info = codes.RowInfo(count, jax.random.key(1), side=seeds)
    payload, _ = compiled(code.encode)(rows, state, info)
    return np.asarray(compiled(code.decode)(payload, info), np.float64).reshape(-1)[: x.size]


SIGNS = {"means": codes.sign("means"), "l1": codes.sign("l1"), "drive": codes.rotated(1, unbiased=False)}


@pytest.mark.parametrize("kind", SIGNS)
def test_a_sign_code_comes_nearer_than_sending_nothing(kind: str) -> None:
    """A uint8 ``~mask`` is 254 or 255 and never false: one codec's relative error was 202."""
    x = np.random.default_rng(0).standard_normal(10_000)
    assert np.linalg.norm(round_trip(SIGNS[kind], x) - x) < 0.65 * np.linalg.norm(x)


def test_the_warm_start_is_kept() -> None:
    """Overwritten in every step, PowerSGD's error stays that of a random subspace instead of falling to the best there is."""
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((64, 64)))[0] for _ in range(2))
    spectrum = 0.8 ** np.arange(64)
    target = (left * spectrum) @ right
    best = np.linalg.norm(spectrum[4:]) / np.linalg.norm(spectrum)
    code = codes.low_rank(4, (64, 64))
    state, row, count = (
        code.init((64, 64)),
        np.asarray(target.reshape(1, -1), np.float32),
        np.full((1,), 64 * 64, np.float32),
    )
    errors = []
    for _ in range(20):
        info = codes.RowInfo(count)
        info = info._replace(side=compiled(code.from_mean)(compiled(code.statistic)(row, info, state)))
        payload, _ = compiled(code.encode)(row, state, info)
        errors.append(np.linalg.norm(np.asarray(compiled(code.decode)(payload, info)) - row) / np.linalg.norm(row))
        state = compiled(code.next_state)(state, payload)
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


@pytest.mark.parametrize("name", AVERAGES)
def test_a_constant_gradient_gets_through(name: str) -> None:
    """Thresholds that nothing exceeds, and clipping at a sigma of zero, hold a constant gradient back for ever.

    In the sum over the steps a method with a memory sends all of it but what it holds, one without all of it.
    """
    count = 12
    updates, _ = steps(name, matrix(np.full((N, *SHAPE), 0.25)), count)
    total = np.sum(updates, axis=0)
    if METHODS[name].kept == "nothing":
        np.testing.assert_allclose(total.mean(), 0.25 * count, rtol=0.02)
    elif METHODS[name].kept in ("residual", "estimate"):
        assert total.mean() > 0.002 * count
    assert total.any()


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_a_single_entry_is_not_clipped_away(shape: tuple[int, ...]) -> None:
    """Its standard deviation is zero."""
    tx = gc.terngrad(axis_name=AXIS, mask=True)
    world, params = environment("vmap", tx), {"w": np.zeros(shape, np.float32)}
    updates, _ = world.update({"w": np.full((N, *shape), -3.0, np.float32)}, world.init(params), params)
    np.testing.assert_allclose(np.asarray(updates["w"])[0], np.full(shape, -3.0))


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_the_error_does_not_grow_with_the_tensor(norm: str) -> None:
    """One l2 norm over a whole tensor: relative error over 5 at 25 million entries."""
    rng = np.random.default_rng(2)
    code = codes.block_quantized(bits=4, block=512, stochastic=True, norm=norm)
    errors = []
    for size in (2**10, 2**20):
        x = rng.standard_normal(size)
        errors.append(np.linalg.norm(round_trip(code, x) - x) / np.linalg.norm(x))
    assert errors[1] < 1.1 * errors[0] < 2.0


def test_integer_sums_have_room() -> None:
    """int8 sums wrap silently: 128 ones are -128."""
    tx = gc.terngrad(axis_name=AXIS, collective="all_reduce")
    params = {"w": np.ones((20, 80), np.float32)}
    with pytest.raises(ValueError, match=r"128 ternaries can wrap.*two_phase"):
        jax.eval_shape(
            jax.vmap(lambda g: tx.update(g, tx.init(params)), axis_name=AXIS), {"w": np.ones((128, 20, 80), np.float32)}
        )
    # A majority of more workers than a byte can count.
    many = gc.sign_sgd(axis_name=AXIS, block=16)
    update = jax.vmap(lambda g: many.update(g, many.init(params))[0], axis_name=AXIS)
    ones = jax.jit(update)({"w": np.ones((300, 20, 80), np.float32)})
    assert (np.asarray(ones["w"]) == 1).all()


@pytest.mark.parametrize("name", [n for n in AVERAGES if n not in ("eden", "powersgd")])
def test_padding_is_in_no_statistic(name: str) -> None:
    """A tensor that does not fill its last block decodes as in a block that is full: one stray byte raised a scale 14x.

    Of a constant every scale, mean and level is the constant, whatever the block has besides. (Rotations and projections
    have no such number of a block.)
    """
    updates, _ = steps(name, matrix(np.full((N, *SHAPE), 0.5)), 1)
    sent = updates[0][updates[0] != 0]
    assert sent.size
    np.testing.assert_allclose(sent, 0.5, rtol=0.15)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.kept == "residual" and m.update == "mean"])
def test_the_end_of_a_tensor_is_sent_too(name: str) -> None:
    """A selection cut off in index order never sends the tail: the memory of its last entries grows without end."""
    rng = np.random.default_rng(3)
    gradient = np.broadcast_to(rng.uniform(0.9, 1.1, SHAPE), (N, *SHAPE))
    updates, _ = steps(name, matrix(gradient), 150)
    reached = np.sum(updates, axis=0).reshape(-1) != 0
    assert reached[: reached.size // 2].mean() > 0.5
    assert abs(reached[-256:].mean() - reached[:256].mean()) < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name in SOME])
def test_a_checkpoint_holds_all_there_is(name: str, tmp_path) -> None:
    """Residuals that are reset or missing: training goes on, and somewhere else."""
    tx = optax.chain(METHODS[name].build(axis_name=AXIS, **OPTIONS.get(name, {})), optax.sgd(0.01))
    mesh = mesh_of(N)
    step = gc.make_train_step(loss, tx, mesh, donate=False)

    def run(state, seeds):
        for seed in seeds:
            state, metrics = step(state, on(mesh, batch(seed)))
            assert np.isfinite(metrics["loss"])
        return state

    halfway = run(gc.init_state(small_params(), tx, mesh), (0, 1, 2))
    gc.save_checkpoint(tmp_path / "saved", halfway)
    restored = gc.restore_checkpoint(tmp_path / "saved", gc.init_state(small_params(), tx, mesh))
    chex.assert_trees_all_equal(run(restored, (3, 4)), run(halfway, (3, 4)))


@pytest.mark.parametrize("name", [n for n in METHODS if not n.startswith("dense")])
def test_claimed_bits_are_payload_bits(name: str) -> None:
    """Claims of 1 or 2 bits while bytes cross: what is described, which test_wire.py holds against the compiled program."""
    tx = METHODS[name].build(axis_name=AXIS, **OPTIONS.get(name, {}))
    sent = 8 * traffic_of(tx, {"w": np.zeros((256, 512), np.float32)}, {AXIS: N}).sent / (256 * 512)
    claimed = {"one_bit_sgd": 1.25, "sign_sgd": 1, "ef_sign_sgd": 1, "one_bit_adam": 1, "qsgd": 4, "eden": 4, "fp8": 8}
    if name in claimed:
        # Uplink and downlink, with scales and padding; two means for each column of 256 are a quarter of a bit.
        assert sent < 2 * (N - 1) / N * claimed[name] * 1.08
    assert sent < 2 * (N - 1) / N * 32


@pytest.mark.parametrize("block", [256, 257, 65536, 65537])
def test_indices_have_room(block: int) -> None:
    """Indices as int16, or as halves that count to 2048: positions beyond come back as others."""
    code = codes.topk(1 / block, block=block)
    x = np.zeros(block, np.float32)
    x[-1] = 7.0
    np.testing.assert_array_equal(round_trip(code, x), x)


def test_weight_decay_comes_before_the_exchange() -> None:
    """Added after it, it is missing from the momentum and the residual: 2% of ImageNet accuracy in one implementation."""
    tx = gc.dgc(axis_name=AXIS, density=1 / 64, block=64, weight_decay=0.5, momentum=0.0)
    world, params = environment("vmap", tx), {"w": np.ones((40, 64), np.float32)}
    updates, state = world.update(matrix(np.zeros((N, 40, 64))), world.init(params), params)
    kept = np.asarray(exchange_state(state).memory[0][0].accumulated.value).mean(axis=0)
    np.testing.assert_allclose(np.asarray(updates["w"])[0] + kept.reshape(40, 64), 0.5, rtol=1e-6)
    assert (np.asarray(updates["w"])[0] != 0).mean() < 0.05


def test_momentum_is_applied_once() -> None:
    """Everything is sent in every step: DGC and plain SGD after it are heavy-ball momentum, not momentum of momentum."""
    tx = optax.chain(gc.dgc(axis_name=AXIS, density=1.0, block=64, momentum=0.9, masking=False), optax.sgd(1.0))
    reference = optax.sgd(1.0, momentum=0.9)
    world, params = environment("vmap", tx), {"w": np.zeros((40, 64), np.float32)}
    state, wanted, plain = world.init(params), reference.init(params), jax.jit(reference.update)
    rng, got, want = np.random.default_rng(5), 0.0, 0.0
    for _ in range(10):
        gradient = matrix(rng.standard_normal((N, 40, 64)))
        updates, state = world.update(gradient, state, params)
        dense, wanted = plain({"w": np.mean(gradient["w"], axis=0)}, wanted)
        got, want = got + np.asarray(updates["w"])[0], want + np.asarray(dense["w"])
    # What rounding to bfloat16 holds back goes out in the next step.
    np.testing.assert_allclose(got, want, atol=0.02)


def test_only_gradients_are_compressed() -> None:
    """Hooks on a process group also catch the collectives that are none of theirs: metrics, batch statistics."""
    tx = gc.sign_sgd(axis_name=AXIS)

    def step(gradient, metric):
        updates, _ = tx.update(gradient, tx.init(gradient))
        return updates, jax.lax.pmean(metric, AXIS), jax.lax.psum(metric.astype(jnp.int32), AXIS)

    rng = np.random.default_rng(6)
    metric = np.asarray(rng.standard_normal((N, 1000)) * 100, np.float32)
    mapped = jax.jit(jax.vmap(step, axis_name=AXIS))
    _, mean, total = mapped(matrix(rng.standard_normal((N, 48, 64))), metric)
    np.testing.assert_allclose(mean[0], np.mean(np.asarray(metric, np.float64), axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(total[0], np.asarray(metric).astype(np.int32).sum(axis=0))


def test_a_gradient_that_somebody_reduced_is_refused() -> None:
    """Summed once by automatic differentiation and once more by the exchange: N times too large, or compressed for nothing."""
    tx, mesh = gc.qsgd(axis_name=AXIS), mesh_of(N)
    params = {"w": np.ones((48, 64), np.float32)}

    def step(x):
        gradient = jax.grad(lambda p: jnp.mean(x @ p["w"]))(params)
        return tx.update(gradient, tx.init(params))[0]

    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    with pytest.raises(ValueError, match=re.escape("'w' is already reduced over 'data'")):
        jax.eval_shape(mapped, np.ones((16, 48), np.float32))
