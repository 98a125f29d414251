"""Which entries a method sends: the largest of all tensors together; and sums in rounds."""

import numpy as np
import pytest

import gradcomp_jax as gc

from .replay.workers import AXIS, N, close, mapped

SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (30, 11)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "k", "dense_from"), [(64, 3, None), (16, 7, 1), (16, 13, 0)], ids=["entries", "second-round", "at-once"]
)
def test_sparcml_doubling(block, k, dense_from) -> None:
    """In log2(N) rounds the same sum as a gather's, up to the order of additions."""
    whole = [have * k * (1 + 4) >= 4 * block for have in (1, 2)]
    assert whole == [dense_from is not None and round_ >= dense_from for round_ in (0, 1)]
    options = {"axis_name": AXIS, "density": k / block, "block": block, "mask": gc.masks.at_least(0)}
    state, update = mapped(gc.sparcml(algorithm="recursive_doubling", **options), SHAPES)
    gathering, gather = mapped(gc.topk_sgd(dtype="float32", collective="all_gather", **options), SHAPES)
    rng = np.random.default_rng(9)
    for _ in range(5):
        gradients = {name: rng.standard_normal((N, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
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
