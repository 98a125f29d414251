"""What is shaped differently for accelerators computes the numbers that CPU's programs do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradcomp_jax import kernels

from .environments import AXIS, environment
from .methods import METHODS
from .test_conformance import gradients, parameters


@pytest.fixture
def lower_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets programs be lowered as for an accelerator, but for sums, whose order is another one there."""
    chosen = lax.platform_dependent

    def begin(platform: str) -> None:
        def elsewhere(*operands: Any, default: Callable[..., Any], **platforms: Callable[..., Any]) -> Any:
            if getattr(platforms.get("cpu"), "__module__", "").endswith(".reductions"):
                return chosen(*operands, default=default, **platforms)
            return platforms.get(platform, default)(*operands)

        monkeypatch.setattr(lax, "platform_dependent", elsewhere)

    return begin


slow = pytest.mark.slow


# Several entries of a block come from the approximate top-k on TPU.
@pytest.mark.parametrize(
    ("platform", "k"),
    (("cuda", 1), ("tpu", 1), pytest.param("cuda", 10, marks=slow), pytest.param("cuda", 20, marks=slow)),
)
def test_a_dealt_selection(lower_for: Callable[[str], None], platform: str, k: int) -> None:
    """The last line is cut by the vector's end, and a row of the matrix lies in two lines."""
    rng = np.random.default_rng(k)
    deal = kernels.Deal(128 * 96, 256, 49)
    flat = rng.standard_normal(deal.size).astype(np.float32)

    def selected(flat: Any) -> Any:
        index, value = kernels.top_of_dealt(flat, deal, k)
        index = index % 256
        rows = kernels.place_in_rows(index, value, 256)
        packed = kernels.place_packed(index, value.astype(jnp.bfloat16), deal, 96)
        marks = kernels.mark_in_rows(jnp.where(value > 0, index, -1), 256)
        return index, value, kernels.place_dealt(index, value, deal, 96), packed, rows, marks

    here = jax.jit(selected)(flat)
    lower_for(platform)
    for name, a, b in zip(
        ("index", "value", "dealt", "packed", "rows", "marks"), here, jax.jit(selected)(flat), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_a_selection_that_is_sorted(lower_for: Callable[[str], None]) -> None:
    """Ties, zeros and entries that are the best of their lane and of their run."""
    rows = np.random.default_rng(0).standard_normal((6, 4096)).astype(np.float32)
    rows[1], rows[2], rows[3] = np.round(rows[1]), 0, 1
    here = jax.jit(lambda x: kernels.top_entries(x, 32))(rows)
    lower_for("cuda")
    for a, b in zip(here, jax.jit(lambda x: kernels.top_entries(x, 32))(rows), strict=True):
        np.testing.assert_array_equal(a, b)


@slow
@pytest.mark.parametrize(
    "method", ("dgc", "topk_sgd", "gradient_dropping", "random_k", "sparcml", "demo", "terngrad", "fp8")
)
def test_updates_and_memories(lower_for: Callable[[str], None], method: str) -> None:
    def steps() -> list[Any]:
        world, params = environment("vmap", METHODS[method].make(AXIS)), parameters()
        state, found = world.init(params), []
        for step in range(3):
            updates, state = world.update(gradients("normal", step), state, params)
            found.append(jax.tree.leaves((updates, state)))
        return found

    here = steps()
    lower_for("cuda")
    for step, (a, b) in enumerate(zip(here, steps(), strict=True)):
        for x, y in zip(a, b, strict=True):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                continue
            # A last cast to fewer bits may fall on the other side of a number between two: a step of that dtype.
            narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float32
            rtol = float(jnp.finfo(x.dtype).eps) if narrow else 1e-5
            x, y = (np.asarray(value, np.float64) for value in (x, y))
            np.testing.assert_allclose(y, x, rtol=rtol, atol=1e-5 * np.abs(x).max(initial=0), err_msg=f"step {step}")
            if narrow:
                assert np.mean(np.abs(y - x) > 1e-5 * (np.abs(x) + np.abs(x).max(initial=0))) < 0.01, f"step {step}"
