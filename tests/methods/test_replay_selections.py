"""Methods that send some entries, against NumPy replays with their memories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import exchange_state, rows_of_owners
from tests.programs import kernels

from .replay.sparse import Sparse, coded, integers, largest, select_thinned
from .replay.workers import AXIS, N, close, gaussian, mapped, replay

SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}
BLOCK = 64


def again(k, dtype):
    """An owner's second selection."""
    return lambda exact, step: coded(np.where(select_thinned(exact, k), exact, 0).astype(np.float32), dtype)


def by_topk(k, dtype, collective, *, k_downlink=None, block=BLOCK, **options) -> Sparse:
    downlink = again(k_downlink or k + max(1, k // 2), dtype) if collective == "two_phase" else None
    return Sparse(SHAPES, N, block, largest(k), lambda x: coded(x, dtype), downlink, server=True, **options)


def memory_of(state, oracle) -> np.ndarray:
    return oracle.arranged([np.asarray(segment.value) for segment in exchange_state(state).memory[0]])


def owners_of(state) -> np.ndarray | None:
    """The owners' residual of the compressed tensors, without the padding of the last owners."""
    server = exchange_state(state).server[0]
    return None if server == () else rows_of_owners(server.value, N)[: server.rows]


def check_memory(state, oracle) -> None:
    assert oracle.kept.any()
    close(memory_of(state, oracle), oracle.kept, message="memory")
    if owners_of(state) is not None:
        assert oracle.owners.any()
        close(owners_of(state), oracle.owners, message="owners")


def following(oracle):
    """Compares the memory before each step and lets the oracle go on from it, so that no rounding adds up.

    Integers are made by rounding, where an error in the last place of a memory can become one of a whole unit.
    """

    def before(state) -> None:
        if oracle.steps:
            check_memory(state, oracle)
        oracle.kept = memory_of(state, oracle)
        if owners_of(state) is not None:
            oracle.owners = owners_of(state).copy()

    return before


def named(options) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "defaults"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("collective", ["all_gather", "two_phase"])
def test_topk_sgd(collective, dtype) -> None:
    """x = g + e; the largest of each block of x are sent; e = x - sent; the update is the mean of the sent."""
    tx = gc.topk_sgd(axis_name=AXIS, density=3 / BLOCK, block=BLOCK, dtype=dtype, collective=collective)
    oracle = by_topk(3, dtype, collective)
    options = {"before": following(oracle)} if dtype == "int8" else {}
    check_memory(replay(tx, oracle, gaussian(SHAPES, 0), SHAPES, **options), oracle)


def test_topk_sgd_of_heavy_tails() -> None:
    """An entry that int8 rounds to zero, at a worker or at an owner, was not sent: it stays, and stays once."""
    tx = gc.topk_sgd(axis_name=AXIS, density=6 / BLOCK, block=BLOCK, dtype="int8", collective="two_phase")
    draw, oracle = gaussian(SHAPES, 11), by_topk(6, "int8", "two_phase")

    def steep():
        return {name: g**9 for name, g in draw().items()}

    check_memory(replay(tx, oracle, steep, SHAPES, before=following(oracle)), oracle)


def test_topk_sgd_with_more_on_the_downlink() -> None:
    tx = gc.topk_sgd(axis_name=AXIS, density=2 / BLOCK, downlink_density=5 / BLOCK, block=BLOCK, collective="two_phase")
    oracle = by_topk(2, "bfloat16", "two_phase", k_downlink=5)
    check_memory(replay(tx, oracle, gaussian(SHAPES, 1), SHAPES), oracle)


def test_topk_sgd_by_default() -> None:
    """Ten of each 1024, in two phases: of tensors below a block as well."""
    tx = gc.topk_sgd(axis_name=AXIS)
    oracle = by_topk(10, "bfloat16", "two_phase", block=1024)
    check_memory(replay(tx, oracle, gaussian(SHAPES, 2), SHAPES), oracle)


@pytest.mark.parametrize(
    "options", [{"collective": "all_gather", "dtype": "float32"}, {"collective": "two_phase"}], ids=named
)
def test_gradient_dropping(options) -> None:
    """The same over blocks that are samples of all tensors end to end."""
    tx = gc.gradient_dropping(axis_name=AXIS, density=3 / BLOCK, block=BLOCK, **options)
    oracle = by_topk(3, options.get("dtype", "bfloat16"), options["collective"], together=True)
    check_memory(replay(tx, oracle, gaussian(SHAPES, 3), SHAPES), oracle)


@pytest.mark.parametrize(
    "options", [{"collective": "all_gather"}, {"collective": "two_phase"}, {"dtype": "float32"}], ids=named
)
def test_ef21(options) -> None:
    """c = C(g - h), h = h + c, and the update is the mean of the workers' estimates h."""
    tx = gc.ef21(axis_name=AXIS, density=3 / BLOCK, block=BLOCK, **options)
    # By bytes: the two phases send half of what four workers gather.
    oracle = by_topk(3, options.get("dtype", "bfloat16"), options.get("collective", "two_phase"), memory="estimate")
    state = replay(tx, oracle, gaussian(SHAPES, 4), SHAPES)
    check_memory(state, oracle)
    # What the owners have not passed on yet is in the workers' estimates already.
    for name, mean in oracle.split(oracle.kept.mean(axis=0) - oracle.owners).items():
        close(state.total[name], mean, message=f"the update is the mean estimate of {name}")


def positions(seed, k, leaf):
    """What the workers draw in common for a leaf: an input."""
    common = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**31 - 1), leaf)

    def rule(rows, step):
        seeds = kernels.row_seeds(jax.random.fold_in(common, step), rows.shape[0])
        mask = np.zeros(rows.shape, bool)
        np.put_along_axis(mask, np.asarray(kernels.random_of_rows(seeds, rows.shape[1], k)), True, axis=1)
        return mask

    return rule


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(
    ("dtype", "collective"), [("float32", "auto"), ("float32", "all_reduce"), ("bfloat16", "two_phase")]
)
def test_random_k(dtype, collective, error_feedback) -> None:
    """With a memory, x at the positions; without, g / density there. bfloat16 rounds on the uplink and on the downlink."""
    tx = gc.random_k(
        axis_name=AXIS,
        density=3 / BLOCK,
        block=BLOCK,
        dtype=dtype,
        collective=collective,
        error_feedback=error_feedback,
        key=5,
    )
    rules = {name: positions(5, 3, sorted(SHAPES).index(name)) for name in ("kernel", "matrix")}
    factor = np.float32(1 if error_feedback else BLOCK / 3)

    def narrow(x):
        return x.astype(jnp.bfloat16).astype(np.float32) if dtype == "bfloat16" else x

    memory = "residual" if error_feedback else "none"
    downlink = (lambda exact, step: narrow(exact)) if dtype == "bfloat16" else None
    oracle = Sparse(SHAPES, N, BLOCK, rules, lambda x: narrow(factor * x), downlink, memory=memory, dealt=False)
    state = replay(tx, oracle, gaussian(SHAPES, 5), SHAPES)
    if error_feedback:
        check_memory(state, oracle)
    else:
        assert not jax.tree.leaves(exchange_state(state).memory)


@pytest.mark.parametrize(("block", "k", "whole"), [(64, 3, False), (32, 6, False), (32, 7, True), (16, 4, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparcml_split(dtype, block, k, whole) -> None:
    """The downlink is the exact sum of the streams, as entries or as whole rows; nothing sent is held back."""
    downlink = gc.compressors.topk(k / block, block=block, dtype=dtype, downlink="union").downlink(N)
    assert downlink.whole == whole
    tx = gc.sparcml(axis_name=AXIS, density=k / block, block=block, dtype=dtype)
    oracle = by_topk(k, dtype, "exact", block=block)
    check_memory(replay(tx, oracle, gaussian(SHAPES, 6), SHAPES), oracle)


@pytest.mark.parametrize(("downlink", "top"), [("int8", 127), ("int4", 7)])
def test_sparcml_quantized(downlink, top) -> None:
    """The downlink is the owner's integers: what rounds to zero was not sent, and other rounding stays with the owner."""
    tx = gc.sparcml(axis_name=AXIS, density=3 / BLOCK, block=BLOCK, downlink=downlink)
    oracle = Sparse(SHAPES, N, BLOCK, largest(3), lambda x: x, lambda exact, step: integers(exact, top))
    check_memory(replay(tx, oracle, gaussian(SHAPES, 7), SHAPES, before=following(oracle)), oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "k", "dense_from"), [(64, 3, None), (16, 7, 1), (16, 13, 0)], ids=["entries", "second-round", "at-once"]
)
def test_sparcml_doubling(block, k, dense_from) -> None:
    """In log2(N) rounds the same sum as a gather's, up to the order of additions, and the same memory."""
    whole = [have * k * (1 + 4) >= 4 * block for have in (1, 2)]
    assert whole == [dense_from is not None and round_ >= dense_from for round_ in (0, 1)]
    options = {
        "axis_name": AXIS,
        "density": k / block,
        "block": block,
        "mask": gc.masks.at_least(0),
    }
    doubling = gc.sparcml(algorithm="recursive_doubling", **options)
    oracle = by_topk(k, "float32", "exact", block=block)
    check_memory(replay(doubling, oracle, gaussian(SHAPES, 8), SHAPES), oracle)
    draw = gaussian(SHAPES, 9)
    state, update = mapped(doubling, SHAPES)
    gathering, gather = mapped(gc.topk_sgd(dtype="float32", collective="all_gather", **options), SHAPES)
    for _ in range(5):
        gradients = draw()
        updates, state = update(gradients, state)
        wanted, gathering = gather(gradients, gathering)
        for name in SHAPES:
            close(updates[name], np.asarray(wanted[name]), 1e-6, name)


def test_gradient_dropping_takes_the_largest_of_all_tensors() -> None:
    """One tensor with gradients 100 times larger sends nearly everything; of its own accord it would send a tenth."""
    shapes = {"first": (60, 90), "large": (30, 60), "last": (80, 135)}
    rng = np.random.default_rng(10)
    gradient = {k: rng.standard_normal(s).astype(np.float32) * (100 if k == "large" else 1) for k, s in shapes.items()}
    everywhere = {k: np.repeat(g[None], N, axis=0) for k, g in gradient.items()}
    flat = np.concatenate([g.reshape(-1) for g in gradient.values()])
    from_large, recall = {}, {}
    for method in (gc.gradient_dropping, gc.topk_sgd):
        state, update = mapped(method(axis_name=AXIS, dtype="float32", collective="all_gather"), shapes)
        updates, _ = update(everywhere, state)
        sent = {name: np.asarray(updates[name])[0] != 0 for name in shapes}
        count = sum(int(s.sum()) for s in sent.values())
        threshold = np.sort(np.abs(flat))[-count]
        chosen = np.concatenate([sent[name].reshape(-1) for name in shapes])
        recall[method] = (chosen & (np.abs(flat) >= threshold)).sum() / count
        from_large[method] = sent["large"].sum() / count
    assert from_large[gc.gradient_dropping] > 0.99
    assert from_large[gc.topk_sgd] < 0.2
    assert recall[gc.gradient_dropping] > 0.7 > 0.2 > recall[gc.topk_sgd]
