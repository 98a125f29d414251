"""EDEN as its authors' code has it, after a rotation that is given.

Vargaftik et al., 2022, https://arxiv.org/abs/2108.08842, section 3; github.com/amitport/EDEN-Distributed-Mean-Estimation,
torch/eden.py (`EdenQuantization`), commit c9d59aa9.
"""

import math

import numpy as np


def centroids(bits: int) -> np.ndarray:
    """Lloyd's and Max's levels of a standard normal: each the mean of what is nearest to it."""
    density = np.vectorize(lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    below = np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(3000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        levels = -np.diff(density(edges)) / np.diff(below(edges))
    return levels


class Eden:
    """y = R x at a mean square of 1; c the nearest centroids; x becomes |x|^2 / <c, R x> R^T c; the mean over workers.

    Args:
        bits: of a centroid's number.
    """

    def __init__(self, bits: int) -> None:
        self.centroids = centroids(bits)
        self.edges = (self.centroids[1:] + self.centroids[:-1]) / 2

    def mean(self, vectors: np.ndarray, rotations: np.ndarray) -> np.ndarray:
        """Of one vector and one orthogonal matrix for each worker."""
        decoded = []
        for x, rotation in zip(vectors.astype(np.float64), rotations.astype(np.float64), strict=True):
            y = rotation @ x
            chosen = self.centroids[np.searchsorted(self.edges, y * math.sqrt(x.size) / np.linalg.norm(x))]
            decoded.append((x @ x) / (chosen @ y) * rotation.T @ chosen)
        return np.mean(decoded, axis=0)
