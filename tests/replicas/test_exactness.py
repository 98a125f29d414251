"""Where a method is another one, what it keeps, and what bad numbers cannot do."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.replicas.delayed import slots_of
from gradcomp_jax.replicas.fragments import cut
from gradcomp_jax.replicas.gossip import permutations
from tests.marks import slow_but
from tests.replicas.problem import AXIS, N, batch, loss, mesh_of, params, replicas


def dense():
    return gc.dense(axis_name=AXIS)


def compressed():
    return gc.exchange(gc.compressors.topk(0.25, block=8, dtype=jnp.float32), axis_name=AXIS, mask=True)


CHAINS = {
    "delayed": lambda m: optax.chain(gc.delayed_average(m, axis_name=AXIS, delay=3), optax.sgd(0.02, momentum=0.5)),
    "delayed-sparse": lambda m: optax.chain(gc.delayed_average(m, axis_name=AXIS, delay=3, every=2), optax.sgd(0.02)),
    "elastic": lambda m: optax.chain(optax.sgd(0.02), gc.elastic_average(m, axis_name=AXIS, every=2)),
    "local": lambda m: optax.chain(optax.sgd(0.02), gc.local_sgd(m, axis_name=AXIS, every=3)),
    "diloco": lambda m: optax.chain(optax.sgd(0.02, momentum=0.5), gc.diloco(m, axis_name=AXIS, every=3, parts=2)),
    "streaming": lambda m: optax.chain(
        optax.sgd(0.02), gc.diloco(m, axis_name=AXIS, every=4, parts=2, delay=2, mix=0.5)
    ),
    "gossip": lambda m: optax.chain(optax.sgd(0.02), gc.gossip(axis_name=AXIS)),
    "accumulate": lambda m: gc.accumulate(optax.chain(m, optax.sgd(0.02)), axis_name=AXIS, every=3),
}


def trained(tx, steps, *, workers=N, state=None, begin=0, batches=batch, with_replicas=True):
    mesh = mesh_of(workers)
    if state is None:
        state = gc.init_state(params(), tx, mesh, replicas=with_replicas)
    step = gc.make_train_step(loss, tx, mesh)
    for n in range(begin, begin + steps):
        state, metrics = step(state, batches(n, workers))
    return state, metrics


def synchronous(steps, **options):
    return trained(optax.chain(dense(), optax.sgd(0.02, **options)), steps, with_replicas=False)[0]


def test_without_delay_it_is_synchronous_bit_for_bit() -> None:
    tx = optax.chain(gc.delayed_average(dense(), axis_name=AXIS, delay=0), optax.sgd(0.02, momentum=0.9))
    state, _ = trained(tx, 6)
    want = synchronous(6, momentum=0.9)
    for one in replicas(state):
        for k, v in one.items():
            np.testing.assert_array_equal(v, want.params[k])


def total(state) -> dict[str, np.ndarray]:
    """Sum of the replicas in float64, and, with elastic bands, their centre."""
    sums = {k: sum(one[k].astype(np.float64) for one in replicas(state)) for k in params()}
    if isinstance(state.opt_state[-1], gc.replicas.ElasticState):
        elastic = state.opt_state[-1]
        sums = {k: v + np.asarray(elastic.centre[k], np.float64) for k, v in sums.items()}
        kept = jax.tree.leaves(elastic.method.memory, is_leaf=lambda x: isinstance(x, gc.PerDevice))
        if kept:
            for k, mark in zip(sorted(sums), kept, strict=True):
                rows = np.asarray(mark.value, np.float64).reshape(N, -1).mean(axis=0)
                sums[k] = sums[k] + 0.9 * rows[: sums[k].size].reshape(sums[k].shape)
    return sums


@pytest.mark.parametrize(
    ("graph", "code"),
    [("exponential", gc.compressors.dense()), ("hypercube", gc.compressors.block_quantized(bits=2, block=8))],
)
def test_gossip_keeps_the_sum_of_the_replicas(graph: str, code) -> None:
    check_sum(optax.chain(optax.scale(0.0), gc.gossip(axis_name=AXIS, graph=graph, compressor=code)))


@pytest.mark.parametrize("method", (dense, compressed))
def test_elastic_bands_keep_the_sum_of_replicas_and_centre(method) -> None:
    check_sum(optax.chain(optax.scale(0.0), gc.elastic_average(method(), axis_name=AXIS)))


spread_of = jax.jit(gc.replica_spread)


def check_sum(tx) -> None:
    """Replicas that begin apart and take no step of their own."""
    mesh = mesh_of()
    state = gc.init_state(params(), tx, mesh, replicas=True)
    rng = np.random.default_rng(3)
    apart = jax.tree.map(lambda a: np.asarray(rng.normal(size=a.shape), a.dtype), state.params)
    state = state._replace(params=jax.device_put(apart, jax.tree.map(lambda a: a.sharding, state.params)))
    before, spread = total(state), float(spread_of(state))
    step = gc.make_train_step(loss, tx, mesh)
    for n in range(5):
        state, _ = step(state, batch(n))
        for k, v in total(state).items():
            np.testing.assert_allclose(v, before[k], rtol=0, atol=5e-6)
    assert float(spread_of(state)) < spread / 1.5


@pytest.mark.parametrize(
    ("name", "method"),
    slow_but([("delayed", dense)], [("delayed", dense), ("delayed-sparse", compressed), ("accumulate", dense)]),
)
def test_a_bad_gradient_stays_with_its_worker(name: str, method) -> None:
    """The others go on, everything stays finite, and the replica takes part again; test_recovery.py has the other methods."""

    def poisoned(n, workers):
        one = batch(n, workers)
        if n in (2, 3):
            one["y"][1, 0, 0] = np.nan if n == 2 else np.inf
        return one

    tx = CHAINS[name](method())
    state, _ = trained(tx, 9, batches=poisoned)
    for leaf in jax.tree.leaves(state):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()
    marks = [
        node.dropped
        for node in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "dropped"))
        if hasattr(node, "dropped")
    ]
    expected = [0, 2, 0, 0] if name.startswith("delayed") else [0, 0, 0, 0]
    assert [np.asarray(m.value).tolist() for m in marks] == ([expected] if marks else [])
    clean, _ = trained(tx, 9)
    if name != "accumulate":
        moved = [np.abs(a["w"] - b["w"]).max() for a, b in zip(replicas(state), replicas(clean), strict=True)]
        assert 0 < max(moved) < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ("delayed-sparse", "elastic", "streaming", "gossip", "accumulate"))
def test_checkpoint_resume_and_resize(name: str, tmp_path) -> None:
    """Bit for bit onto as many workers; onto fewer or more, the mean of everything stays."""
    tx = CHAINS[name](compressed())
    straight, _ = trained(tx, 9)
    state, _ = trained(tx, 4)
    gc.save_checkpoint(tmp_path / "four", state)
    like = gc.init_state(params(), tx, mesh_of(), replicas=True)
    back = gc.restore_checkpoint(tmp_path / "four", like)
    resumed, _ = trained(tx, 5, state=back, begin=4)
    chex.assert_trees_all_equal(resumed, straight)
    state, _ = trained(tx, 4)
    for workers in (2, 8):
        like = gc.init_state(params(), tx, mesh_of(workers), replicas=True)
        other = gc.restore_checkpoint(tmp_path / "four", like)
        for k, v in gc.consolidate(other).items():
            np.testing.assert_allclose(v, gc.consolidate(state)[k], rtol=1e-6, atol=1e-7)
        after, _ = trained(tx, 5, workers=workers, state=other, begin=4)
        assert all(np.isfinite(v).all() for one in replicas(after) for v in one.values())


@pytest.mark.parametrize("workers", (2, 8))
def test_what_is_in_flight_arrives_after_a_resize(workers: int, tmp_path) -> None:
    """x + eta * (sums in flight) is one and the same point for all replicas, before and after."""
    tx = optax.chain(gc.delayed_average(dense(), axis_name=AXIS, delay=3), optax.sgd(0.02))
    state, _ = trained(tx, 5)
    gc.save_checkpoint(tmp_path / "state", state)
    other = gc.restore_checkpoint(tmp_path / "state", gc.init_state(params(), tx, mesh_of(workers), replicas=True))
    for one, count in ((state, N), (other, workers)):
        for k, mark in one.opt_state[0].flying.items():
            sums = np.asarray(mark.value).reshape(count, 3, *mark.value.shape[1:]).sum(axis=1)
            point = np.asarray(one.params[k].value) + 0.02 * sums
            np.testing.assert_allclose(point, np.broadcast_to(point[:1], point.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("delay", "every"), [(d, p) for d in range(9) for p in range(1, 5)])
def test_slots_are_as_many_as_needed(delay: int, every: int) -> None:
    """By counting, in a walk: no sum is written over before it has been read, and one slot fewer would not do."""

    def survives(slots: int) -> bool:
        ring: dict[int, int] = {}
        for n in range(8 * (delay + every)):
            last = n - delay
            lands = last >= 0 and last % every == every - 1
            if lands and delay and ring.get((last // every) % slots) != last // every:
                return False
            ring[(n // every) % slots] = n // every
        return True

    slots = slots_of(delay, every)
    assert survives(slots)
    assert slots == 1 or not survives(slots - 1)


def test_parts_are_of_about_equal_size() -> None:
    tree = [np.zeros(n) for n in (10, 1, 1, 10, 30, 2, 2)]
    assert cut(tree, 1) == [[0, 1, 2, 3, 4, 5, 6]]
    for parts in range(1, 8):
        found = cut(tree, parts)
        assert [i for members in found for i in members] == list(range(7))
        assert len(found) == parts and all(found)
    with pytest.raises(ValueError, match="cannot be cut into parts=8"):
        cut(tree, 8)


def test_everybody_is_one_workers_partner() -> None:
    for graph, counts in (("hypercube", (1, 2, 8)), ("exponential", (1, 2, 3, 6, 8))):
        for workers in counts:
            turns = permutations(graph, workers)
            assert len(turns) == (workers - 1).bit_length()
            for to in turns:
                assert sorted(to) == list(range(workers))
                assert all(i != j for i, j in enumerate(to))


def test_mistakes_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="delay must be an integer of at least 0, got -1"):
        gc.delayed_average(dense(), axis_name=AXIS, delay=-1)
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        gc.local_sgd(dense(), axis_name=AXIS, every=0)
    with pytest.raises(ValueError, match=r"parts must be at most every=2"):
        gc.diloco(dense(), axis_name=AXIS, every=2, parts=3)
    with pytest.raises(ValueError, match=r"delay must be below every=2, so that a part has arrived"):
        gc.diloco(dense(), axis_name=AXIS, every=2, delay=2)
    with pytest.raises(ValueError, match=r"mix must be in \[0, 1\), got 1"):
        gc.sparse_loco(axis_name=AXIS, mix=1)
    with pytest.raises(ValueError, match=r"beta must be in \(0, 1\]"):
        gc.elastic_average(dense(), axis_name=AXIS, beta=1.5)
    with pytest.raises(ValueError, match="TopK selects entries"):
        gc.gossip(axis_name=AXIS, compressor=gc.compressors.topk(0.1))
    with pytest.raises(ValueError, match="use graph='exponential'"):
        permutations("hypercube", 6)
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        tx = gc.elastic_average(gc.dense(axis_name=None), axis_name=None)
        tx.update(params(), tx.init(params()))
    with pytest.raises(ValueError, match="leave param_specs out"):
        spec = jax.sharding.PartitionSpec()
        gc.init_state(params(), optax.sgd(1.0), mesh_of(), replicas=True, param_specs=spec)
    with pytest.raises(ValueError, match="here are 0 of those"):
        gc.consolidate(gc.init_state(params(), optax.sgd(1.0), mesh_of(), replicas=True), of="centre")


def test_a_frozen_part_is_in_the_centre_as_it_is() -> None:
    local = optax.chain(optax.sgd(0.1), gc.local_sgd(dense(), axis_name=AXIS, every=2))
    tx = optax.multi_transform({"trained": local, "frozen": gc.set_to_zero()}, {"b": "frozen", "w": "trained"})
    state = gc.init_state(params(), tx, mesh_of(), replicas=True)
    for name, value in gc.consolidate(state, of="centre").items():
        np.testing.assert_array_equal(value, params()[name])


def test_replicas_in_a_common_state_are_refused() -> None:
    """Without replicas=True the parameters would differ by worker and claim to be one."""
    tx = optax.chain(optax.sgd(0.02), gc.local_sgd(dense(), axis_name=AXIS, every=3))
    with pytest.raises(ValueError, match="replicas=True"):
        trained(tx, 1, with_replicas=False)


def test_spread_and_mean() -> None:
    tx = optax.chain(optax.sgd(0.02))
    state, _ = trained(tx, 3)
    each = replicas(state)
    mean = {k: sum(one[k].astype(np.float64) for one in each) / N for k in each[0]}
    apart = sum(((one[k] - mean[k]) ** 2).sum() for one in each for k in mean) / N
    norm = sum((v**2).sum() for v in mean.values())
    np.testing.assert_allclose(gc.replica_spread(state), np.sqrt(apart / norm), rtol=1e-5)
    for k, v in gc.consolidate(state).items():
        np.testing.assert_allclose(v, mean[k], rtol=1e-6)
        assert v.shape == params()[k].shape
    plain = gc.init_state(params(), tx, mesh_of())
    assert gc.replica_spread(plain) == 0
    chex.assert_trees_all_equal(gc.consolidate(plain), plain.params)


STALENESS = {
    "delayed": [0, 1, 2, 3, 3, 3, 3, 3, 3],
    "delayed-sparse": [0, 1, 2, 3, 4, 3, 4, 3, 4],
    "elastic": [0, 1, 2, 1, 2, 1, 2, 1, 2],
    "local": [0, 1, 2, 0, 1, 2, 0, 1, 2],
    "diloco": [0, 1, 2, 1, 2, 2, 1, 2, 2],
    "streaming": [0, 1, 2, 3, 4, 5, 4, 5, 4],
    "gossip": [0, 0, 0, 0, 0, 0, 0, 0, 0],
    "accumulate": [0, 1, 2, 0, 1, 2, 0, 1, 2],
}


@pytest.mark.parametrize("name", slow_but(("delayed-sparse", "streaming", "gossip"), CHAINS))
def test_staleness(name: str) -> None:
    """After each step: how many of a replica's own the others have had no word of, or it of theirs."""
    tx = CHAINS[name](dense())
    mesh = mesh_of()
    state = gc.init_state(params(), tx, mesh, replicas=True)
    step = gc.make_train_step(loss, tx, mesh)
    staleness = jax.jit(gc.staleness)
    found = [int(staleness(state))]
    for n in range(8):
        state, _ = step(state, batch(n))
        found.append(int(staleness(state)))
    assert found == STALENESS[name]


@pytest.mark.parametrize("name", ("delayed-sparse", "diloco", "accumulate"))
def test_bytes_averaged_over_a_period(name: str) -> None:
    """The exchange's bytes, over the period; a lone flag or loss is in every step."""
    tx, mesh = CHAINS[name](dense()), mesh_of()
    state = gc.init_state(params(), tx, mesh, replicas=True)
    compiled = gc.make_train_step(loss, tx, mesh, mean_metrics=False).lower(state, batch(0)).compile()
    every = {"delayed": 1, "delayed-sparse": 2}.get(name, 3)
    # Sixteen numbers and the exchange's word, in one all-reduce or, for two parts, in two.
    words = 16 + (2 if name == "diloco" else 1)
    want = 2 * (N - 1) * words * 4 / N / every
    assert abs(gc.mean_wire_bytes(compiled, every=every) - want) <= 1
    with pytest.raises(ValueError, match="every must be an integer of at least 1"):
        gc.mean_wire_bytes(compiled, every=0)


def test_staleness_of_what_has_none() -> None:
    with pytest.raises(ValueError, match="found 0"):
        gc.staleness(gc.init_state(params(), optax.sgd(1.0), mesh_of()))
