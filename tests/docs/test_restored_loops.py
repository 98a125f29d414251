"""The loops of docs/bring_your_own_loop.md, broken off and restored: what goes on is the run that was never broken off."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.docs.test_bring_your_own_loop import LOOPS, section, setup

pytestmark = pytest.mark.standard_promotion

RESTORED = tuple(loop for loop in LOOPS if loop != "keras")
"""Keras keeps its own variables, and its page shows no checkpoint of ours."""

OF_PARTS = "params, opt_state, value = step(params, opt_state, {batch})"
STEPS = {
    "shard-map": (OF_PARTS.format(batch="placed"), "params, opt_state"),
    "plain-jit": (OF_PARTS.format(batch="placed"), "params, opt_state"),
    "pmap": (OF_PARTS.format(batch="split"), "params, opt_state"),
    "linen": ("state, value = step(state, placed)", "state"),
    "equinox": ("model, opt_state, value = step(model, opt_state, placed)", "model, opt_state"),
    "flax-nnx": ("value = step(model, state, placed)", "nnx.state(model), state.opt_state"),
}
"""Of each loop the line that makes a step, and what a checkpoint is of."""


def begun(loop: str, workers: int) -> dict[str, Any]:
    """A loop of the page before its first step, with its parameters as ``jax.numpy`` leaves them."""
    space = setup("dgc")
    space["mesh"] = jax.make_mesh((workers,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:workers])
    space["placed"] = jax.device_put(space["batch"], gc.data_sharding(space["mesh"]))
    exec(section(loop)["after"].partition("\nlosses = ")[0], space)
    if isinstance(space.get("params"), dict):
        space["params"] = jax.tree.map(jnp.asarray, space["params"])
    return space


def whole(loop: str, space: dict[str, Any]) -> Any:
    return jax.tree.map(lambda leaf: leaf, eval(STEPS[loop][1], space))


def put(loop: str, space: dict[str, Any], tree: Any) -> None:
    space["restored"] = tree
    if loop == "flax-nnx":
        exec("nnx.update(model, restored[0]); state.opt_state = restored[1]", space)
    else:
        exec(f"{STEPS[loop][1]} = restored", space)


def steps(loop: str, space: dict[str, Any], number: int) -> float:
    for _ in range(number):
        exec(STEPS[loop][0], space)
    return float(space["value"])


def extras(seed: int) -> dict[str, Any]:
    """What a loop of one's own has beside: an average of parameters, keys, counters."""
    ema = {"w1": jnp.asarray(np.full((16, 32), seed, np.float32)), "scale": jnp.asarray(float(seed))}
    keys = {"data": jax.random.key(seed), "model": jax.random.PRNGKey(seed)}
    return {
        "ema": ema,
        "keys": keys,
        "seen": np.full(3, seed),
        "best": np.float32(seed),
        "epoch": seed,
        "done": seed > 1,
    }


def kinds(tree: Any) -> list[Any]:
    return [
        (type(leaf), leaf.committed and leaf.sharding, getattr(leaf, "weak_type", None), leaf.dtype, leaf.shape)
        if isinstance(leaf, jax.Array)
        else type(leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def bits(tree: Any) -> list[bytes]:
    data = [jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x for x in tree]
    return [np.asarray(x).tobytes() for x in data]


@pytest.mark.slow
@pytest.mark.parametrize("loop", RESTORED)
def test_every_loop_goes_on_as_if_never_broken_off(loop: str, tmp_path) -> None:
    if loop == "equinox":
        pytest.importorskip("equinox", reason="equinox is not installed: pip install -e '.[test]'")
    space = begun(loop, 8)
    like = {"loop": whole(loop, space), "more": extras(1)}
    steps(loop, space, 2)
    gc.save_checkpoint(tmp_path / "saved", {"loop": whole(loop, space), "more": extras(2)})
    expected = steps(loop, space, 2), whole(loop, space)
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    assert kinds(restored) == kinds(like)
    assert bits(jax.tree.leaves(restored["more"])) == bits(jax.tree.leaves(extras(2)))
    put(loop, space, restored["loop"])
    assert steps(loop, space, 2) == expected[0]
    assert bits(jax.tree.leaves(whole(loop, space))) == bits(jax.tree.leaves(expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ("plain-jit", "flax-nnx"))
def test_a_loop_goes_on_with_another_number_of_workers(loop: str, tmp_path) -> None:
    space = begun(loop, 8)
    steps(loop, space, 2)
    gc.save_checkpoint(tmp_path / "saved", {"loop": whole(loop, space), "more": extras(2)})
    fewer = begun(loop, 4)
    like = {"loop": whole(loop, fewer), "more": extras(1)}
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    assert kinds(restored) == kinds(like)
    assert bits(jax.tree.leaves(restored["more"])) == bits(jax.tree.leaves(extras(2)))
    put(loop, fewer, restored["loop"])
    # The memories' mean is what it was, so the whole batch's next update is nearly that of eight workers.
    assert steps(loop, fewer, 1) == pytest.approx(steps(loop, space, 1), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", (jax.random.key, jax.random.PRNGKey))
def test_a_fresh_key_of_another_device_stays_with_it(make: Callable, tmp_path) -> None:
    with jax.default_device(jax.devices()[3]):
        like = {"key": make(0)}
        gc.save_checkpoint(tmp_path / "saved", {"key": make(7)})
    restored = gc.restore_checkpoint(tmp_path / "saved", like)
    assert not restored["key"].committed and restored["key"].devices() == {jax.devices()[3]}
    assert bits(jax.tree.leaves(restored)) == bits([make(7)])
