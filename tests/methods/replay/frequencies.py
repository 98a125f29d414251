"""DeMo written once more in NumPy: the cosine transform from its formula, momentum, and the frequencies that leave it."""

import math

import numpy as np

from tests.methods.oracle import rows_of
from tests.methods.replay.sparse import coded, select_thinned


def cosines(size: int) -> np.ndarray:
    """Orthonormal DCT-II, one frequency in a row, from its formula."""
    matrix = np.empty((size, size))
    for k in range(size):
        for i in range(size):
            matrix[k, i] = math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * (2 * i + 1) * k / (2 * size))
    return matrix


class Demo:
    """m = beta m + g; q = the k largest of DCT(m) of each chunk; m = m - IDCT(q); the update is the mean of the IDCT(q).

    Chunks are seen as ``sides``, and are transformed along both. What padding a last chunk has stays zero.
    """

    def __init__(self, shapes, workers, *, sides, k, momentum, signed, two_phase, dtype) -> None:
        self.shapes, self.n, self.k, self.beta, self.signed = shapes, workers, k, momentum, signed
        self.two_phase, self.dtype = two_phase, dtype
        self.sides, self.block = sides, sides[0] * sides[1]
        self.matrices = [cosines(side) for side in sides]
        self.names = [name for name in sorted(shapes) if len(shapes[name]) > 1]
        self.valid = self.join({name: np.ones(shapes[name]) for name in self.names}) > 0
        self.m = np.zeros((workers, *self.valid.shape))

    def join(self, tree) -> np.ndarray:
        return np.concatenate([rows_of(tree[name], self.block) for name in self.names])

    def transform(self, rows: np.ndarray, *, inverse: bool = False) -> np.ndarray:
        a, b = (matrix.T if inverse else matrix for matrix in self.matrices)
        chunks = rows.astype(np.float64).reshape(-1, *self.sides)
        return np.stack([a @ chunk @ b.T for chunk in chunks]).reshape(rows.shape)

    def strongest(self, rows: np.ndarray, k: int) -> np.ndarray:
        """What of the frequencies of some rows crosses, k of each."""
        frequencies = self.transform(rows).astype(np.float32)
        return coded(np.where(select_thinned(frequencies, k), frequencies, 0).astype(np.float32), self.dtype)

    def step(self, gradients):
        g = np.stack([self.join({name: gradients[name][i] for name in self.names}) for i in range(self.n)])
        pushed = self.beta * self.m + g
        payloads = np.stack([self.strongest(rows, self.k) for rows in pushed])
        mean = np.where(self.valid, self.transform(payloads.mean(axis=0), inverse=True), 0)
        sent = np.stack([np.where(self.valid, self.transform(q, inverse=True), 0) for q in payloads])
        if self.two_phase:
            exact = mean
            mean = np.where(
                self.valid, self.transform(self.strongest(exact, self.k + max(1, self.k // 2)), inverse=True), 0
            )
            shard = -(-len(exact) // self.n)
            for row in range(len(exact)):
                # What the owner did not send is its own to keep.
                sent[row // shard, row] -= self.n * (exact[row] - mean[row])
        self.m = pushed - sent
        update, start = {name: gradients[name].mean(axis=0) for name in self.shapes if name not in self.names}, 0
        for name in self.names:
            size = int(np.prod(self.shapes[name]))
            rows = -(-size // self.block)
            update[name] = mean[start : start + rows].reshape(-1)[:size].reshape(self.shapes[name])
            start += rows
        return {name: np.sign(u) for name, u in update.items()} if self.signed else update
