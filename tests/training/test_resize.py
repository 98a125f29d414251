"""A change of the number of workers keeps what the workers hold between them."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import means_kept, rows_of_owners, vmapped

COUNTS = (1, 2, 3, 4, 8)
ROWS, BLOCK = 3, 5


def worker_state(workers: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(workers * ROWS, BLOCK)) * 10.0 ** rng.integers(-6, 6, BLOCK)).astype(np.float32)


def mean_of(value: np.ndarray, workers: int) -> np.ndarray:
    return value.reshape(workers, ROWS, BLOCK).astype(np.float64).mean(axis=0)


@pytest.mark.parametrize("new", COUNTS)
@pytest.mark.parametrize("old", COUNTS)
def test_the_mean_is_preserved(old: int, new: int) -> None:
    before = worker_state(old)
    state = {"residual": gc.PerDevice(before, ROWS), "params": np.ones(4, np.float32)}
    resized = gc.resize_workers(state, old=old, new=new)
    after = np.asarray(resized["residual"].value)
    assert after.shape == (new * ROWS, BLOCK)
    assert after.dtype == np.float32
    assert (resized["residual"].rows, resized["residual"].kind) == (ROWS, "worker")
    assert resized["params"] is state["params"]
    want, got = mean_of(before, old), mean_of(after, new)
    if new % old == 0:
        # Copies: nothing is rounded, and every worker goes on with what one of them had.
        np.testing.assert_allclose(got, want, rtol=2.0**-50)
        owned = {row.tobytes() for row in before.reshape(old, -1)}
        assert {row.tobytes() for row in after.reshape(new, -1)} == owned
    else:
        # float32 numbers of new workers cannot add up to any sum: what is off is one rounding of one of them.
        largest = np.abs(after.reshape(new, ROWS, BLOCK)[0]).astype(np.float64)
        assert (np.abs(got - want) <= largest * 2.0**-24 / new * 1.01).all()
        spread = np.ptp(after.reshape(new, ROWS, BLOCK), axis=0)
        assert (spread <= largest * 2.0**-22 * new).all()


@pytest.mark.parametrize(("old", "new", "typed"), [(4, 3, True), (3, 5, False)])
def test_prng_keys_are_those_of_the_workers_in_turn(old: int, new: int, typed: bool) -> None:
    data = np.arange(2 * old, dtype=np.uint32).reshape(old, 2)
    keys = jax.random.wrap_key_data(jnp.asarray(data)) if typed else data
    for stacked in (False, True):
        leaf = gc.PerDevice(keys[:, None] if stacked else keys, 1)
        # One row looks the same both ways; a value of more rows beside it tells.
        beside = gc.PerDevice(np.zeros((old, 2, 4) if stacked else (2 * old, 4), np.float32), 2)
        resized = gc.resize_workers((leaf, beside), old=old, new=new)[0].value
        assert resized.shape[: 1 + stacked] == (new, 1)[: 1 + stacked]
        found = jax.random.key_data(resized) if typed else resized
        np.testing.assert_array_equal(np.asarray(found).reshape(new, 2), data[np.arange(new) % old])


@pytest.mark.parametrize(("old", "new"), [(64, 63), (64, 65), (8, 7)])
def test_counters_are_those_of_somebody(old: int, new: int) -> None:
    """Not sums, whose rest the first worker would get: one of these has dropped a step."""
    before = np.full((old, 1), 2000, np.int32)
    before[0] = 1999
    after = np.asarray(gc.resize_workers(gc.PerDevice(before, 1), old=old, new=new).value)
    assert after.dtype == np.int32 and after.tolist() == [[2000]] * new


@pytest.mark.parametrize("rows", (1, 13))
@pytest.mark.parametrize("new", COUNTS)
@pytest.mark.parametrize("old", COUNTS)
def test_owners_rows_are_cut_anew(old: int, new: int, rows: int) -> None:
    padded = -(-rows // old) * old
    before = np.zeros((padded, BLOCK), np.float32)
    before[:rows] = np.random.default_rng(rows).normal(size=(rows, BLOCK))
    # Row r is worker r mod N's, and each keeps its own together.
    held = np.concatenate([before[worker::old] for worker in range(old)])
    resized = gc.resize_workers(gc.PerDevice(held, rows, "shard"), old=old, new=new)
    assert resized.value.shape == (-(-rows // new) * new, BLOCK)
    after = rows_of_owners(resized.value, new)
    np.testing.assert_array_equal(after[:rows], before[:rows])
    assert not after[rows:].any()
    assert (resized.rows, resized.kind) == (rows, "shard")


METHODS = {
    "topk_sgd": lambda: gc.topk_sgd(axis_name="data", density=1 / 8, block=16),
    "dgc": lambda: gc.dgc(axis_name="data", density=1 / 8, block=16),
    "ef21": lambda: gc.ef21(axis_name="data", density=1 / 8, block=16),
    "stretches": lambda: gc.exchange(
        gc.compressors.topk(1 / 8, block=16),
        axis_name="data",
        view="rows",
        collective=gc.collectives.Auto(lossy_downlink=True),
    ),
}


def trained(tx, workers: int):
    """The exchange's state after four steps of different gradients, and how it lies."""
    params = {"a": np.zeros((33, 20), np.float32), "b": np.zeros((7, 40), np.float32)}
    state, step = vmapped(tx, params, workers)
    rng = np.random.default_rng(workers)
    for _ in range(4):
        gradient = jax.tree.map(lambda p: rng.normal(size=(workers, *p.shape)).astype(np.float32), params)
        _, state = step(gradient, state, params)

    def flat(leaf):
        return dataclasses.replace(leaf, value=np.asarray(leaf.value).reshape(-1, leaf.value.shape[-1]))

    exchange = next(x for x in jax.tree.leaves(state, is_leaf=is_exchange) if is_exchange(x))
    return jax.tree.map(lambda x: flat(x) if marked(x) else x, exchange, is_leaf=marked)


def marked(leaf) -> bool:
    return isinstance(leaf, gc.PerDevice)


def is_exchange(node) -> bool:
    return isinstance(node, gc.transforms.ExchangeState)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "new"), [("topk_sgd", 1), ("dgc", 2), ("ef21", 1), ("stretches", 2)])
def test_where_no_owners_are_left_the_workers_take_over(name: str, new: int) -> None:
    """Each leaf's memories and owners' rows mean together what they did; and two workers have no owners."""
    tx = METHODS[name]()
    before = trained(tx, 8)
    after = gc.resize_workers(before, old=8, new=new)
    fresh = trained(tx, new)
    assert jax.tree.structure(after) == jax.tree.structure(fresh)
    assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, fresh)
    assert not np.any(after.server[0].value) and not np.any(fresh.server[0].value)
    assert np.abs(before.server[0].value).max() > 0.01
    dealt = tuple(gc.kernels.dealt_rows(size, 16, (width,)) for size, width in ((42 * 16, 20), (18 * 16, 40)))
    assert before.server[0].returns.rows == ((42, 18) if name == "stretches" else dealt)
    assert before.server[0].returns.dealt == (name != "stretches")
    for want, got in zip(means_kept(before, 8), means_kept(after, new), strict=True):
        # Two roundings of one worker's numbers: of the mean of the memories, and of what owners add to it.
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-23 * np.abs(want).max())
    if name == "stretches":
        # The helper's order of rows is the layout's own: here it is plain.
        owed = rows_of_owners(before.server[0].value, 8)[:42].reshape(-1)
        mean = np.asarray(before.memory[0][0].value).reshape(8, -1).mean(axis=0)
        np.testing.assert_allclose(
            np.asarray(after.memory[0][0].value).reshape(new, -1).mean(axis=0), mean + owed, atol=1e-6
        )


def test_owners_rows_alone_have_nowhere_to_go() -> None:
    """Fewer workers without owners, and no memories beside the shard: refused, because it would be lost."""
    shard = trained(METHODS["dgc"](), 8).server[0]
    with pytest.raises(
        ValueError, match=r"what the owners of 8 workers hold goes to the memories of 2.*resize the whole"
    ):
        gc.resize_workers({"shard": shard}, old=8, new=2)
    assert np.any(gc.resize_workers({"shard": shard}, old=8, new=3)["shard"].value)


def stacked(state, workers: int):
    """As pmap and vmap hold it: the workers' rows on a dimension of their own."""

    def up(leaf):
        value = np.asarray(leaf.value)
        return dataclasses.replace(leaf, value=value.reshape(workers, len(value) // workers, *value.shape[1:]))

    return jax.tree.map(lambda x: up(x) if marked(x) else x, state, is_leaf=marked)


def joined_state(tx, workers: int):
    """A state in which every per-device value is another, as shapes say, and nothing is compiled."""
    params = {"a": np.zeros((33, 20), np.float32), "b": np.zeros((7, 40), np.float32)}
    shapes = jax.eval_shape(jax.vmap(lambda _: tx.init(params), axis_name="data"), np.zeros(workers))
    rng = np.random.default_rng(0)

    def fill(leaf):
        if not marked(leaf):
            return np.zeros(leaf.shape[1:], leaf.dtype)
        shape = leaf.value.shape
        return dataclasses.replace(leaf, value=rng.normal(size=(shape[0] * shape[1], *shape[2:])).astype(np.float32))

    return jax.tree.map(fill, shapes, is_leaf=marked)


@pytest.mark.parametrize("new", (1, 3, 16))
@pytest.mark.parametrize("name", METHODS)
def test_values_that_lie_stacked_stay_so(name: str, new: int) -> None:
    joined = {"opt": joined_state(METHODS[name](), 8), "step": np.int32(4)}
    want = stacked(gc.resize_workers(joined, old=8, new=new), new)
    jax.tree.map(np.testing.assert_array_equal, gc.resize_workers(stacked(joined, 8), old=8, new=new), want)


def test_a_state_that_is_stacked_as_a_whole_is_refused() -> None:
    exchange = stacked(joined_state(METHODS["topk_sgd"](), 8), 8)
    pmapped = exchange._replace(step=np.zeros(8, np.int32), skipped=np.zeros(8, np.int32))
    with pytest.raises(
        ValueError, match=r"also what all workers share.*in_axes and out_axes of gradcomp_jax.state_axes"
    ):
        gc.resize_workers({"opt": pmapped}, old=8, new=5)


def test_a_stacked_state_of_another_number_is_refused() -> None:
    with pytest.raises(ValueError, match="pass the number of workers that the state was made for as old="):
        gc.resize_workers(stacked(joined_state(METHODS["dgc"](), 8), 8), old=4, new=2)


def test_no_rows_and_narrow_dtypes() -> None:
    empty = gc.resize_workers(gc.PerDevice(np.zeros((0, 5), np.float32), 0), old=2, new=3)
    assert empty.value.shape == (0, 5)
    half = gc.resize_workers(gc.PerDevice(np.ones((2, 5), ml_dtypes.bfloat16), 1), old=2, new=3)
    assert half.value.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(half.value.astype(np.float32), np.ones((3, 5)))


def test_wrong_numbers_are_refused() -> None:
    state = gc.PerDevice(worker_state(4), ROWS)
    with pytest.raises(ValueError, match=r"has 12 rows, expected 8 workers x 3 rows; pass the number of workers.*old="):
        gc.resize_workers(state, old=8, new=2)
    shard = gc.PerDevice(np.zeros((8, BLOCK), np.float32), 7, "shard")
    with pytest.raises(
        ValueError, match=r"has 8 rows, expected 7 rows over 3 workers; pass the number of workers.*old="
    ):
        gc.resize_workers(shard, old=3, new=2)
    for old, new, name in ((0, 2, "old"), (2, 0, "new"), (2, -1, "new")):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
            gc.resize_workers(state, old=old, new=new)
