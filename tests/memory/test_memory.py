"""What stays behind: the conservation law, and every update against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import compressors, memory

SHAPE = (3, 13)
STEPS = 5
CODES = {
    "topk": compressors.topk(2 / 13, block=13),
    "topk-f32": compressors.topk(2 / 13, block=13, dtype=jnp.float32),
    "int8": compressors.block_quantized(block=13),
    "ternary": compressors.ternary(bucket_size=13, share_scale=False, downlink="ternary"),
}
MEMORIES = {
    "residual": memory.residual(),
    "momentum": memory.momentum_correction(0.5),
    "nesterov": memory.momentum_correction(0.5, nesterov=True),
    "unmasked": memory.momentum_correction(0.5, masking=False),
}


def gradients(seed: int, kind: str = "any") -> np.ndarray:
    """``[STEPS, rows, block]``; multiples of 1/64, so that sums of a few are exact."""
    if kind == "zero":
        return np.zeros((STEPS, *SHAPE), np.float32)
    if kind == "constant":
        return np.full((STEPS, *SHAPE), -0.75, np.float32)
    return np.random.default_rng(seed).integers(-64, 65, (STEPS, *SHAPE)).astype(np.float32) / 64


def start(mem: memory.Memory):
    return mem.init(jnp.zeros(SHAPE))


def kept_of(state) -> np.ndarray:
    return np.asarray(state.accumulated if isinstance(state, memory.Momentum) else state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def send(mem, compressor, state, gradient, key):
    target, state = mem.compensate(gradient, state)
    info = compressors.RowInfo(np.full(SHAPE[0], SHAPE[1], np.int32), key)
    return target, compressor.decode(compressor.encode(target, (), info)[0]), state


# A program of its own: fused with the decoding, a product would reach the difference unrounded.
@functools.partial(jax.jit, static_argnums=0)
def update(mem, target, sent, state):
    return mem.update(target, sent, sent != 0, state)


@pytest.mark.parametrize("kind", ("any", "zero", "constant"))
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", MEMORIES)
def test_target_is_sent_plus_kept(name: str, code: str, kind: str) -> None:
    mem, compressor = MEMORIES[name], CODES[code]
    state = start(mem)
    for i, gradient in enumerate(gradients(0, kind)):
        target, sent, state = send(mem, compressor, state, gradient, jax.random.key(i))
        state = update(mem, target, sent, state)
        target, sent, kept = np.asarray(target), np.asarray(sent), kept_of(state)
        np.testing.assert_array_equal(kept, target - sent)
        if code.startswith("topk"):
            # A selection takes an entry whole or up to its rounding: the sum is exact as well.
            np.testing.assert_array_equal(sent + kept, target)
        else:
            largest = np.abs(np.stack([target, sent])).max()
            np.testing.assert_allclose(sent.astype(np.float64) + kept, target, rtol=0, atol=2.0**-24 * 2 * largest)
        assert (sent != 0).any() == (target != 0).any()


@pytest.mark.parametrize("code", ("topk", "topk-f32"))
def test_nothing_is_ever_lost(code: str) -> None:
    """All that was sent and what is kept make the sum of the gradients, to the bit."""
    mem, compressor = memory.residual(), CODES[code]
    state, sent_in_all = start(mem), np.zeros(SHAPE, np.float64)
    all_gradients = gradients(1)
    for gradient in all_gradients:
        target, sent, state = send(mem, compressor, state, gradient, jax.random.key(0))
        state = update(mem, target, sent, state)
        sent_in_all += np.asarray(sent)
    assert np.count_nonzero(sent_in_all) > 0
    np.testing.assert_array_equal(sent_in_all + np.asarray(state), all_gradients.sum(axis=0, dtype=np.float64))


@pytest.mark.parametrize("masking", (True, False))
@pytest.mark.parametrize("nesterov", (True, False))
def test_momentum_correction_follows_the_paper(nesterov: bool, masking: bool) -> None:
    """u, v and what is sent over several steps, against the equations in NumPy."""
    m = 0.5
    mem = memory.momentum_correction(m, nesterov=nesterov, masking=masking)
    state = start(mem)
    u, v = np.zeros(SHAPE), np.zeros(SHAPE)
    for gradient in gradients(2):
        target, state = mem.compensate(jnp.asarray(gradient), state)
        if nesterov:
            u = m * (u + gradient)
            v = v + u + gradient
        else:
            u = m * u + gradient
            v = v + u
        np.testing.assert_array_equal(target, v)
        np.testing.assert_array_equal(state.velocity, u)
        mask = np.abs(v) >= np.sort(np.abs(v), axis=1)[:, -3:-2]
        sent = np.where(mask, v, 0).astype(np.float32)
        state = mem.update(target, jnp.asarray(sent), jnp.asarray(mask), state)
        v = v * ~mask
        u = u * ~mask if masking else u
        np.testing.assert_array_equal(state.accumulated, v)
        np.testing.assert_array_equal(state.velocity, u)
    assert np.any(u)
    assert np.any(v)


def test_what_rounding_takes_is_kept() -> None:
    mem = memory.momentum_correction(0.5)
    target, state = mem.compensate(np.full(SHAPE, 0.1, np.float32), start(mem))
    sent = np.asarray(target).astype(ml_dtypes.bfloat16).astype(np.float32)
    state = mem.update(target, jnp.asarray(sent), np.ones(SHAPE, bool), state)
    assert np.all(state.accumulated)
    np.testing.assert_array_equal(sent + np.asarray(state.accumulated), target)
    assert not np.any(state.velocity)


@pytest.mark.parametrize("traced", (False, True))
@pytest.mark.parametrize("decay", (1.0, 1, 0.5, 0.0))
def test_residual_decays(decay: float, traced: bool) -> None:
    given = jnp.float32(decay) if traced else decay
    mem = memory.residual(decay=given)
    state, e = start(mem), np.zeros(SHAPE, np.float32)
    for gradient in gradients(3):
        target, state = mem.compensate(jnp.asarray(gradient), state)
        np.testing.assert_array_equal(target, gradient + np.float32(decay) * e)
        sent = np.where(np.abs(target) > 0.5, target, 0)
        state = mem.update(target, jnp.asarray(sent), jnp.asarray(sent != 0), state)
        e = np.asarray(target) - sent
        np.testing.assert_array_equal(state, e)


def test_no_memory_keeps_nothing() -> None:
    mem = memory.none()
    state = start(mem)
    assert not jax.tree.leaves(state)
    gradient = jnp.asarray(gradients(4)[0])
    target, state = mem.compensate(gradient, state)
    assert target is gradient
    assert not jax.tree.leaves(mem.update(target, target, target != 0, state))
    assert not mem.keeps


def test_memories_start_at_zero_in_buffers_of_their_own() -> None:
    for name, mem in MEMORIES.items():
        leaves = jax.tree.leaves(start(mem))
        assert len(leaves) == (1 if name == "residual" else 2)
        assert all(leaf.shape == SHAPE and leaf.dtype == jnp.float32 and not np.any(leaf) for leaf in leaves)
        # A train step donates them, and one buffer cannot be donated twice.
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
        assert mem.keeps


def test_memory_of_leaves_that_are_sent_whole() -> None:
    assert memory.residual().on_dense(lossless=True) == memory.none()
    assert memory.residual(decay=0.5).on_dense(lossless=False) == memory.residual(decay=0.5)
    assert memory.none().on_dense(lossless=False) == memory.none()
    # Sent whole in every step, masked momentum would be none.
    for lossless in (True, False):
        dense = memory.momentum_correction(0.5, nesterov=True).on_dense(lossless=lossless)
        assert dense == memory.momentum_correction(0.5, nesterov=True, masking=False)


def test_what_sends_all_entries_has_ordinary_momentum() -> None:
    """Beside a selection, whose velocities stop where they are sent, within one policy."""
    rules = {0: compressors.block_quantized(block=16), 100: compressors.topk(0.25, block=16, dtype=jnp.float32)}
    tx = gc.exchange(gc.by_size(rules), axis_name=None, memory=memory.momentum_correction(0.5))
    params = {"int8": jnp.zeros((4, 16)), "topk": jnp.zeros((8, 16))}
    state, update = tx.init(params), jax.jit(tx.update)
    for seed in range(3):
        updates, state = update({name: jnp.asarray(noise(p.shape, seed)) for name, p in params.items()}, state)
    quantized, selected = (state.memory[i][0] for i in range(2))
    assert np.all(quantized.velocity.value != 0)
    stopped = np.asarray(selected.velocity.value) == 0
    np.testing.assert_array_equal(stopped, np.asarray(updates["topk"]) != 0)
    assert 32 <= stopped.sum() < 64


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_equal_configurations_are_equal() -> None:
    assert memory.residual() == memory.residual(decay=1.0)
    assert hash(memory.momentum_correction(0.5)) == hash(memory.momentum_correction(0.5))
    assert len({memory.none(), *MEMORIES.values(), memory.residual(decay=0.5)}) == len(MEMORIES) + 2


@pytest.mark.parametrize("momentum", (-0.1, 1, 1.5, float("nan")))
def test_momentum_out_of_range(momentum: float) -> None:
    with pytest.raises(ValueError, match=rf"momentum must be in \[0, 1\), got {momentum}"):
        memory.momentum_correction(momentum)


@pytest.mark.parametrize("decay", (-1, float("inf"), float("nan")))
def test_decay_out_of_range(decay: float) -> None:
    with pytest.raises(ValueError, match=f"decay must be finite and at least 0, got {decay}"):
        memory.residual(decay=decay)
