"""PowerSGD as PyTorch's communication hook has it, and Dion as its authors' code does.

Vogels et al., 2019, https://arxiv.org/abs/1905.13727; github.com/pytorch/pytorch,
torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py (`powerSGD_hook`), commit 00c22ce5. Ahn et al., 2025,
https://arxiv.org/abs/2504.05295; github.com/microsoft/dion, dion/dion.py (`dion_update_ddp`), commit 0a059a45.
"""

import numpy as np

Tree = dict[str, np.ndarray]


def gram_schmidt(columns: np.ndarray, epsilon: float) -> np.ndarray:
    """One column after the other at length 1, and out of those that follow."""
    columns = columns.copy()
    for i in range(columns.shape[1]):
        columns[:, i] /= np.linalg.norm(columns[:, i]) + epsilon
        rest = columns[:, i + 1 :]
        rest -= np.outer(columns[:, i], columns[:, i] @ rest)
    return columns


class PowerSgd:
    """Q orthogonalized; P = sum(M Q), orthogonalized; Q = mean(M^T P); the update is P Q^T; e = M - P Q^T with M = g + e.

    Args:
        shapes: of the gradients; what has no ``first`` is averaged.
        workers: N.
        first: Q of the first step.
    """

    def __init__(self, shapes, workers, first: Tree) -> None:
        self.q = {name: q.astype(np.float64) for name, q in first.items()}
        self.e = {name: np.zeros((workers, *shapes[name])) for name in first}

    def step(self, gradients: Tree) -> Tree:
        update = {name: g.astype(np.float64).mean(axis=0) for name, g in gradients.items()}
        for name in self.q:
            m = gradients[name] + self.e[name]
            p = gram_schmidt((m @ gram_schmidt(self.q[name], 1e-8)).sum(axis=0), 1e-8)
            self.q[name] = (m.swapaxes(1, 2) @ p).mean(axis=0)
            update[name] = p @ self.q[name].T
            self.e[name] = m - update[name]
        return update


class Dion:
    """M = M + g; P = orth(mean(M Q)); R = mean(M^T P); M = M - (1 - mu) P R^T; Q = R, columns at length 1.

    The update is sqrt(fan-out / fan-in) P Q^T. The code turns a matrix over so that P, whose columns are orthonormal,
    belongs to the longer side; the paper's algorithm 1 has it on the side of the fan-out.

    Args:
        shapes: of the gradients, [fan-in, fan-out].
        workers: N.
        first: Q of the first step, of the side that P is not on.
        momentum: mu.
        side: which one P is on: ``in``, ``out`` or ``longer``.
    """

    def __init__(self, shapes, workers, first: Tree, *, momentum: float, side: str = "longer") -> None:
        self.q = {name: q.astype(np.float64) for name, q in first.items()}
        self.m = {name: np.zeros((workers, *shapes[name])) for name in shapes}
        turned = {name: shape[0] < shape[1] if side == "longer" else side == "out" for name, shape in shapes.items()}
        self.turned, self.mu = turned, momentum

    def step(self, gradients: Tree) -> Tree:
        update = {}
        for name, g in gradients.items():
            self.m[name] = self.m[name] + g
            m = self.m[name].swapaxes(1, 2) if self.turned[name] else self.m[name]
            p = np.linalg.qr(m.mean(axis=0) @ self.q[name])[0]
            r = m.mean(axis=0).T @ p
            left = m - (1 - self.mu) * p @ r.T
            self.m[name] = left.swapaxes(1, 2) if self.turned[name] else left
            self.q[name] = r / (np.linalg.norm(r, axis=0) + 1e-8)
            step = p @ self.q[name].T
            fan_in, fan_out = g.shape[1:]
            update[name] = np.sqrt(fan_out / fan_in) * (step.T if self.turned[name] else step)
        return update
