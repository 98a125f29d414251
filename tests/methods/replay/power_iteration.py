"""PowerSGD written once more in float64."""

import numpy as np


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Gram-Schmidt's columns: the QR decomposition with a positive diagonal."""
    q, r = np.linalg.qr(p)
    return q * np.sign(np.diag(r))


class PowerSgd:
    """M = g + e; P = orth(mean(M Q)); Q = mean(M^T P); update P Q^T; and what stays behind.

    Args:
        shapes: of the gradients.
        workers: N.
        first: Q of the first step for each tensor that is compressed.
        mean_q: e = M - P Q^T, as in the paper; else each worker's own projection, e = M - P (M^T P)^T.
    """

    def __init__(self, shapes, workers, first, *, mean_q=False) -> None:
        self.shapes, self.n, self.mean_q = shapes, workers, mean_q
        self.q = {name: np.asarray(q, np.float64) for name, q in first.items()}
        self.e = {name: np.zeros((workers, *self.matrix(np.zeros(shapes[name])).shape)) for name in first}

    def matrix(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, x.shape[-1]).astype(np.float64)

    def resume(self, residuals, right) -> None:
        """Takes over a state, of which the columns of Q may have any length: only their span matters."""
        for name, e, q in zip(self.q, residuals, right, strict=True):
            self.e[name] = np.asarray(e, np.float64).reshape(self.e[name].shape)
            self.q[name] = np.asarray(q, np.float64)[0]

    def step(self, gradients):
        update = {name: g.mean(axis=0) for name, g in gradients.items() if name not in self.q}
        for name in self.q:
            m = np.stack([self.matrix(g) for g in gradients[name]]) + self.e[name]
            p = orthonormal(sum(x @ self.q[name] for x in m) / self.n)
            own = [x.T @ p for x in m]
            self.q[name] = sum(own) / self.n
            sent = [self.q[name] if self.mean_q else q for q in own]
            self.e[name] = np.stack([x - p @ q.T for x, q in zip(m, sent, strict=True)])
            update[name] = (p @ self.q[name].T).reshape(self.shapes[name])
        return update
