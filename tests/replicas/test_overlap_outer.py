"""Outer steps with their exchange in a thread: the same results, at the same steps, however long an exchange takes."""

import pathlib
import sys
import time

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.network.processes import PATIENCE_S, environment, free_port, started, wait
from tests.replicas.problem import AXIS, batch, loss, mesh_of, params

ROOT = pathlib.Path(__file__).parents[2]
EVERY, DELAY = 6, 5
"""With two parts a part has its turn while the other one is on its way."""


def by_turns(shapes):
    """Leaves in two fragments that are not as the tree has them."""
    leaves, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(treedef, [i % 2 for i in range(len(leaves))])


def method(name: str):
    if name == "sparse":
        return gc.exchange(
            gc.compressors.topk(0.25, block=8, bits=2, pack_positions=True),
            axis_name=AXIS,
            memory=gc.memory.residual(decay=0.95),
            collective="all_gather",
            mask=True,
        )
    return gc.dense(axis_name=AXIS)


def overlapped(name: str = "sparse", *, every: int = EVERY, delay: int = DELAY, parts: int = 2, mix: float = 0.0):
    return gc.make_overlapped_outer_step(
        loss,
        method(name),
        optax.sgd(0.02, momentum=0.5),
        optax.sgd(0.7, 0.9, nesterov=True),
        mesh_of(),
        axis_name=AXIS,
        every=every,
        delay=delay,
        parts=parts,
        mix=mix,
    )


def begun(step):
    return gc.init_state(params(), step.tx, mesh_of(), axis_name=AXIS, replicas=True)


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every", "delay", "parts", "mix"),
    [("sparse", 4, 3, 1, 0.5), ("dense", 5, 4, 2, 0.25), ("sparse", 6, 4, by_turns, 0.0)],
)
def test_a_thread_computes_what_one_program_does(name: str, every: int, delay: int, parts, mix: float) -> None:
    """Up to the rounding of sums that one compiler run joins and another does not, and from any step on with either."""
    step = overlapped(name, every=every, delay=delay, parts=parts, mix=mix)
    one = gc.make_train_step(loss, step.tx, mesh_of(), axis_name=AXIS, mean_metrics=False)
    a, b = begun(step), begun(step)
    for n in range(3 * every):
        given = batch(n)
        if n == every + 1:
            given["y"][1] = np.nan
        a, seen = step(a, given)
        b, want = one(b, given)
        close((a, seen["dropped"]), (b, want["dropped"]))
        if n % (every + 1) == 2:
            # Back and forth: nothing is missing in the state, whatever is in flight.
            step.wait()
            a, b = b, jax.tree.map(jax.numpy.copy, a)
    assert int(seen["dropped"][1]) == 1
    step.wait()


@pytest.mark.slow
def test_means_arrive_at_the_same_steps_however_long_an_exchange_takes() -> None:
    """Bit for bit, with pauses of any length in exchanges and between steps; and they cross one after the other."""

    def run(seed: int | None):
        step = overlapped(every=EVERY, delay=DELAY, parts=2, mix=0.5)
        rng = np.random.default_rng(seed)
        crossing, crossed, cross = [], [], step._cross

        def slowly(sent, inner):
            leaf = jax.tree.leaves(sent)[0].shape
            crossing.append(leaf)
            assert len(crossing) == len(crossed) + 1, "two exchanges at once"
            time.sleep(0 if seed is None else rng.choice([0.0, 0.01, 0.2]))
            found = cross(sent, inner)
            crossed.append(leaf)
            return found

        step._cross = slowly
        state = begun(step)
        for n in range(3 * EVERY):
            state, _ = step(state, batch(n))
            jax.block_until_ready(state)
            time.sleep(0 if seed is None else rng.choice([0.0, 0.05]))
        step.wait()
        return state, crossed

    want, order = run(None)
    assert len(order) == 6 and len(set(order)) == 2
    for seed in range(2):
        got, as_well = run(seed)
        assert as_well == order
        jax.tree.map(np.testing.assert_array_equal, got, want)


WORKER = """
import sys, time, zlib
import jax, numpy as np, optax
address, index, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, 3, index)
import gradcomp_jax as gc
from tests.replicas.problem import AXIS, batch, loss, params
from tests.replicas.test_overlap_outer import method
mesh = jax.make_mesh((3,), (AXIS,))
step = gc.make_overlapped_outer_step(
    loss, method("sparse"), optax.sgd(0.02), optax.sgd(0.7, 0.9, nesterov=True), mesh,
    axis_name=AXIS, every=6, delay=5, parts=2, mix=0.5,
)
state = gc.init_state(params(), step.tx, mesh, axis_name=AXIS, replicas=True)
rng, cross = np.random.default_rng((seed, index)), step._cross
def slowly(*given):
    time.sleep(rng.choice([0.0, 0.02, 0.3]) if seed else 0.0)
    return cross(*given)
step._cross = slowly
sharding = gc.data_sharding(mesh, axis_name=AXIS)
for n in range(24):
    whole = batch(n, 3)
    given = {k: jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i]) for k, v in whole.items()}
    state, _ = jax.block_until_ready(step(state, given))
    time.sleep(rng.choice([0.0, 0.1]) if seed else 0.0)
step.wait()
centre = [np.asarray(leaf) for leaf in jax.tree.leaves(state.opt_state[1].centre)]
assert all(np.isfinite(leaf).all() for leaf in centre)
print(zlib.crc32(b"".join(leaf.tobytes() for leaf in centre)))
"""


@pytest.mark.slow
def test_processes_that_are_late_at_random_exchange_the_same_parts(tmp_path: pathlib.Path) -> None:
    """Each process has delays of its own. A part met by another one would give another centre, or no end."""
    found = []
    for seed in range(2):
        address = f"127.0.0.1:{free_port()}"
        commands = [[sys.executable, "-c", WORKER, address, str(index), str(seed)] for index in range(3)]
        env = environment(PYTHONPATH=str(ROOT))
        with started(tmp_path / str(seed), commands, [env] * 3) as running:
            assert wait(running, within_s=PATIENCE_S) == [0, 0, 0], running[0].stderr
            found += [process.stdout.split()[-1] for process in running]
    assert len(set(found)) == 1


def test_what_cannot_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="use make_train_step"):
        overlapped(delay=0)
    with pytest.raises(ValueError, match="delay must be below every=6"):
        overlapped(delay=6)
    step = overlapped()
    with pytest.raises(ValueError, match="replicas=True"):
        step(gc.init_state(params(), step.tx, mesh_of(), axis_name=AXIS), batch(0))
