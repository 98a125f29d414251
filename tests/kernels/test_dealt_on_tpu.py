"""The Pallas kernels of dealt blocks, interpreted, against the programs whose place they take."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.kernels import dealt_on_tpu
from gradcomp_jax.kernels.dealt_selection import _in_turn, _run_on_tpu
from gradcomp_jax.kernels.selection import _low_bits, entries_of
from tests.conformance.environments import AXIS, WORKERS, environment

RNG = np.random.default_rng(0)

# size, block, rows, width: eight rows of the matrix go around several times; three tiles, the last one cut; few lines, with
# entries beyond the vector's end.
DEALS = [
    (64 * 1024, 64, 1025, 1024),
    pytest.param(10240 * 128, 1024, 1281, 128, marks=pytest.mark.slow),
    pytest.param(401 * 256, 64, 1607, 256, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "block", "rows", "width"), DEALS)
def test_the_same_bits(size: int, block: int, rows: int, width: int) -> None:
    deal, low_bits = kernels.Deal(size, block, rows), _low_bits(block)
    x = RNG.standard_normal(size).astype(np.float32)
    x[0::rows], x[1::rows], x[3], x[4] = 0, -1, np.nan, -np.inf

    @jax.jit
    def both(x: jax.Array) -> tuple[Any, Any]:
        index, value = kernels.top_of_dealt(x, deal, 1)
        parts = kernels.Parts((x.reshape(-1, width),))
        keys = dealt_on_tpu.best_of_dealt(parts, deal, low_bits, interpret=True).reshape(-1)[:rows]
        found = [entries_of(keys[:, None], low_bits, lambda index: kernels.take_dealt(x, deal, index))]
        wanted = [(index, value)]
        for dtype in (jnp.float32, jnp.bfloat16):
            sent = jnp.where(jnp.isfinite(value), value, 2.0).astype(dtype)
            wanted.append(kernels.place_dealt(index, sent.astype(jnp.float32), deal, width))
            placed = dealt_on_tpu.placed_in_matrix(index, sent, deal, width, interpret=True)
            found.append(placed.astype(jnp.float32))
        return found, wanted

    found, wanted = both(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("size", "block", "rows", "width", "k"),
    [(64 * 1024, 64, 1025, 1024, 2), pytest.param(10240 * 128, 1024, 1281, 128, 10, marks=pytest.mark.slow)],
)
def test_several_entries_of_a_block(size: int, block: int, rows: int, width: int, k: int) -> None:
    """The best of each run are candidates, and the largest of those are taken; the matrix is made inside the kernel."""
    deal, low_bits = kernels.Deal(size, block, rows), _low_bits(block)
    lines, apart = _run_on_tpu(deal, k)
    x, y = RNG.standard_normal((2, size)).astype(np.float32)
    made = 2 * x + y

    @jax.jit
    def both(x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        parts = kernels.Parts((x.reshape(-1, width), y.reshape(-1, width)), lambda x, y: 2 * x + y)
        keys = dealt_on_tpu.best_of_dealt(parts, deal, low_bits, lines, apart, interpret=True)
        keys = keys.reshape(keys.shape[0], -1)[:, : apart * rows]
        found = _in_turn(keys.reshape(-1, rows), k=k, each=k)
        index, value = entries_of(found, low_bits, lambda index: index)
        sent = value.astype(jnp.bfloat16)
        wanted = kernels.place_dealt(index, sent.astype(jnp.float32), deal, width)
        placed = [
            dealt_on_tpu.placed_in_matrix(index, v, deal, width, jnp.float32, interpret=True)
            for v in (sent, sent.astype(jnp.float32))
        ]
        return keys, index, value, wanted, placed

    keys, index, value, wanted, placed = jax.device_get(both(x, y))
    # Each entry is in one stretch: whole rows of the matrix, one after the other. Its lines are in runs of some far apart.
    long = math.prod(dealt_on_tpu._tiles(size // width, width, 2, lines * apart * rows)) * width
    assert long % (8 * width) == 0 and keys.shape[0] == -(-size // long)
    place = np.arange(size)
    magnitude = np.zeros((keys.shape[0], apart, rows), np.float32)
    np.maximum.at(magnitude, (place // long, place // rows % apart, place % rows), np.abs(made))
    largest = -np.sort(-magnitude.reshape(-1, rows), axis=0)[:k].T
    np.testing.assert_allclose(np.abs(value), largest, rtol=2**-10)
    at = index * rows + np.arange(rows)[:, None]
    np.testing.assert_allclose(value, made[at], rtol=2**-10)
    for one in placed:
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize(
    "hot", [np.arange(2**22) % 1024 < 8, np.arange(2**22) % 64 == 5], ids=["neighbours", "every 64th"]
)
def test_what_is_large_together_is_not_in_one_run(hot: np.ndarray) -> None:
    deal = kernels.Deal(2**22, 1024, kernels.dealt_rows(2**22, 1024, (1024,)))
    run, apart = _run_on_tpu(deal, 10)
    line, block = np.divmod(np.flatnonzero(hot), deal.rows)
    runs = {*zip(line // (run * apart), line % apart, block, strict=True)}
    assert len(runs) > 0.95 * hot.sum()


@pytest.fixture
def for_tpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets expressions for TPU be taken where kernels are, interpreted; lists those that were."""
    chosen, taken = lax.platform_dependent, []

    def choose(*operands: Any, default: Any, **platforms: Any) -> Any:
        expression = platforms.get("tpu", default)
        if getattr(expression, "__name__", "") != "by_kernel":
            return chosen(*operands, default=default, **platforms)
        return expression(*operands)

    def interpreted(name: str) -> Any:
        kernel = getattr(dealt_on_tpu, name)

        def call(*args: Any) -> Any:
            taken.append(name)
            return kernel(*args, interpret=True)

        return call

    monkeypatch.setattr(lax, "platform_dependent", choose)
    for name in ("best_of_dealt", "placed_in_matrix"):
        monkeypatch.setattr(dealt_on_tpu, name, interpreted(name))
    return taken


def test_they_are_there_only_where_they_are_asked_for_and_fit(
    for_tpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(rows: int) -> list[str]:
        for_tpu.clear()
        deal = kernels.Deal((rows - 1) * 256, 256, rows)
        flat, index, value = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((deal.size,), jnp.float32), ((rows, 1), jnp.int32), ((rows, 1), jnp.bfloat16))
        )
        jax.eval_shape(lambda x: kernels.top_of_dealt(x, deal, 1), flat)
        jax.eval_shape(lambda i, v: kernels.place_packed(i, v, deal, 256), index, value)
        return for_tpu

    monkeypatch.delenv(dealt_on_tpu.SWITCH, raising=False)
    assert taken(1026) == []
    monkeypatch.setenv(dealt_on_tpu.SWITCH, "1")
    assert taken(1026) == ["best_of_dealt", "placed_in_matrix"]
    assert taken(1023) == []
    monkeypatch.setenv(dealt_on_tpu.SWITCH, "yes")
    with pytest.raises(ValueError, match="GRADCOMP_PALLAS must be 0, 1 or auto, got 'yes'"):
        taken(1026)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["shard_map-explicit", "vmap"])
def test_updates_and_memories_of_dgc(mapped: str, for_tpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are mapped over the kernels. The interpreter cannot track what varies; ``tests/tpu`` compiles where it is."""
    params = {"w": np.ones((1024, 128), np.float32)}

    def steps() -> Any:
        world = environment(mapped, gc.dgc(axis_name=AXIS, block=128, density=1 / 128, mask=True))
        state, found = world.init(params), []
        for step in range(3):
            gradient = np.random.default_rng(step).standard_normal((WORKERS, 1024, 128)).astype(np.float32)
            updates, state = world.update({"w": gradient}, state, params)
            found.append(jax.device_get(jax.tree.leaves((updates, state))))
        return found

    wanted = steps()
    assert not for_tpu
    monkeypatch.setenv(dealt_on_tpu.SWITCH, "1")
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(steps()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(for_tpu) == {"best_of_dealt", "placed_in_matrix"}
