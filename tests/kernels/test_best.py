"""The largest few by one reduction, against a sort."""

import jax
import numpy as np
import pytest

from gradcomp_jax.kernels.best import best_at_once
from gradcomp_jax.kernels.dealt_selection import _in_turn, _together
from gradcomp_jax.kernels.selection import _best_on_gpu, _keys, parts_of


@pytest.mark.parametrize("k", [1, 3, 8, 10])
def test_the_largest_in_order(k: int) -> None:
    # With repetitions, and with fewer than ten in a row.
    for block in (6, 77):
        keys = np.random.default_rng(k).integers(-20, 20, size=(5, block)).astype(np.int32)
        padded = np.pad(keys, ((0, 0), (0, 10)), constant_values=np.iinfo(np.int32).min)
        want = np.flip(np.sort(padded, axis=1), axis=1)[:, :k]
        got = jax.jit(best_at_once, static_argnums=1)(keys, k)
        np.testing.assert_array_equal(np.stack(got, axis=1), want)


def test_over_a_mesh_as_alone(mesh8: jax.sharding.Mesh) -> None:
    keys, spec = np.random.default_rng(0).integers(0, 1 << 30, size=(8, 40), dtype=np.int32), jax.P("data")
    mapped = jax.shard_map(lambda x: tuple(best_at_once(x, 2)), mesh=mesh8, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(np.stack(jax.jit(mapped)(keys), 1), np.flip(np.sort(keys, 1), 1)[:, :2])


@pytest.mark.parametrize(("runs", "k"), [(64, 4), (96, 24)])
def test_what_gpu_takes_of_runs_is_what_is_found_in_turn(runs: int, k: int) -> None:
    """Of several parts each gives as many; the order within a row is theirs."""
    keys = np.random.default_rng(k).permutation(runs * 7).astype(np.int32).reshape(runs, 7)
    each = k // (parts_of(runs, k, 16) or 1)
    split = keys.reshape(k // each, -1, 7).swapaxes(0, 1) if each < k else keys
    gpu, in_turn = (jax.jit(lambda x, of=of: of(x, k=k, each=each))(split) for of in (_together, _in_turn))
    assert gpu.shape == (7, k)
    np.testing.assert_array_equal(np.sort(gpu, axis=1), np.sort(in_turn, axis=1))
    # Simulated workers are mapped over one device.
    both = jax.jit(jax.vmap(lambda x: _together(x, k=k, each=each)))(np.stack([split, split[::-1]]))
    np.testing.assert_array_equal(both[0], gpu)


def test_gpu_misses_none_of_a_few() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 1024)).astype(np.float32)
    keys = jax.jit(lambda x: _best_on_gpu(_keys(x, 11), k=4))(rows)
    index = (np.asarray(keys) & 0x7FF) >> 1
    np.testing.assert_array_equal(np.sort(index, 1), np.sort(np.argsort(-np.abs(rows), axis=1)[:, :4], 1))
