"""AdamW after an exchange: the first moment is where the method wants it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods import METHODS
from tests.conformance.environments import AXIS, vmapped

pytestmark = pytest.mark.standard_promotion  # optax.adamw counts in int32
N = 4
SHAPES = {"bias": (7,), "matrix": (32, 24)}


def trained(tx: Any, steps: int = 3) -> tuple[Any, Any]:
    """Updates of all steps, and the last state."""
    params = {name: np.linspace(-1, 1, int(np.prod(s)), dtype=np.float32).reshape(s) for name, s in SHAPES.items()}
    (state, update), rng, seen = vmapped(tx, params, N), np.random.default_rng(0), []
    for _ in range(steps):
        gradient = {name: rng.normal(size=(N, *s)).astype(np.float32) for name, s in SHAPES.items()}
        updates, state = update(gradient, state, params)
        seen.append({name: np.asarray(u)[0] for name, u in updates.items()})
    return seen, state


def equal(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8), one, other)


@pytest.mark.parametrize(
    ("method", "b1"), [pytest.param("block_quantized", 0.9, marks=pytest.mark.slow), ("topk_sgd", 0.0)]
)
def test_it_is_optax_adamw_with_the_first_moment_that_the_method_wants(method: str, b1: float) -> None:
    exchange = getattr(gc, method)(axis_name=AXIS)
    mask = {"bias": False, "matrix": True}
    rate = optax.linear_schedule(1e-2, 0.0, 10)
    ours, state = trained(gc.adamw(rate, exchange, b2=0.99, weight_decay=0.1, mask=mask))
    equal(ours, trained(optax.chain(exchange, optax.adamw(rate, b1, 0.99, weight_decay=0.1, mask=mask)))[0])
    # Without a first moment none is kept.
    moments = [leaf for leaf in jax.tree.leaves(state[1]) if leaf.ndim]
    assert len(moments) == (4 if b1 else 2)


def test_what_the_registry_says_of_a_method_is_what_adamw_does() -> None:
    said = {name: method.adam_b1 for name, method in METHODS.items() if method.update == "mean"}
    params = {"w": jax.ShapeDtypeStruct((2048, 64), jnp.float32)}
    for name, b1 in said.items():
        tx = gc.adamw(1e-3, METHODS[name].build(axis_name=None))
        state = jax.eval_shape(tx.init, params)
        assert isinstance(state[1], optax.ScaleByAdamState) == (b1 is None), name
    assert {b1 for b1 in said.values()} == {None, 0.0}


@pytest.mark.parametrize(
    ("exchange", "first_moment"),
    [
        (gc.exchange(gc.compressors.topk(0.1), axis_name=None), False),
        (gc.exchange(gc.compressors.topk(0.1), axis_name=None, memory=gc.memory.none()), True),
        (gc.exchange(gc.compressors.block_quantized(bits=4), axis_name=None), True),
        (gc.exchange(gc.by_path("w", gc.compressors.topk(0.1)), axis_name=None), False),
        (optax.chain(gc.local_clip(1.0, axis_name=None), gc.dgc(axis_name=None)), False),
    ],
    ids=["selection", "selection-without-memory", "four-bits", "policy", "clipped"],
)
def test_exchanges_of_ones_own(exchange: Any, first_moment: bool) -> None:
    state = jax.eval_shape(gc.adamw(1e-3, exchange).init, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)})
    assert isinstance(state[1], optax.ScaleByAdamState) == first_moment


def test_bad_input_is_refused() -> None:
    exchange = gc.dense(axis_name=None)
    with pytest.raises(ValueError, match="b1 must be in"):
        gc.adamw(1e-3, exchange, b1=1.0)
    with pytest.raises(ValueError, match="b2 must be in"):
        gc.adamw(1e-3, exchange, b2=-0.1)
    with pytest.raises(ValueError, match="exchange must be a method"):
        gc.adamw(1e-3, optax.identity()).init({"w": jnp.ones(3)})


def test_sparse_adamw_keeps_no_first_moment_and_all_workers_have_its_update() -> None:
    updates, state = trained(gc.sparse_adamw(1e-2, axis_name=AXIS, density=0.1))
    memories = [leaf for of in state[0].memory for leaf in jax.tree.leaves(of)]
    assert memories and all(np.asarray(m).any() for m in memories), "vectors are compressed too"
    assert sum(leaf.ndim > 0 for leaf in jax.tree.leaves(state[1])) == 2
    # Adam's first step has no length: what was sent moves by the rate, the rest by nothing.
    sizes = np.abs(np.concatenate([u.reshape(-1) for u in updates[0].values()]))
    assert ((sizes < 1e-4) | (np.abs(sizes - 1e-2) < 1e-3)).all() and 0 < (sizes > 1e-3).mean() < 0.5
