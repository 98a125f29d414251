"""A power iteration, and PowerSGD with it, in float64."""

import numpy as np


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Gram-Schmidt's columns: the QR decomposition with a positive diagonal."""
    q, r = np.linalg.qr(p)
    return q * np.sign(np.diag(r))


def unit_columns(r: np.ndarray) -> np.ndarray:
    """Columns of length 1; those of zeros stay."""
    length = np.linalg.norm(r, axis=0)
    return r / np.where(length, length, 1)


def matrix(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1]).astype(np.float64)


def low_rank_step(matrix: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step of a power iteration from Q: P = orth(M Q) and R = M^T P."""
    p = orthonormal(matrix @ np.asarray(q, np.float64))
    return p, matrix.T @ p


class PowerSgd:
    """M = g + e; P = orth(mean(M Q)); Q = mean(M^T P); update P Q^T; e = M - P (M^T P)^T, of each worker's own projection.

    Args:
        shapes: of the gradients.
        workers: N.
        first: Q of the first step for each tensor that is compressed.
    """

    def __init__(self, shapes, workers, first) -> None:
        self.shapes, self.n, self.q = shapes, workers, dict(first)
        self.kept = {name: np.zeros((workers, *matrix(np.zeros(shapes[name])).shape)) for name in first}

    def resume(self, kept, right) -> None:
        """Takes over a state, of which the columns of Q may have any length: only their span matters."""
        for name, e, q in zip(self.q, kept, right, strict=True):
            self.kept[name], self.q[name] = np.asarray(e, np.float64).reshape(self.kept[name].shape), q

    def step(self, gradients):
        update = {name: g.mean(axis=0) for name, g in gradients.items() if name not in self.q}
        for name in self.q:
            m = np.stack([matrix(g) for g in gradients[name]]) + self.kept[name]
            p, _ = low_rank_step(m.mean(axis=0), self.q[name])
            own = [x.T @ p for x in m]
            self.q[name] = sum(own) / self.n
            self.kept[name] = np.stack([x - p @ q.T for x, q in zip(m, own, strict=True)])
            update[name] = (p @ self.q[name].T).reshape(self.shapes[name])
        return update
