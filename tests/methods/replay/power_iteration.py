"""PowerSGD and Dion written once more in float64."""

import numpy as np


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Gram-Schmidt's columns: the QR decomposition with a positive diagonal."""
    q, r = np.linalg.qr(p)
    return q * np.sign(np.diag(r))


def unit_columns(r: np.ndarray) -> np.ndarray:
    """Columns of length 1; those of zeros stay."""
    length = np.linalg.norm(r, axis=0)
    return r / np.where(length, length, 1)


def low_rank_step(matrix: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step of a power iteration from Q: P = orth(M Q) and R = M^T P."""
    p = orthonormal(matrix @ np.asarray(q, np.float64))
    return p, matrix.T @ p


class PowerIteration:
    """What both have: matrices, Q of the step before, and what stays behind on each worker.

    Args:
        shapes: of the gradients.
        workers: N.
        first: Q of the first step for each tensor that is compressed.
    """

    def __init__(self, shapes, workers, first) -> None:
        self.shapes, self.n = shapes, workers
        self.q = {name: np.asarray(q, np.float64) for name, q in first.items()}
        self.kept = {name: np.zeros((workers, *self.matrix(np.zeros(shapes[name])).shape)) for name in first}

    def matrix(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, x.shape[-1]).astype(np.float64)

    def compensated(self, name: str, gradients) -> np.ndarray:
        return np.stack([self.matrix(g) for g in gradients[name]]) + self.kept[name]

    def resume(self, kept, right) -> None:
        """Takes over a state, of which the columns of Q may have any length: only their span matters."""
        for name, e, q in zip(self.q, kept, right, strict=True):
            self.kept[name] = np.asarray(e, np.float64).reshape(self.kept[name].shape)
            self.q[name] = np.asarray(q, np.float64)[0]


class PowerSgd(PowerIteration):
    """M = g + e; P = orth(mean(M Q)); Q = mean(M^T P); update P Q^T; and what stays behind.

    Args:
        shapes: of the gradients.
        workers: N.
        first: Q of the first step for each tensor that is compressed.
        mean_q: e = M - P Q^T, as in the paper; else each worker's own projection, e = M - P (M^T P)^T.
    """

    def __init__(self, shapes, workers, first, *, mean_q=False) -> None:
        super().__init__(shapes, workers, first)
        self.mean_q = mean_q

    def step(self, gradients):
        update = {name: g.mean(axis=0) for name, g in gradients.items() if name not in self.q}
        for name in self.q:
            m = self.compensated(name, gradients)
            p = orthonormal(sum(x @ self.q[name] for x in m) / self.n)
            own = [x.T @ p for x in m]
            self.q[name] = sum(own) / self.n
            sent = [self.q[name] if self.mean_q else q for q in own]
            self.kept[name] = np.stack([x - p @ q.T for x, q in zip(m, sent, strict=True)])
            update[name] = (p @ self.q[name].T).reshape(self.shapes[name])
        return update


class Dion(PowerIteration):
    """B = M + g; P = orth(mean(B Q)); R = B^T P; Q is mean(R) with columns of length 1; update sqrt(columns / rows) P Q^T.

    Args:
        shapes: of the gradients; those of one dimension go to Lion.
        workers: N.
        first: Q of the first step for each tensor that is compressed.
        momentum: mu; M = B - (1 - mu) P R^T.
        mean_r: with the workers' mean R in this, as the official code has it; else each worker's own.
    """

    def __init__(self, shapes, workers, first, *, momentum, mean_r=False) -> None:
        super().__init__(shapes, workers, first)
        self.mu, self.mean_r = momentum, mean_r
        self.lion = {name: np.zeros(shape) for name, shape in shapes.items() if name not in first}

    def step(self, gradients):
        update = {}
        for name, m in self.lion.items():
            g = gradients[name].astype(np.float64).mean(axis=0)
            update[name] = np.sign(0.9 * m + 0.1 * g)
            self.lion[name] = 0.95 * m + 0.05 * g
        for name in self.q:
            b = self.compensated(name, gradients)
            p, r = low_rank_step(b.mean(axis=0), self.q[name])
            own = [r if self.mean_r else x.T @ p for x in b]
            self.kept[name] = np.stack([x - (1 - self.mu) * p @ o.T for x, o in zip(b, own, strict=True)])
            self.q[name] = unit_columns(r)
            rows, columns = b.shape[1:]
            update[name] = (np.sqrt(columns / rows) * p @ self.q[name].T).reshape(self.shapes[name])
        return update
