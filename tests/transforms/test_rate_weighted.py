"""Residuals of rate times gradient: the law, the papers' form replayed, what a jump of the rate does, and what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import gradcomp_jax as gc
from tests.conformance.environments import owners_of_leaf, vmapped
from tests.marks import slow_but

AXIS, N, STEPS = "data", 4, 12
SHAPE = (16, 40)


def rate(step: Any) -> Any:
    """A power of two that goes up and down: 1/4, 1/4, 1/4, 8, 8, 8, 1/2, ..."""
    return jnp.asarray([0.25, 8.0, 0.5, 2.0], jnp.float32)[(step // 3) % 4]


def mapped(tx: Any, dtype: Any = jnp.float32) -> Any:
    return vmapped(tx, {"w": np.zeros(SHAPE, dtype)}, N)


def gradients(step: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(step)
    return (rng.normal(size=(N, *SHAPE)) + np.random.default_rng(99).normal(size=SHAPE)).astype(dtype)


def left_over(state: Any, *, dealt: bool = True) -> np.ndarray:
    """The mean of all that is kept, in units of rate times gradient."""
    exchange = state.inner
    (kept,) = exchange.memory[0]
    kept = kept.accumulated if isinstance(kept, gc.memory.Momentum) else kept
    total = np.asarray(kept.value, np.float64).reshape(N, -1).mean(axis=0)[: int(np.prod(SHAPE))]
    if exchange.server[0] != ():
        total = total + owners_of_leaf(exchange.server[0], total.size, N, dealt=dealt).astype(np.float64)
    return total.reshape(SHAPE)


METHODS = {
    "topk": lambda: gc.topk_sgd(axis_name=AXIS, density=0.05, block=64),
    "topk-gather": lambda: gc.topk_sgd(axis_name=AXIS, density=0.05, block=64, collective="all_gather"),
    "server": lambda: gc.exchange(
        gc.compressors.block_quantized(bits=4, block=64), axis_name=AXIS, collective=gc.collectives.TwoPhase("server")
    ),
    "ef_sign": lambda: gc.ef_sign_sgd(axis_name=AXIS, block=64),
    "powersgd": lambda: gc.powersgd(axis_name=AXIS, rank=2),
    "dgc": lambda: gc.exchange(
        gc.compressors.topk(0.05, block=64), axis_name=AXIS, memory=gc.memory.momentum_correction(0.0)
    ),
    "demo": lambda: gc.demo(axis_name=AXIS, density=0.1, momentum=1.0, block=64, signed=False),
}


@pytest.mark.parametrize("method", slow_but(("dgc",), METHODS))
def test_rates_times_updates_and_what_is_kept_are_rates_times_gradients(method: str) -> None:
    state, update = mapped(gc.rate_weighted(METHODS[method](), rate))
    moved, due = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(STEPS):
        g = gradients(step)
        if step == 5:
            g[2, 0, 0] = np.inf
        updates, state = update({"w": jnp.asarray(g)}, state)
        u = np.asarray(updates["w"], np.float64)
        assert (u == u[:1]).all()
        now = float(rate(step))
        moved += now * u[0]
        due += 0 if step == 5 else now * g.astype(np.float64).mean(axis=0)
        kept = left_over(state, dealt=method != "server")
        np.testing.assert_allclose(moved + kept, due, atol=2e-5 * max(1, np.abs(due).max()))
    assert np.abs(kept).max() > 1e-3
    assert int(state.inner.skipped) == 1


@pytest.mark.parametrize("method", ("ef_sign",))
def test_at_a_constant_rate_it_is_the_method(method: str) -> None:
    """Of a power of two, to the bit."""
    weighted, plain = mapped(gc.rate_weighted(METHODS[method](), lambda step: 0.25)), mapped(METHODS[method]())
    states = [weighted[0], plain[0]]
    for step in range(4):
        g = {"w": jnp.asarray(gradients(step))}
        (one, states[0]), (two, states[1]) = weighted[1](g, states[0]), plain[1](g, states[1])
        np.testing.assert_array_equal(one["w"], two["w"])


@pytest.mark.parametrize("method", ("topk",))
def test_after_a_jump_of_the_rate_it_is_closer_to_dense(method: str) -> None:
    """What was left of the old gradients arrives with their rate, not with the new one, a hundred times as large."""

    def jump(step: Any) -> Any:
        return jnp.where(step < 30, 0.001, 0.1)

    apart = {}
    for name, tx in (("plain", METHODS[method]()), ("weighted", gc.rate_weighted(METHODS[method](), jump))):
        state, update = mapped(tx)
        off = np.zeros(SHAPE)
        for step in range(34):
            g = gradients(step)
            updates, state = update({"w": jnp.asarray(g)}, state)
            off += float(jump(step)) * (np.asarray(updates["w"], np.float64)[0] - g.mean(axis=0))
        apart[name] = np.linalg.norm(off)
    assert apart["weighted"] < 0.9 * apart["plain"]


def test_a_rate_of_zero_moves_nothing_and_loses_nothing() -> None:
    state, update = mapped(gc.rate_weighted(METHODS["topk"](), lambda step: jnp.where(step % 2 == 0, 0.0, 0.5)))
    moved, due = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(6):
        g = gradients(step)
        updates, state = update({"w": jnp.asarray(g)}, state)
        assert np.asarray(updates["w"]).any() == (step % 2 == 1)
        moved += 0.5 * np.asarray(updates["w"])[0]
        due += 0.5 * g.mean(axis=0) * (step % 2)
        np.testing.assert_allclose(moved + left_over(state), due, atol=1e-5)
    assert int(state.inner.skipped) == 3


def test_what_it_cannot_serve_is_refused() -> None:
    params = {"w": np.zeros(SHAPE, np.float32)}
    local = {"axis_name": None}
    for method, match in (
        (gc.ef21(**local), "EF21 adds no errors up"),
        (gc.one_bit_adam(warm_up_steps=2, **local), "do not grow with the gradient"),
        (gc.sign_sgd(**local), "nothing stays behind"),
        (gc.dense(**local), "nothing stays behind"),
    ):
        with pytest.raises(ValueError, match=match):
            gc.rate_weighted(method, rate).init(params)
    with pytest.raises(TypeError, match=r"rate must be a function of the step, got 0\.1"):
        gc.rate_weighted(gc.topk_sgd(**local), 0.1)
    for options, match in (
        ({"weight_decay": 0.1}, "weight_decay is added"),
        ({"clip_norm": 1.0}, "rate times gradient"),
    ):
        tx = gc.rate_weighted(gc.dgc(**local, **options), rate)
        with pytest.raises(ValueError, match=match):
            tx.update(params, tx.init(params), params)


def test_demo_with_the_rate_in_its_momentum() -> None:
    """The official code's: m <- beta m + rate g, and the update the sign of what arrives."""
    options = {"axis_name": AXIS, "density": 0.1, "block": 64, "momentum": 0.9}
    signed, unsigned = (
        mapped(gc.demo(rate=rate, **options)),
        mapped(gc.rate_weighted(gc.demo(signed=False, **options), rate)),
    )
    states = [signed[0], unsigned[0]]
    for step in range(7):
        g = {"w": jnp.asarray(gradients(step))}
        (one, states[0]), (two, states[1]) = signed[1](g, states[0]), unsigned[1](g, states[1])
        np.testing.assert_array_equal(one["w"], np.sign(two["w"]))


def test_demo_averages_over_senders() -> None:
    """Each frequency over how many sent it; one that nobody sent is zero."""
    options = {"axis_name": AXIS, "density": 2 / 64, "block": 64, "dtype": "float32", "signed": False}
    g = gradients(0)
    # Chunks of up to 128 entries have the one-dimensional transform.
    waves = scipy.fft.dct(g.reshape(N, -1, 64).astype(np.float64), norm="ortho", axis=2)
    keep = np.abs(waves) >= np.sort(np.abs(waves), axis=2)[:, :, -2:-1]
    sent, many = (waves * keep).sum(axis=0), keep.sum(axis=0)
    assert many.max() > 1
    for average, divisor in (("workers", N), ("senders", np.maximum(many, 1))):
        state, update = mapped(gc.demo(average=average, **options))
        got = np.asarray(update({"w": jnp.asarray(g)}, state)[0]["w"][0])
        want = scipy.fft.idct(sent / divisor, norm="ortho", axis=1).reshape(SHAPE)
        np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(ValueError, match="use collective='all_gather'"):
        gc.demo(average="senders", collective="two_phase", **options)
