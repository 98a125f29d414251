"""The Hadamard rotation against scipy's matrix."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg

from gradcomp_jax.kernels.hadamard import by_one, by_pieces
from tests.programs import kernels


@pytest.mark.parametrize("block", (1, 32, 1024))
def test_is_the_orthonormal_transform_and_its_own_inverse(block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(3, block)).astype(np.float32)
    got = np.asarray(jax.jit(kernels.hadamard)(rows))
    want = rows.astype(np.float64) @ scipy.linalg.hadamard(block).T / np.sqrt(block)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(kernels.hadamard(jnp.asarray(got)), rows, atol=2e-5)


@pytest.mark.parametrize("block", (1, 32, 2048))
def test_accelerators_round_entries_to_bfloat16_and_nothing_else(block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(3, block)).astype(np.float32)
    rounded = rows.astype(ml_dtypes.bfloat16).astype(np.float64)
    want = rounded @ scipy.linalg.hadamard(block).T / np.sqrt(block)
    np.testing.assert_allclose(jax.jit(by_one)(rows), want, atol=2e-5)


@pytest.mark.parametrize(("rows", "block"), ((3, 2048), (100, 1024), (326, 1024), (704, 64), (5, 8)))
def test_gpu_joins_the_pieces_of_few_rows(rows: int, block: int) -> None:
    x = np.random.default_rng(block).normal(size=(rows, block)).astype(ml_dtypes.bfloat16)
    got = jax.jit(by_pieces)(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x.astype(np.float64) @ scipy.linalg.hadamard(block).T, atol=1e-4)


def test_a_rotation_spreads_an_outlier_and_comes_back() -> None:
    rows = np.zeros((2, 256), np.float32)
    rows[0, 17], rows[1] = 16.0, 1.0
    seeds = kernels.row_seeds(jax.random.key(3), 2)
    rotated = np.asarray(kernels.rotate(rows, seeds))
    np.testing.assert_allclose(np.abs(rotated[0]), 1.0, atol=1e-5)
    # Without the signs a constant row would become a single entry.
    assert np.abs(rotated[1]).max() < 5
    np.testing.assert_allclose(kernels.rotate_back(jnp.asarray(rotated), seeds), rows, atol=1e-5)
    assert np.abs(rotated - np.asarray(kernels.rotate(rows, kernels.fold_seeds(seeds, 1)))).max() > 0.5


def test_every_row_turns_by_its_own_seed() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    seeds = jnp.asarray(np.uint32([7, 8, 7]))
    signs = 1.0 - 2.0 * (np.asarray(kernels.seeded_bits(seeds, 64)) >> 31)
    want = (rows * signs) @ scipy.linalg.hadamard(64).T / 8
    got = np.asarray(jax.jit(kernels.rotate)(rows, seeds))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    # A row alone, and under vmap, is what it is among others.
    np.testing.assert_allclose(kernels.rotate(rows[1:2], seeds[1:2]), got[1:2], atol=1e-5)
    one = jax.vmap(lambda r, s: kernels.rotate(r[None], s[None])[0])(rows, seeds)
    np.testing.assert_allclose(one, got, atol=1e-5)


def test_no_rows_and_a_block_that_is_no_power_of_two() -> None:
    assert kernels.hadamard(jnp.zeros((0, 8))).shape == (0, 8)
    assert kernels.rotate(jnp.zeros((0, 8)), jnp.zeros((0,), jnp.uint32)).shape == (0, 8)
    with pytest.raises(ValueError, match="power of two, got 12"):
        kernels.hadamard(jnp.zeros((1, 12)))


@pytest.mark.parametrize("block", (1, 64, 1024))
def test_planes_turn_and_turn_back(block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(5, block)).astype(np.float32)
    seeds = kernels.row_seeds(jax.random.key(4), 5)
    turned = np.asarray(jax.jit(lambda r: kernels.rotate(r, seeds, planes=True))(rows))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    np.testing.assert_allclose(kernels.rotate_back(jnp.asarray(turned), seeds, planes=True), rows, atol=1e-5)


def test_planes_leave_no_grid() -> None:
    """One large entry: after signs and a transform two magnitudes at most, with planes as many as there are entries."""
    rows = np.zeros((1, 256), np.float32)
    rows[0, 9] = 1.0
    seeds, other = (kernels.row_seeds(jax.random.key(k), 1) for k in (5, 6))
    by_signs, by_planes = (
        kernels.rotate(kernels.rotate(rows, seeds, planes=planes), other, planes=planes) for planes in (False, True)
    )
    assert len(np.unique(np.round(np.abs(by_signs), 5))) < 30
    assert len(np.unique(np.round(np.abs(by_planes), 5))) > 200
