"""1-bit Adam as DeepSpeed has it.

Tang et al., 2021, https://arxiv.org/abs/2102.02888, algorithm 1; github.com/microsoft/DeepSpeed,
deepspeed/runtime/fp16/onebit/adam.py, commit 06fa7eea, and deepspeed/runtime/comm/nccl.py (`compressed_allreduce`),
commit 0a849d56.
"""

import numpy as np

Tree = dict[str, np.ndarray]


class OneBitAdam:
    """Adam of the mean gradient; then v stays, and m crosses as scaled signs, with an error at each worker and each server.

    The update is m / (sqrt(v) + eps), without Adam's corrections of m and v for their start.

    Args:
        shapes: of the gradients.
        workers: N.
        freeze: dense steps.
        b1, b2, eps: Adam's.
        block: entries of a tensor that share a scale; ``None`` for a scale for each tensor.
        scale: ``root``, the root of the mean square, as in the code; ``mean``, the mean magnitude, as ours.
    """

    def __init__(self, shapes, workers, *, freeze, b1=0.9, b2=0.999, eps=1e-8, block=None, scale="root") -> None:
        self.shapes, self.n, self.freeze, self.taken = shapes, workers, freeze, 0
        self.b1, self.b2, self.eps, self.block, self.scale = b1, b2, eps, block, scale
        self.m = {name: np.zeros(s) for name, s in shapes.items()}
        self.v = {name: np.zeros(s) for name, s in shapes.items()}
        self.worker = {name: np.zeros((workers, *s)) for name, s in shapes.items()}
        self.server = {name: np.zeros(s) for name, s in shapes.items()}

    def signs(self, x: np.ndarray) -> np.ndarray:
        """Plus or minus a scale; zero counts as positive."""
        flat, decoded = x.reshape(-1), np.empty(x.size)
        for start in range(0, x.size, self.block or x.size):
            part = flat[start : start + (self.block or x.size)]
            size = np.sqrt((part**2).mean()) if self.scale == "root" else np.abs(part).mean()
            decoded[start : start + part.size] = np.where(part < 0, -size, size)
        return decoded.reshape(x.shape)

    def step(self, gradients: Tree) -> Tree:
        self.taken += 1
        for name, g in gradients.items():
            if self.taken <= self.freeze:
                mean = g.astype(np.float64).mean(axis=0)
                self.m[name] = self.b1 * self.m[name] + (1 - self.b1) * mean
                self.v[name] = self.b2 * self.v[name] + (1 - self.b2) * mean**2
                continue
            target = self.b1 * self.m[name] + (1 - self.b1) * g + self.worker[name]
            sent = np.stack([self.signs(one) for one in target])
            self.worker[name] = target - sent
            mean = sent.mean(axis=0) + self.server[name]
            self.m[name] = self.signs(mean)
            self.server[name] = mean - self.m[name]
        return {name: self.m[name] / (np.sqrt(self.v[name]) + self.eps) for name in self.shapes}
