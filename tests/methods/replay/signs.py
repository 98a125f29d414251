"""1-bit Adam written once more in float64."""

import numpy as np

from tests.methods.oracle import rows_of


class OneBitAdam:
    """Adam of the mean gradient; then v stays, and m crosses as scaled signs with a residual at workers and owners.

    Args:
        shapes: of the gradients; the momentum of those of one dimension is averaged as it is.
        workers: N.
        block: entries that share a magnitude, the mean of theirs.
        warm_up: dense steps.
        b1: of the momentum.
        b2: of the variance.
        eps: added to the root of the variance.
        floor: least root of the frozen variance, as a fraction of its root mean square over the tensor.
    """

    def __init__(self, shapes, workers, *, block, warm_up, b1, b2, eps, floor) -> None:
        self.shapes, self.n, self.block, self.warm_up = shapes, workers, block, warm_up
        self.b1, self.b2, self.eps, self.floor, self.taken = b1, b2, eps, floor, 0
        self.names = [name for name in sorted(shapes) if len(shapes[name]) > 1]
        self.m = {name: np.zeros(s) for name, s in shapes.items()}
        self.v = {name: np.zeros(s) for name, s in shapes.items()}
        self.valid = self.join({name: np.ones(shapes[name]) for name in self.names}) > 0
        self.worker = np.zeros((workers, *self.valid.shape))
        self.server = np.zeros(self.valid.shape)
        self.margin = np.inf

    def join(self, tree) -> np.ndarray:
        rows = [np.zeros((0, self.block))]
        for name in self.names:
            padded = np.zeros(rows_of(tree[name], self.block).shape)
            padded.reshape(-1)[: tree[name].size] = tree[name].reshape(-1)
            rows.append(padded)
        return np.concatenate(rows)

    def signs(self, x: np.ndarray) -> np.ndarray:
        """Of each row, plus or minus the mean magnitude; a zero counts as positive."""
        self.margin = min(self.margin, np.abs(x[self.valid & (x != 0)]).min())
        scale = np.abs(x).sum(axis=1, keepdims=True) / self.valid.sum(axis=1, keepdims=True)
        return np.where(self.valid, np.where(x < 0, -scale, scale), 0)

    def step(self, gradients):
        self.taken += 1
        if self.taken <= self.warm_up:
            for name, g in gradients.items():
                mean = g.astype(np.float64).mean(axis=0)
                self.m[name] = self.b1 * self.m[name] + (1 - self.b1) * mean
                self.v[name] = self.b2 * self.v[name] + (1 - self.b2) * mean**2
        else:
            moved = {
                name: self.b1 * self.m[name] + (1 - self.b1) * g.astype(np.float64) for name, g in gradients.items()
            }
            self.m = {name: local.mean(axis=0) for name, local in moved.items()}
            self.m |= self.compressed(moved)
        first, second = 1 - self.b1**self.taken, 1 - self.b2 ** min(self.taken, self.warm_up)
        step = {name: self.m[name] / first / (np.sqrt(self.spread(name) / second) + self.eps) for name in self.shapes}
        step = {name: np.where(self.spread(name) > 0, s, 0) for name, s in step.items()}
        return {name: np.where(self.v[name] > 0, s, np.clip(s, -1, 1)) for name, s in step.items()}

    def spread(self, name: str) -> np.ndarray:
        """The variance that a step is divided by."""
        v = self.v[name]
        if self.taken <= self.warm_up:
            return v
        return np.where(v > 0, np.maximum(v, self.floor**2 * v.mean()), v.mean())

    def compressed(self, moved):
        """Worker i sends C(m_i + e_i); an owner adds its residual to their mean; the downlink is C of it: the new m."""
        local = [self.join({name: moved[name][i] for name in self.names}) for i in range(self.n)]
        target = np.stack(local) + self.worker
        sent = np.stack([self.signs(x) for x in target])
        self.worker = target - sent
        mean = sent.mean(axis=0) + self.server
        downlink = self.signs(mean)
        self.server = mean - downlink
        result, start = {}, 0
        for name in self.names:
            size = int(np.prod(self.shapes[name]))
            rows = -(-size // self.block)
            result[name] = downlink[start : start + rows].reshape(-1)[:size].reshape(self.shapes[name])
            start += rows
        return result
