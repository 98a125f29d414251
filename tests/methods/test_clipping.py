"""``optax.clip_by_global_norm`` around every method: which norm it is depends on where it stands."""

import jax
import numpy as np
import optax
import pytest

from gradcomp_jax.methods import registry

WORKERS, BOUND = 4, 0.5


def gradients():
    """Of workers of which the first has by far the largest norm, and the last one below the bound."""
    rng = np.random.default_rng(0)
    scales = np.array([100, 1, 0.5, 1 / 64], np.float32)
    shapes = {"w": (24, 40), "b": (30,)}
    return {
        name: scales.reshape(-1, *(1,) * len(shape)) * rng.normal(size=(WORKERS, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def norm_of(tree) -> float:
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))


def first_update(tx, own):
    """The update of the first step, of which all workers have the same."""

    def step(gradient):
        return tx.update(gradient, tx.init(gradient), gradient)[0]

    updates = jax.jit(jax.vmap(step, axis_name="data"))(own)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, np.broadcast_to(u[:1], u.shape)), updates)
    return jax.tree.map(lambda u: np.asarray(u[0]), updates)


@pytest.mark.parametrize("name", registry.METHODS)
def test_before_it_is_each_worker_s_own_and_after_it_the_update_s(name: str) -> None:
    tx, clip = registry.METHODS[name].build(axis_name="data"), optax.clip_by_global_norm(BOUND)
    own = gradients()
    norms = [norm_of(jax.tree.map(lambda g, i=i: g[i], own)) for i in range(WORKERS)]
    assert norms[0] > 2000 > BOUND > norms[-1]

    factors = np.array([min(1, BOUND / norm) for norm in norms], np.float32)
    clipped = jax.tree.map(lambda g: g * factors.reshape(-1, *(1,) * (g.ndim - 1)), own)
    # A code that rounds may round another way where the last bit of a norm differs.
    before, expected = first_update(optax.chain(clip, tx), own), first_update(tx, clipped)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(expected), strict=True)
    close = [np.isclose(a, b, rtol=1e-4, atol=1e-6).mean() for a, b in pairs]
    assert min(close) > 0.97

    alone, after = first_update(tx, own), first_update(optax.chain(tx, clip), own)
    assert norm_of(alone) > BOUND
    for name_of, update in alone.items():
        np.testing.assert_allclose(after[name_of], update * (BOUND / norm_of(alone)), rtol=1e-5, atol=1e-7)
    # The loudest worker counts as much as the others before, and decides the direction after.
    assert norm_of(jax.tree.map(np.subtract, before, after)) > 0.05 * min(norm_of(before), norm_of(after))
