"""Deep Gradient Compression as its authors' code has it.

Lin et al., 2018, https://arxiv.org/abs/1712.01887; github.com/synxlin/deep-gradient-compression, dgc/memory.py and
dgc/compression.py, commit 24673d45, with ``sample_ratio=1``: the threshold of all entries, not of a sample.
"""

import math

import numpy as np

Tree = dict[str, np.ndarray]


def clipped(gradient: np.ndarray, most: float) -> np.ndarray:
    """One tensor at a norm of at most this."""
    return gradient * min(1.0, most / (np.linalg.norm(gradient) + 1e-6))


class Dgc:
    """u and v of each worker; the largest of v cross by a gather and leave both; dense tensors have momentum after their mean.

    Args:
        shapes: of the gradients; those of two or more dimensions are compressed.
        workers: N.
        ratio: of the entries that are sent, rounded up for each tensor.
        momentum: of u.
        nesterov: u = m (u + g) and v = v + u + g.
        masking: whether what is sent leaves u as well.
        clip: norm of each tensor of a worker, of a dense one of its mean.
    """

    def __init__(self, shapes, workers, *, ratio, momentum, nesterov=False, masking=True, clip=None) -> None:
        self.shapes, self.n, self.m = shapes, workers, momentum
        self.nesterov, self.masking, self.clip = nesterov, masking, clip
        self.k = {name: math.ceil(math.prod(s) * ratio) for name, s in shapes.items() if len(s) > 1}
        self.u = {name: np.zeros((workers, *s) if len(s) > 1 else (1, *s)) for name, s in shapes.items()}
        self.v = {name: np.zeros_like(u) for name, u in self.u.items()}

    def pushed(self, name: str, g: np.ndarray) -> np.ndarray:
        """The new u, and what it adds to v."""
        if self.clip is not None:
            g = np.stack([clipped(one, self.clip) for one in g])
        self.u[name] = self.m * (self.u[name] + g) if self.nesterov else self.m * self.u[name] + g
        return self.u[name] + g if self.nesterov else self.u[name]

    def step(self, gradients: Tree) -> Tree:
        update = {}
        for name, g in gradients.items():
            if name not in self.k:
                update[name] = self.pushed(name, g.astype(np.float64).mean(axis=0, keepdims=True))[0]
                continue
            v = (self.v[name] + self.pushed(name, g)).reshape(self.n, -1)
            mask = np.zeros(v.shape, bool)
            np.put_along_axis(mask, np.argsort(-np.abs(v), axis=1)[:, : self.k[name]], True, axis=1)
            update[name] = (v * mask).mean(axis=0).reshape(self.shapes[name])
            mask = mask.reshape(self.u[name].shape)
            self.v[name] = np.where(mask, 0, v.reshape(mask.shape))
            if self.masking:
                self.u[name] = np.where(mask, 0, self.u[name])
        return update
