"""Rows that owners take in turn: what one bucket takes out and puts back touches no other bucket's rows."""

import jax
import numpy as np
import pytest

from gradcomp_jax.collectives import owners

N, ROWS, BLOCK = 4, 7, 2


def held(table: np.ndarray, worker: int) -> np.ndarray:
    """What an owner holds of a table of all rows: those of its number modulo N."""
    slots = np.zeros((-(-ROWS // N), BLOCK), np.float32)
    mine = table[worker::N]
    slots[: len(mine)] = mine
    return slots


@pytest.mark.parametrize("run", [(0, 7), (0, 5), (5, 7), (2, 6), (0, 4)])
def test_only_the_rows_of_a_run_are_taken_and_put(run: tuple[int, int]) -> None:
    """By each of the owners. Also where the run ends in the last slot of every owner, with other rows beside it."""
    table = 1 + np.arange(ROWS * BLOCK, dtype=np.float32).reshape(ROWS, BLOCK)
    inside = np.zeros((ROWS, 1), bool)
    inside[slice(*run)] = True
    first, end = run[0] // N, -(-run[1] // N)

    @jax.jit
    def both(residual, number):
        taken = owners.take(residual, [run], ROWS, number, N)
        return taken, owners.put(residual, -taken, [run], ROWS, number, N)

    for worker in range(N):
        taken, after = both(held(table, worker), np.int32(worker))
        np.testing.assert_array_equal(taken, held(np.where(inside, table, 0), worker)[first:end])
        np.testing.assert_array_equal(after, held(np.where(inside, -table, table), worker))


def test_rows_are_placed_among_zeros_in_both_ways() -> None:
    rows = 1 + np.arange(3 * BLOCK, dtype=np.float32).reshape(3, BLOCK)
    of = owners.Owners(N * len(rows), N, in_turn=False)
    ways = jax.jit(lambda i: (of.place(rows, i), of._put(rows, i), of._cut(rows, i)))
    for worker in range(N):
        wanted = np.zeros((N, *rows.shape), np.float32)
        wanted[worker] = rows
        for found in ways(np.int32(worker)):
            np.testing.assert_array_equal(found, wanted.reshape(-1, BLOCK))
