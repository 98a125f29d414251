"""Small segments side by side, as GPU has them: the same bits and states as one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.core import passes
from gradcomp_jax.core.beside import Exchanged

WORKERS, STEPS = 4, 4
# Small leaves, among them odd ones, before, between and after large ones.
SHAPES = [
    (33, 65),
    (64, 64),
    (600, 500),
    (3, 3, 16, 32),
    (7, 129, 5),
    (128,),
    (1, 2048),
    (520, 512),
    (77, 31),
    (96, 96),
]
SHAPES += [(40, 200), (5,), (256, 64)]

CASES: dict[str, Callable[[], Any]] = {
    "dgc": lambda: gc.dgc(axis_name="data", momentum=0.5),
    "dgc_nesterov": lambda: gc.dgc(axis_name="data", momentum=0.5, nesterov=True, density=1 / 256),
    "topk_sgd": lambda: gc.topk_sgd(axis_name="data"),
    "gathered": lambda: gc.exchange(gc.compressors.topk(0.02), axis_name="data", collective="all_gather"),
    "put_back": lambda: gc.exchange(
        gc.compressors.topk(0.02), axis_name="data", collective=gc.collectives.TwoPhase("put_back")
    ),
    "as_rows": lambda: gc.exchange(gc.compressors.topk(0.02), axis_name="data", view="rows"),
    "block_quantized": lambda: gc.block_quantized(axis_name="data"),
}


QUICK = [("dgc", jnp.float32), ("block_quantized", jnp.float32)]


def run(tx: Any, dtype: Any) -> list[Any]:
    """Updates and states of some steps of simulated workers; the third has a gradient that is not finite.

    Gradients are multiples of 1/256 and momenta a half: sums are exact, whether or not a compiler contracts them.
    """
    params = [np.zeros(shape, dtype) for shape in SHAPES]
    init = jax.vmap(lambda _: tx.init(params), axis_name="data", axis_size=WORKERS)
    state = jax.jit(init)(np.zeros(WORKERS))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params), axis_name="data"))
    random, found = np.random.default_rng(0), []
    for step in range(STEPS):
        scale = 6e4 if dtype == jnp.float16 and step == 1 else 1.0
        each = [
            (np.round(random.standard_normal((WORKERS, *shape)) * 256) / 256 * scale).astype(dtype) for shape in SHAPES
        ]
        if step == 2:
            each[1][1, 3, 4] = np.nan
        updates, state = update(each, state)
        found.append((updates, state))
    return found


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case, dtype, id=f"{case}-{jnp.dtype(dtype)}", marks=[] if (case, dtype) in QUICK else pytest.mark.slow
        )
        for case in CASES
        for dtype in (jnp.float32, jnp.float16)
    ],
)
def test_side_by_side_has_the_same_bits(case: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = run(CASES[case](), dtype)
    taken = []

    def together(beside: Callable[[], Any], one_by_one: Callable[[], Any]) -> Any:
        taken.append(beside())
        return taken[-1]

    monkeypatch.setattr(passes, "side_by_side", together)
    beside = run(CASES[case](), dtype)
    assert isinstance(taken[0], Exchanged)
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (apart, beside)), strict=True):
        name = jax.tree_util.keystr(path)
        # An estimate, whose sums are in another order.
        tolerance = 1e-5 if "memory_ratio" in name else 0
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=0, err_msg=name)
