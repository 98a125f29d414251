"""TernGrad: unbiased, exact levels, scales shared, the same by every collective."""

import jax
import numpy as np
import pytest

import gradcomp_jax as gc

N, AXIS = 4, "data"


def run(gradient, **options):
    """One step of N workers; the update of worker 0."""
    tx = gc.terngrad(axis_name=AXIS, **options)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)
    return jax.tree.map(lambda u: np.asarray(u[0]), jax.jit(step)(gradient))


@pytest.fixture(scope="module")
def gradient():
    return {"w": np.random.default_rng(0).standard_normal((N, 60, 50)).astype(np.float32)}


def shared_scale(gradient: np.ndarray, clip: float | None) -> float:
    """max over workers of the largest magnitude after clipping, in float64."""
    each = []
    for worker in gradient.astype(np.float64):
        largest = np.abs(worker).max()
        each.append(largest if clip is None else min(largest, clip * worker.std()))
    return max(each)


@pytest.mark.parametrize("clip", [2.5, 1.0, None])
def test_the_update_is_an_integer_of_levels(gradient, clip) -> None:
    update = run(gradient, clip=clip)["w"]
    levels = update / (shared_scale(gradient["w"], clip) / N)
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-3)
    assert set(np.unique(np.round(levels))) <= set(range(-N, N + 1))
    assert len(np.unique(np.round(levels))) > N, "most levels occur"


def test_every_collective_gives_the_same_update(gradient) -> None:
    two_phase, gather, added = (run(gradient, collective=r)["w"] for r in ("two_phase", "all_gather", "all_reduce"))
    np.testing.assert_allclose(gather, two_phase, rtol=1e-6)
    np.testing.assert_allclose(added, two_phase, rtol=1e-6)


def test_workers_round_independently(gradient) -> None:
    """Equal gradients on every worker still give more than two magnitudes: the noise averages out."""
    same = {"w": np.repeat(gradient["w"][:1], N, axis=0)}
    levels = np.abs(run(same)["w"]) / (shared_scale(same["w"], 2.5) / N)
    assert set(np.unique(np.round(levels))) == set(range(N + 1))


def test_bucket_scales_follow_their_buckets() -> None:
    g = np.ones((N, 2, 100), np.float32) * np.asarray([1e-3, 10.0], np.float32)[None, :, None]
    bucket = run({"w": g}, granularity="bucket", bucket_size=100, clip=None)["w"]
    np.testing.assert_allclose(bucket[0], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(bucket[1], 10.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be a positive Python number or None, got 0"),
        ({"downlink": "exac"}, r"downlink must be one of 'exact', 'ternary', got 'exac'; did you mean 'exact'"),
        ({"share_scale": False}, "downlink='exact' needs share_scale=True"),
        (
            {"share_scale": False, "downlink": "ternary", "collective": "all_reduce"},
            "collective='all_reduce' needs payloads that add up",
        ),
        ({"granularity": "layer"}, "granularity must be one of 'tensor', 'bucket'"),
        ({"bucket_size": 0}, "bucket_size must be an integer of at least 1, got 0"),
        ({"generator": "mt"}, "generator must be one of 'hash', 'threefry'"),
    ],
)
def test_bad_options_name_the_remedy(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        gc.terngrad(axis_name=AXIS, **options)
