"""DeMo's and SparseLoCo's selections of the authors' own code: square tiles of a matrix, the largest of each.

Peng et al., 2024, https://arxiv.org/abs/2411.19870; github.com/bloc97/DeMo, demo.py, commit 0e48145d. Sarfi et al., 2025,
https://arxiv.org/abs/2508.15706; github.com/tplr-ai/CCLoco, src/tplr/ccloco.py, commit c01a785e.
"""

import numpy as np

Tree = dict[str, np.ndarray]


def side_of(length: int, most: int) -> int:
    """The longest side of a tile: the largest divisor of a dimension that is at most this."""
    return max(d for d in range(1, most + 1) if length % d == 0)


def cosines(size: int) -> np.ndarray:
    """Orthonormal DCT-II, one frequency in a row."""
    k, i = np.mgrid[:size, :size]
    return np.sqrt(np.where(k == 0, 1, 2) / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))


class Tiles:
    """A matrix as tiles ``[tiles, height * width]``, and back; with ``transform`` the tiles' frequencies.

    Attributes:
        shape: of the matrix.
        sides: height and width of a tile.
    """

    def __init__(self, shape: tuple[int, int], chunk: int, *, transform: bool) -> None:
        self.shape, self.sides = shape, (side_of(shape[0], chunk), side_of(shape[1], chunk))
        self.left, self.right = (cosines(side) if transform else np.eye(side) for side in self.sides)

    def encode(self, x: np.ndarray) -> np.ndarray:
        (rows, columns), (h, w) = self.shape, self.sides
        tiles = x.reshape(rows // h, h, columns // w, w).swapaxes(1, 2).reshape(-1, h, w)
        return (self.left @ tiles @ self.right.T).reshape(-1, h * w)

    def decode(self, chosen: np.ndarray) -> np.ndarray:
        (rows, columns), (h, w) = self.shape, self.sides
        tiles = self.left.T @ chosen.reshape(-1, h, w) @ self.right
        return tiles.reshape(rows // h, columns // w, h, w).swapaxes(1, 2).reshape(rows, columns)


class TiledSelection:
    """e = decay e + g; the k largest of each tile leave e and cross; the update is their mean over those that sent them.

    With ``transform`` this is DeMo before its sign, in units of the learning rate; without, SparseLoCo's first code before its
    8-bit values, ``g`` being how far a worker has come.

    Args:
        shapes: of the gradients, of two dimensions each.
        workers: N.
        chunk: longest side of a tile.
        k: entries of a tile that are sent.
        decay: of what is kept.
        transform: whether the largest are looked for among a tile's cosine transform.
        senders: whether the mean is over a coefficient's senders, as in both codes; else over all workers, as in
            SparseLoCo's paper.
    """

    def __init__(self, shapes, workers, *, chunk, k, decay, transform, senders=True) -> None:
        self.tiles = {name: Tiles(shape, chunk, transform=transform) for name, shape in shapes.items()}
        self.kept = {name: np.zeros((workers, *shape)) for name, shape in shapes.items()}
        self.k, self.decay, self.senders = k, decay, senders

    def step(self, gradients: Tree) -> Tree:
        update = {}
        for name, tiles in self.tiles.items():
            self.kept[name] = self.decay * self.kept[name] + gradients[name]
            sent, sums, many = [], 0.0, 0.0
            for held in self.kept[name]:
                every = tiles.encode(held)
                mask = np.zeros(every.shape, bool)
                np.put_along_axis(mask, np.argsort(-np.abs(every), axis=1)[:, : self.k], True, axis=1)
                sent.append(tiles.decode(every * mask))
                sums, many = sums + every * mask, many + mask
            self.kept[name] = self.kept[name] - np.stack(sent)
            over = np.maximum(many, 1) if self.senders else len(sent)
            update[name] = tiles.decode(sums / over)
        return update
