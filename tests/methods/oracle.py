"""Deep Gradient Compression written once more, slowly, in NumPy, from the paper and the exchange's definition."""

import ml_dtypes
import numpy as np

from gradcomp_jax import kernels

Tree = dict[str, np.ndarray]


def rows_of(x: np.ndarray, block: int) -> np.ndarray:
    flat = x.reshape(-1).astype(np.float32)
    padded = np.zeros(-(-flat.size // block) * block, np.float32)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def dealt(x: np.ndarray, block: int, rows: int) -> np.ndarray:
    """Row r has the entries r, r + rows, r + 2 rows, ... of a tensor, and zeros beyond its end."""
    flat = np.zeros(rows * block, np.float32)
    flat[: x.size] = x.reshape(-1)
    return flat[np.arange(rows)[:, None] + rows * np.arange(block)]


def undealt(rows: np.ndarray, size: int) -> np.ndarray:
    """Inverse of :func:`dealt`: the first ``size`` entries."""
    flat = np.empty(rows.size, rows.dtype)
    flat[np.arange(rows.shape[0])[:, None] + rows.shape[0] * np.arange(rows.shape[1])] = rows
    return flat[:size]


def how_many(shapes: list[tuple[int, ...]], block: int) -> int:
    """Over how many rows tensors of these shapes are dealt out, together."""
    size = sum(int(np.prod(s)) for s in shapes)
    periods = [int(np.prod(s[i:])) for s in shapes for i in range(1, len(s))]
    return kernels.dealt_rows(-(-size // block) * block, block, tuple(periods))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else x.astype(np.float32)


def cut(rows: np.ndarray) -> np.ndarray:
    """Entries without the low bits of the mantissa that a key needs for position and sign."""
    low = np.uint32(2 ** (max(1, (rows.shape[1] - 1).bit_length()) + 1) - 1)
    return (rows.view(np.uint32) & ~low).view(np.float32)


def select(rows: np.ndarray, k: int) -> np.ndarray:
    """Boolean mask of the k largest magnitudes of each row, compared after the cut; of equals the later ones.

    bfloat16 sums have so few bits that equals are common, so the order of equals matters to a replay.
    """
    order = rows.shape[1] - 1 - np.argsort(-np.abs(cut(rows))[:, ::-1], axis=1, kind="stable")[:, :k]
    mask = np.zeros(rows.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


class Dgc:
    """N workers in one process. ``step`` takes ``[N, ...]`` gradients and returns the update."""

    def __init__(
        self, shapes, workers, *, block, k, momentum, nesterov, masking, weight_decay, clip_norm, collective, dtype
    ):
        self.shapes, self.n, self.block, self.k = shapes, workers, block, k
        self.m, self.nesterov, self.masking = np.float32(momentum), nesterov, masking
        self.decay, self.clip, self.collective, self.dtype = weight_decay, clip_norm, collective, dtype
        compressed = [name for name in sorted(shapes) if len(shapes[name]) > 1]
        rest = [name for name in sorted(shapes) if len(shapes[name]) <= 1]
        self.groups = [(compressed, block, k), (rest, 1, 1)]
        self.u = {
            name: np.zeros((workers, *self.rows(name, np.zeros(s)).shape), np.float32) for name, s in shapes.items()
        }
        self.v = {name: u.copy() for name, u in self.u.items()}
        self.owners = np.zeros((sum(self.u[name].shape[1] for name in compressed), block), np.float32)

    def rows(self, name: str, x: np.ndarray) -> np.ndarray:
        if len(self.shapes[name]) <= 1:
            return rows_of(x, 1)
        return dealt(x, self.block, how_many([self.shapes[name]], self.block))

    def memory(self, kept: Tree, name: str) -> np.ndarray:
        """As the tensor lies, with the zeros that fill up its last stretch of a block."""
        size = -(-int(np.prod(self.shapes[name])) // self.block) * self.block
        return np.stack([undealt(worker, size).reshape(-1, self.block) for worker in kept[name]])

    def step(self, gradients: Tree, params: Tree) -> Tree:
        local = []
        for i in range(self.n):
            g = {k: gradients[k][i] + np.float32(self.decay) * params[k] for k in gradients}
            norm = np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in g.values()))
            bound = self.clip * self.n**-0.5 if self.clip else np.inf
            local.append({k: (x * np.float32(min(1.0, bound / norm))).astype(np.float32) for k, x in g.items()})
        update = {}
        for names, block, k in self.groups:
            # What goes dense crosses on its own collective: exactly in float32, in two phases in bfloat16.
            collective = self.collective if block > 1 else "two_phase" if self.dtype == "bfloat16" else "all_gather"
            pushed = {}
            for name in names:
                g = np.stack([self.rows(name, worker[name]) for worker in local])
                if self.nesterov:
                    self.u[name] = self.m * (self.u[name] + g)
                    pushed[name] = self.v[name] + self.u[name] + g
                else:
                    self.u[name] = self.m * self.u[name] + g
                    pushed[name] = self.v[name] + self.u[name]
            target = np.concatenate([pushed[name] for name in names], axis=1)
            masks = np.stack([select(t, k) for t in target])
            sent = self.values(np.where(masks, target, 0), block)
            mean, effective = self.exchange(sent, k, block, collective)
            gone = (sent != 0) & (effective != 0) if block > 1 else sent != 0
            start = 0
            for name in names:
                span = slice(start, start + pushed[name].shape[1])
                start = span.stop
                self.v[name] = target[:, span] - effective[:, span]
                if self.masking and block > 1:
                    self.u[name] = np.where(gone[:, span], 0, self.u[name]).astype(np.float32)
                size = int(np.prod(self.shapes[name]))
                flat = undealt(mean[span], size) if block > 1 else mean[span].reshape(-1)
                update[name] = flat.reshape(self.shapes[name])
        return update

    def values(self, chosen: np.ndarray, block: int) -> np.ndarray:
        """As they cross: bfloat16 values of a selection are read off the keys."""
        if self.dtype == "bfloat16" and block > 1:
            chosen = cut(chosen.reshape(-1, block)).reshape(chosen.shape)
        return rounded(chosen, self.dtype)

    def exchange(self, sent: np.ndarray, k: int, block: int, collective: str) -> tuple[np.ndarray, np.ndarray]:
        """The mean that everybody gets, and what of each worker's payload counted as sent."""
        exact = sent.sum(axis=0, dtype=np.float32) / np.float32(self.n)
        if collective == "all_gather":
            return exact, sent
        if block > 1:
            exact = exact + self.owners
        # An owner sends half as many entries again as it got from each worker.
        downlink = k + k // 2
        mean = self.values(np.where(select(exact, downlink), exact, 0).astype(np.float32), block)
        if block > 1:
            return mean, split(sent, exact, mean, downlink, self.owners, self.dtype)
        effective = sent.copy()
        shard = -(-exact.shape[0] // self.n)
        for row in range(exact.shape[0]):
            # The row's owner answers for what rounding the mean took.
            effective[row // shard, row] -= self.n * (exact[row] - mean[row])
        return mean, effective


def split(sent: np.ndarray, exact: np.ndarray, mean: np.ndarray, k: int, owners: np.ndarray, dtype: str) -> np.ndarray:
    """What of each worker's entries counted as sent, ``[N, rows, block]``; the owners' new residual goes into ``owners``.

    An entry that is not among the k of the mean comes back up to the smallest that is; the owner keeps the rest, as the wire's
    dtype has it.
    """
    effective = sent.copy()
    for row in range(exact.shape[0]):
        places = np.sort(np.abs(mean[row][mean[row] != 0]))
        # A row with fewer entries than places has none that found no room: what cancelled is nobody's any more.
        bound = places[-k] if len(places) >= k else np.float32(0)
        returned = np.clip(sent[:, row], -bound, bound) * (mean[row] == 0)
        effective[:, row] = rounded(sent[:, row] - returned, dtype)
        returned = sent[:, row] - effective[:, row]
        owners[row] = exact[row] - mean[row] - returned.sum(axis=0) / np.float32(len(sent))
    return effective
