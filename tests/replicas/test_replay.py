"""Every method against NumPy written from the papers' formulas."""

import functools

import ml_dtypes
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.replicas.problem import AXIS, N, batch, close, each, gradient, loss, mean, mesh_of, params, start

RATE = 0.02
STEPS = 15


@functools.cache
def dense():
    return gc.dense(axis_name=AXIS)


def run(tx, steps: int = STEPS, *, check_vma: bool = True):
    """Yields the state after each step."""
    mesh = mesh_of()
    state = gc.init_state(params(), tx, mesh, replicas=True)
    step = gc.make_train_step(loss, tx, mesh, check_vma=check_vma, donate=False)
    for n in range(steps):
        state, _ = step(state, batch(n))
        yield state
    assert step._cache_size() == 1


def gradients(x, n):
    return [gradient(x[j], n, j) for j in range(N)]


@pytest.mark.parametrize(("delay", "check_vma"), [(2, False), (5, True)])
def test_delayed_average(delay: int, check_vma: bool) -> None:
    """w_{n+1,j} = w_{n,j} - eta (g_{n,j} + gbar_{n-t} - g_{n-t,j}): the paper's formula as it stands."""
    tx = optax.chain(gc.delayed_average(dense(), axis_name=AXIS, delay=delay), optax.sgd(RATE))
    x, seen = start(), []
    for n, state in enumerate(run(tx, check_vma=check_vma)):
        seen.append(gradients(x, n))
        old = seen[n - delay] if n >= delay else None
        for j in range(N):
            step = seen[n][j]
            if old is not None:
                step = each(lambda g, m, o: g + (m - o), step, mean(old), old[j])
            x[j] = each(lambda w, s: w - RATE * s, x[j], step)
        close(state, x)


@pytest.mark.parametrize(("delay", "every"), [(0, 3), (2, 3), (6, 2)])
def test_temporally_sparse(delay: int, every: int) -> None:
    """The sum of p gradients at once, t steps after the last of them."""
    tx = optax.chain(gc.delayed_average(dense(), axis_name=AXIS, delay=delay, every=every), optax.sgd(RATE))
    x, seen = start(), []
    for n, state in enumerate(run(tx, 20)):
        seen.append(gradients(x, n))
        last = n - delay
        sums = None
        if last >= 0 and last % every == every - 1:
            sums = [each(lambda *g: sum(g), *(seen[i][j] for i in range(last - every + 1, last + 1))) for j in range(N)]
        for j in range(N):
            step = seen[n][j]
            if sums is not None:
                step = each(lambda g, m, o: g + (m - o), step, mean(sums), sums[j])
            x[j] = each(lambda w, s: w - RATE * s, x[j], step)
        close(state, x)


@pytest.mark.parametrize(("delay", "every"), [(2, 2)])
def test_bounded_staleness(delay: int, every: int) -> None:
    """Without compensation the mean of t steps ago is all there is, and replicas stay equal."""
    tx = optax.chain(
        gc.delayed_average(dense(), axis_name=AXIS, delay=delay, every=every, compensate=False), optax.sgd(RATE)
    )
    x, seen = start(), []
    for n, state in enumerate(run(tx)):
        seen.append(gradients(x, n))
        last = n - delay
        if last >= 0 and last % every == every - 1:
            total = each(lambda *g: sum(g), *(mean(seen[i]) for i in range(last - every + 1, last + 1)))
            x = [each(lambda w, s: w - RATE * s, one, total) for one in x]
        close(state, x)
        assert float(gc.replica_spread(state)) == 0


@pytest.mark.parametrize("every", (4,))
def test_elastic_average(every: int) -> None:
    """EASGD, algorithm 1: both sides of the band from where they were before the step."""
    tx = optax.chain(optax.sgd(RATE), gc.elastic_average(dense(), axis_name=AXIS, every=every, beta=0.8))
    x, centre = start(), start()[0]
    for n, state in enumerate(run(tx)):
        own = gradients(x, n)
        apart = [each(np.subtract, one, centre) for one in x]
        x = [each(lambda w, g: w - RATE * g, one, g) for one, g in zip(x, own, strict=True)]
        if n % every == 0:
            x = [each(lambda w, d: w - 0.8 / N * d, one, d) for one, d in zip(x, apart, strict=True)]
            centre = each(lambda c, d: c + 0.8 * d, centre, mean(apart))
        close(state, x)
        for k, want in centre.items():
            np.testing.assert_allclose(gc.consolidate(state, of="centre")[k], want, rtol=2e-5, atol=2e-5)


def test_eamsgd() -> None:
    """With Nesterov momentum of each replica's own; v is in units of the gradient, as optax keeps it."""
    tx = optax.chain(optax.sgd(RATE, momentum=0.9, nesterov=True), gc.elastic_average(dense(), axis_name=AXIS, every=2))
    x, centre = start(), start()[0]
    v = [each(np.zeros_like, one) for one in x]
    for n, state in enumerate(run(tx)):
        own = gradients(x, n)
        apart = [each(np.subtract, one, centre) for one in x]
        v = [each(lambda a, g: 0.9 * a + g, a, g) for a, g in zip(v, own, strict=True)]
        x = [each(lambda w, g, a: w - RATE * (g + 0.9 * a), one, g, a) for one, g, a in zip(x, own, v, strict=True)]
        if n % 2 == 0:
            x = [each(lambda w, d: w - 0.9 / N * d, one, d) for one, d in zip(x, apart, strict=True)]
            centre = each(lambda c, d: c + 0.9 * d, centre, mean(apart))
        close(state, x)


@pytest.mark.parametrize("every", (4,))
def test_local_sgd(every: int) -> None:
    tx = optax.chain(optax.sgd(RATE), gc.local_sgd(dense(), axis_name=AXIS, every=every))
    x = start()
    for n, state in enumerate(run(tx)):
        x = [each(lambda w, g: w - RATE * g, one, g) for one, g in zip(x, gradients(x, n), strict=True)]
        if (n + 1) % every == 0:
            x = [mean(x)] * N
        close(state, x)


def test_diloco() -> None:
    """Nesterov outside: momentum over outer gradients, a look ahead in each outer step."""
    tx = optax.chain(optax.sgd(RATE), gc.diloco(dense(), axis_name=AXIS, every=3, learning_rate=0.6, momentum=0.8))
    x, centre = start(), start()[0]
    velocity = each(np.zeros_like, centre)
    for n, state in enumerate(run(tx)):
        x = [each(lambda w, g: w - RATE * g, one, g) for one, g in zip(x, gradients(x, n), strict=True)]
        if (n + 1) % 3 == 0:
            come = each(np.subtract, centre, mean(x))
            velocity = each(lambda v, d: 0.8 * v + d, velocity, come)
            centre = each(lambda c, d, v: c - 0.6 * (d + 0.8 * v), centre, come, velocity)
            x = [centre] * N
        close(state, x)


@pytest.mark.parametrize(("graph", "every"), [("exponential", 1), ("hypercube", 3)])
def test_gossip(graph: str, every: int) -> None:
    tx = optax.chain(optax.sgd(RATE), gc.gossip(axis_name=AXIS, graph=graph, every=every))
    x = start()
    for n, state in enumerate(run(tx)):
        x = [each(lambda w, g: w - RATE * g, one, g) for one, g in zip(x, gradients(x, n), strict=True)]
        if (n + 1) % every == 0:
            reach = 1 << (n // every % 2)
            sender = [i ^ reach if graph == "hypercube" else (i - reach) % N for i in range(N)]
            x = [each(lambda a, b: (a + b) / 2, x[i], x[sender[i]]) for i in range(N)]
        close(state, x)


@pytest.mark.parametrize("every", (3, "growing"))
def test_accumulate(every) -> None:
    """One step of momentum SGD for each mean over several batches and all workers; parameters are common."""

    def period(updates: int) -> int:
        return 1 + updates if every == "growing" else every

    grow = (lambda step: 1 + step) if every == "growing" else every
    tx = gc.accumulate(optax.chain(dense(), optax.sgd(RATE, momentum=0.9)), axis_name=AXIS, every=grow)
    mesh = mesh_of()
    state = gc.init_state(params(), tx, mesh)
    step = gc.make_train_step(loss, tx, mesh)
    x, pending, updates = start()[0], [], 0
    velocity = each(np.zeros_like, x)
    for n in range(STEPS):
        state, _ = step(state, batch(n))
        pending.append(mean(gradients([x] * N, n)))
        if len(pending) == period(updates):
            velocity = each(lambda v, g: 0.9 * v + g, velocity, mean(pending))
            x = each(lambda w, v: w - RATE * v, x, velocity)
            pending, updates = [], updates + 1
        for k in x:
            np.testing.assert_allclose(state.params[k], x[k], rtol=2e-5, atol=2e-5)
    assert updates == 5


def two_bits(row: np.ndarray) -> np.ndarray:
    size = np.abs(row)
    above = size > size.mean()
    upper = size[above].mean() if above.any() else 0.0
    lower = size[~above].mean() if (~above).any() and size.all() else 0.0
    upper, lower = (np.float64(np.float32(m).astype(ml_dtypes.bfloat16)) for m in (upper, lower))
    return np.sign(row) * np.where(above, upper, lower)


def test_sparse_loco() -> None:
    """The matrix dealt out over chunks of 8: the four largest of each in two bits, gathered; what is left decays and waits."""
    tx = optax.chain(
        optax.sgd(RATE),
        gc.sparse_loco(
            axis_name=AXIS, every=3, density=0.5, chunk=8, decay=0.9, learning_rate=0.8, mask=gc.masks.at_least(0)
        ),
    )
    x, centre = start(), start()[0]
    rows = gc.kernels.dealt_rows(16, 8, (3,))
    left = np.zeros((N, 8 * rows))
    for n, state in enumerate(run(tx)):
        x = [each(lambda w, g: w - RATE * g, one, g) for one, g in zip(x, gradients(x, n), strict=True)]
        if (n + 1) % 3 == 0:
            sent = np.zeros((N, 8 * rows))
            for j in range(N):
                target = 0.9 * left[j] + np.pad((centre["w"] - x[j]["w"]).reshape(-1), (0, 8 * rows - 15))
                for row in (slice(r, None, rows) for r in range(rows)):
                    chosen = np.argsort(-np.abs(target[row]), kind="stable")[:4]
                    sent[j][row][chosen] = two_bits(target[row][chosen])
                left[j] = target - sent[j]
            come = {"w": sent.mean(axis=0)[:15].reshape(5, 3), "b": centre["b"] - mean(x)["b"]}
            centre = each(lambda c, d: c - 0.8 * d, centre, come)
            x = [centre] * N
        close(state, x, 1e-4)
