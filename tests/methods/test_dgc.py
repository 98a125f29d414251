"""DGC against a NumPy replay, its warm-up, and its ingredients."""

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state, vmapped

from .oracle import Dgc, dealt, how_many

N, AXIS = 4, "data"
SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}


def mapped(tx):
    return vmapped(tx, {k: np.ones(s, np.float32) for k, s in SHAPES.items()}, N)


def draw(rng):
    return {k: rng.standard_normal((N, *s)).astype(np.float32) for k, s in SHAPES.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collective": "all_gather", "dtype": "float32", "nesterov": True},
        {"weight_decay": 0.05, "clip_norm": 3.0, "dtype": "float32"},
        {"density": 3 / 64, "weight_decay": 0.01},
        {"density": 3 / 64, "dtype": "float32", "clip_norm": 1.0, "masking": False},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_replay_of_twenty_steps(options) -> None:
    settings = {
        "momentum": 0.9, "nesterov": False, "masking": True, "weight_decay": 0.0, "clip_norm": None,
        "dtype": "bfloat16", "collective": "two_phase", "density": 1 / 64,
    } | options  # fmt: skip
    state, update = mapped(gc.dgc(axis_name=AXIS, block=64, **settings))
    k = round(settings.pop("density") * 64)
    oracle = Dgc(SHAPES, N, block=64, k=k, **settings)
    rng = np.random.default_rng(0)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    for step in range(20):
        gradients = draw(rng)
        updates, state = update(gradients, state, params)
        want = oracle.step(gradients, params)
        for name in SHAPES:
            got = np.asarray(updates[name])[0]
            np.testing.assert_allclose(got, want[name], rtol=2e-5, atol=2e-5, err_msg=f"step {step}, {name}")
            params[name] = params[name] - np.float32(0.05) * want[name]
    memory = exchange_state(state).memory
    for name, segment in zip(("kernel", "matrix"), memory[0], strict=True):
        np.testing.assert_allclose(segment.velocity.value, oracle.memory(oracle.u, name), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(segment.accumulated.value, oracle.memory(oracle.v, name), rtol=1e-4, atol=1e-4)


def test_dense_leaves_follow_ordinary_momentum() -> None:
    """Sent whole, a bias sees exactly the momentum SGD of the mean gradient, and rounding is not lost."""
    state, update = mapped(gc.dgc(axis_name=AXIS, density=1 / 64, block=64, momentum=0.8))
    rng = np.random.default_rng(1)
    velocity, wanted, got = np.zeros(7), np.zeros(7), np.zeros(7)
    for _ in range(30):
        gradients = draw(rng)
        updates, state = update(gradients, state, {k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
        velocity = 0.8 * velocity + gradients["bias"].astype(np.float64).mean(axis=0)
        wanted, got = wanted + velocity, got + np.asarray(updates["bias"], np.float64)[0]
    kept = np.asarray(exchange_state(state).memory[1][0].accumulated.value, np.float64).mean(axis=0).reshape(-1)
    np.testing.assert_allclose(got + kept, wanted, atol=1e-4)


def test_without_momentum_correction_the_momentum_follows_the_exchange() -> None:
    options = {"axis_name": AXIS, "density": 1 / 64, "block": 64}
    state, update = mapped(gc.dgc(momentum_correction=False, momentum=0.9, **options))
    # A second entry of each block on the downlink: a plain residual that waits there for its turn trains worse.
    code = gc.compressors.topk(1 / 64, block=64)
    assert code.downlink(N).k == 2
    dense = gc.compressors.dense("bfloat16")
    tx = gc.exchange(code, axis_name=AXIS, collective="two_phase", dense_compressor=dense)
    plain, plain_update = mapped(tx)
    rng, velocity = np.random.default_rng(2), 0.0
    for _ in range(5):
        gradients = draw(rng)
        updates, state = update(gradients, state, None)
        sent, plain = plain_update(gradients, plain, None)
        velocity = 0.9 * velocity + np.asarray(sent["matrix"])
        np.testing.assert_allclose(updates["matrix"], velocity, rtol=1e-5, atol=1e-6)


def test_warm_up_moves_the_density_in_one_program() -> None:
    stages = ((2, 0.5), (3, 0.25))
    state, update = mapped(
        gc.dgc(axis_name=AXIS, density=1 / 64, block=64, warm_up=stages, momentum=0.0, collective="all_gather")
    )
    rng = np.random.default_rng(3)
    counts = []
    for _ in range(8):
        gradients = draw(rng)
        # All workers alike: the union of what they send is what each of them sends.
        gradients = {k: np.repeat(g[:1], N, axis=0) for k, g in gradients.items()}
        updates, state = update(gradients, state, None)
        rows = how_many([SHAPES["matrix"]], 64)
        counts.append(np.count_nonzero(dealt(np.asarray(updates["matrix"])[0], 64, rows), axis=1).tolist())
    assert counts == [[32] * rows] * 2 + [[16] * rows] * 3 + [[1] * rows] * 3
    assert update._cache_size() == 1


def test_two_bits_of_all_leaves_together_lose_nothing() -> None:
    """In a warm-up and after it; a leaf that is shorter than a block is compressed too."""
    options = {"density": 1 / 64, "block": 128, "bits": 2, "pack_positions": True, "view": "tree", "mask": True}
    state, update = mapped(
        gc.dgc(axis_name=AXIS, warm_up=((2, 0.25),), momentum=0.0, collective="all_gather", **options)
    )
    rng, seen, arrived = np.random.default_rng(5), np.float64(0), np.float64(0)
    for _ in range(5):
        gradients = draw(rng)
        updates, state = update(gradients, state, None)
        seen = seen + np.concatenate([g.mean(axis=0, dtype=np.float64).reshape(-1) for g in gradients.values()])
        sent = np.concatenate([np.asarray(u)[0].reshape(-1) for u in updates.values()])
        assert 0 < np.count_nonzero(sent) < sent.size
        arrived = arrived + sent
    (memory,) = exchange_state(state).memory[0]
    kept = np.asarray(memory.accumulated.value, np.float64).reshape(N, -1).mean(axis=0)
    assert not kept[seen.size :].any()
    np.testing.assert_allclose(arrived + kept[: seen.size], seen, atol=1e-5)


def test_warm_up_keeps_the_leaves_of_the_final_density() -> None:
    """A leaf that gains nothing at the first, high density has its memory from the start."""
    tx = gc.dgc(axis_name=None, density=0.001, warm_up=((1, 0.25), (1, 0.06)))
    gradient = {"small": np.ones((12, 12), np.float32), "large": np.ones((64, 64), np.float32)}
    state, update = jax.jit(tx.init)(gradient), jax.jit(tx.update)
    assert len(exchange_state(state).memory[0]) == 2
    for _ in range(3):
        _, state = update(gradient, state)


def test_warm_up_stages() -> None:
    assert gc.warm_up(10) == ((10, 0.25), (10, 0.0625), (10, 0.015625), (10, 0.004))
    with pytest.raises(ValueError, match=r"steps_per_stage must be an integer of at least 1, got 0"):
        gc.warm_up(0)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2"):
        gc.warm_up(1, (2,))


def test_skipped_steps_leave_momentum_alone() -> None:
    state, update = mapped(gc.dgc(axis_name=AXIS, density=1 / 64, block=64, clip_norm=1.0))
    rng = np.random.default_rng(4)
    _, state = update(draw(rng), state, None)
    bad = draw(rng)
    bad["kernel"][2, 0, 0, 0, 0] = np.inf
    updates, after = update(bad, state, None)
    assert not any(np.asarray(u).any() for u in updates.values())
    for a, b in zip(
        jax.tree.leaves(exchange_state(state).memory), jax.tree.leaves(exchange_state(after).memory), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_local_clip_bounds_each_worker() -> None:
    tx = gc.local_clip(2.0, axis_name=AXIS)
    gradients = draw(np.random.default_rng(5))
    gradients = {
        k: g * np.asarray([1e-3, 1, 10, 1e20], np.float32).reshape(-1, *[1] * (g.ndim - 1))
        for k, g in gradients.items()
    }
    clipped = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))(gradients)
    clipped = {k: np.asarray(c) for k, c in clipped.items()}
    norms = [np.sqrt(sum((np.asarray(c[i], np.float64) ** 2).sum() for c in clipped.values())) for i in range(N)]
    np.testing.assert_allclose(norms[1:3], 2.0 / np.sqrt(N), rtol=1e-5)
    np.testing.assert_array_equal(clipped["bias"][0], gradients["bias"][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
        ({"clip_norm": -1.0}, r"clip_norm must be finite and at least 0, got -1"),
        (
            {"collective": "ring"},
            r"collective must be one of 'auto', 'all_gather', 'two_phase', 'all_reduce', 'recursive_doubling', got 'ring'",
        ),
        (
            {"collective": "all_reduce"},
            r"collective='all_reduce' needs payloads that add up, and those of TopK do not; use collective='two_phase'",
        ),
        ({"collective": gc.collectives.TwoPhase("server")}, r"makes training diverge; use 'split'"),
        ({"dtype": "int8"}, r"dtype must be float32 or bfloat16, got int8"),
        ({"exact": True, "view": "tree"}, r"takes whole tensors as blocks, got view=tree; leave one of them out"),
        ({"block": 0}, r"block must be an integer of at least 1, got 0"),
    ],
)
def test_bad_options_name_the_remedy(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        gc.dgc(axis_name=AXIS, **options)


def test_owners_send_one_entry_more_after_a_warm_up_and_none_in_it() -> None:
    params = {"kernel": np.ones((64, 2048), np.float32)}

    def program(**options) -> str:
        return gc.lower_update(params, gc.dgc(axis_name=AXIS, **options), jax.make_mesh((N,), (AXIS,))).as_text()

    stages = ((5, 0.25), (5, 0.0625))
    assert program() == program(downlink_density=1 / 1024) != program(downlink_density=2 / 1024)
    assert program(warm_up=stages) == program(warm_up=stages, downlink_density=2 / 1024)
    ten = {"warm_up": stages, "density": 10 / 1024}
    assert program(**ten) == program(**ten, downlink_density=15 / 1024)
