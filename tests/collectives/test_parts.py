"""Tensors that cross by themselves on accelerators, and are owned in parts on TPU: the same numbers to the last bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradcomp_jax as gc
from gradcomp_jax.collectives import fused, tpu

SHAPES = {"odd": (7, 5), "even": (12,), "one": (1,), "none": (3, 0), "matrix": (6, 3), "scalar": ()}


def for_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*operands: Any, default: Any = None, **platforms: Any) -> Any:
        return platforms.get("tpu", default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", elsewhere)
    monkeypatch.setattr(fused, "LARGE", 4)


def updates(workers: int, **options: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    gradients = {k: jnp.asarray(rng.standard_normal((workers, *s)), jnp.float32) for k, s in SHAPES.items()}
    tx = gc.dense(axis_name="w", **options)

    def update(gradient: Any) -> Any:
        return tx.update(gradient, tx.init(gradient))[0]

    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.vmap(update, axis_name="w"))(gradients))]


@pytest.mark.parametrize(
    ("collective", "dtype", "workers"), [("two_phase", "bfloat16", 4), ("all_reduce", "float32", 3)]
)
def test_the_numbers_are_the_same(monkeypatch, workers: int, dtype: str, collective: str) -> None:
    here = updates(workers, dtype=dtype, collective=collective)
    for_tpu(monkeypatch)
    for a, b in zip(here, updates(workers, dtype=dtype, collective=collective), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("workers", (1, 2, 3, 5))
def test_every_row_has_one_owner(monkeypatch, workers: int) -> None:
    for_tpu(monkeypatch)
    shapes = list(SHAPES.values())
    rows = sum(int(np.prod(s)) for s in shapes)
    array = np.arange(1, rows + 1)[:, None]
    owned = jax.jit(lambda a: tpu.by_owner(a, workers, -(-rows // workers), False, shapes))(array)
    assert sorted(np.ravel(owned[np.asarray(owned) > 0])) == list(range(1, rows + 1))
    np.testing.assert_array_equal(jax.jit(lambda a: tpu.by_row(a, False, shapes))(owned)[:rows], array)
