"""Selections with a memory, written once more in NumPy: error feedback, EF21, and what an owner puts back."""

from collections.abc import Callable

import numpy as np

from tests.methods.oracle import cut, dealt, how_many, rounded, rows_of, select, undealt

Rows = np.ndarray
Tree = dict[str, np.ndarray]
Rule = Callable[[Rows, int], np.ndarray]
"""``rule(rows, step)``: the mask of the chosen entries of one worker."""


def largest(k: int) -> Rule:
    """The k largest magnitudes of each row."""
    return lambda rows, step: select_in_runs(rows, k)


def select_in_runs(rows: Rows, k: int) -> np.ndarray:
    """`select` of a dealt row, of which only the best of each run is looked at where that leaves enough of them."""
    n, block = rows.shape
    run = 16
    while run > 1 and (block % run or (k > 1 and block // run < 16 * k)):
        run //= 2
    if k == 1 or run == 1:
        return select_thinned(rows, k)
    apart = max(a for a in 2 ** np.arange(20) if a == 1 or block % (16 * a * run) == 0)
    runs = cut(rows).reshape(n, -1, run, apart).swapaxes(2, 3)
    best = select(runs.reshape(-1, run), 1).reshape(runs.shape).swapaxes(2, 3).reshape(n, block)
    return select(np.where(best, cut(rows), 0).astype(np.float32), k) & best


def select_thinned(rows: Rows, k: int) -> np.ndarray:
    """`select` of a row that is thinned out to its best entries in each lane and each run first, as long rows are."""
    lanes = 64
    while lanes < 16 * k:
        lanes *= 2
    n, block = rows.shape
    if k == 1 or block <= 2 * lanes or block % lanes:
        return select(rows, k)
    by_lane = cut(rows).reshape(n, -1, lanes).swapaxes(1, 2)
    best = select(by_lane.reshape(n * lanes, -1), 1).reshape(by_lane.shape).swapaxes(1, 2).reshape(n, block)
    best |= select(cut(rows).reshape(n * lanes, -1), 1).reshape(n, block)
    return select(np.where(best, cut(rows), 0).astype(np.float32), k) & best


def coded(rows: Rows, dtype: str) -> Rows:
    """Chosen values, zero elsewhere, as they cross: those narrower than float32 are read off keys of 11 bits or fewer."""
    if dtype == "float32":
        return rows
    if dtype == "bfloat16":
        return rounded(cut(rows), dtype)
    return integers(cut(rows), 127)


def integers(rows: Rows, top: int) -> Rows:
    """Each row to the nearest of ``2 top + 1`` values, the outermost of which is its largest magnitude."""
    unit = np.abs(rows).max(axis=-1, keepdims=True) * np.float32(1 / top)
    return (np.rint(rows / np.where(unit, unit, np.float32(1))) * unit).astype(np.float32)


class Sparse:
    """x = g + e, sent = C(x), e = x - sent, update = mean(sent); or EF21's c = C(g - h), h = h + c, update = mean(h).

    Args:
        shapes: of the gradients; those of one dimension are averaged as they are.
        workers: N.
        block: entries of a row.
        choose: what a worker sends; one rule for each compressed tensor by name, or the same for all.
        wire: what becomes of the chosen values in the payload.
        downlink: what the owner of a row makes of its exact mean; ``None`` where the mean arrives as it is.
        server: whether owners add what ``downlink`` loses to their next mean; else it goes into their own memory, for all N.
        memory: ``residual``, ``estimate`` or ``none``.
        together: all tensors end to end, dealt out; else each tensor by itself.
        dealt: row j of R has entries j, j + R, ... of a tensor; else rows are stretches.
    """

    def __init__(
        self,
        shapes,
        workers,
        block,
        choose,
        wire,
        downlink=None,
        *,
        server=False,
        memory="residual",
        together=False,
        dealt=True,
    ) -> None:
        self.shapes, self.n, self.block, self.memory = shapes, workers, block, memory
        self.choose, self.wire, self.downlink, self.together, self.dealt = choose, wire, downlink, together, dealt
        self.server = server
        self.names = [name for name in sorted(shapes) if len(shapes[name]) > 1]
        self.size = {name: int(np.prod(s)) for name, s in shapes.items()}
        self.steps = 0
        self.kept = np.zeros(
            (workers, *self.join({name: np.zeros(shapes[name]) for name in self.names}).shape), np.float32
        )
        self.total = {name: np.zeros(s, np.float32) for name, s in shapes.items()}
        self.owners = np.zeros(self.kept.shape[1:], np.float32)

    def join(self, tree: Tree) -> Rows:
        if not self.dealt:
            return np.concatenate([rows_of(tree[name], self.block) for name in self.names])
        if self.together:
            flat = np.concatenate([tree[name].reshape(-1) for name in self.names])
            return dealt(flat, self.block, how_many([self.shapes[name] for name in self.names], self.block))
        return np.concatenate([dealt(tree[name], self.block, self.rows(name)) for name in self.names])

    def rows(self, name: str) -> int:
        return how_many([self.shapes[name]], self.block) if self.dealt else -(-self.size[name] // self.block)

    def spans(self) -> dict[str, slice]:
        """Where each tensor's rows are, of tensors that are cut by themselves."""
        ends = np.cumsum([self.rows(name) for name in self.names])
        return {name: slice(end - self.rows(name), end) for name, end in zip(self.names, ends, strict=True)}

    def split(self, rows: Rows) -> Tree:
        if self.together:
            whole, start, flat = undealt(rows, sum(self.size[name] for name in self.names)), 0, {}
            for name in self.names:
                flat[name], start = whole[start : start + self.size[name]], start + self.size[name]
        else:
            flat = {name: rows[span] for name, span in self.spans().items()}
            flat = {
                name: undealt(x, self.size[name]) if self.dealt else x.reshape(-1)[: self.size[name]]
                for name, x in flat.items()
            }
        return {name: x.reshape(self.shapes[name]) for name, x in flat.items()}

    def arranged(self, segments: list[np.ndarray]) -> np.ndarray:
        """Memories ``[workers, rows, block]``, which lie as tensors do, as rows of this oracle."""
        if self.together:
            sizes = np.cumsum([self.size[name] for name in self.names])
            parts = np.split(segments[0].reshape(self.n, -1), sizes, axis=1)[:-1]
        else:
            parts = [p.reshape(self.n, -1)[:, : self.size[name]] for name, p in zip(self.names, segments, strict=True)]
        trees = [dict(zip(self.names, worker, strict=True)) for worker in zip(*parts, strict=True)]
        return np.stack([self.join(tree) for tree in trees])

    def step(self, gradients: Tree) -> Tree:
        g = np.stack([self.join({name: gradients[name][i] for name in self.names}) for i in range(self.n)])
        target = {"residual": g + self.kept, "estimate": g - self.kept, "none": g}[self.memory]
        sent = np.stack([self.wire(np.where(self.chosen(t), t, 0).astype(np.float32)) for t in target])
        mean, counted = self.exchange(sent)
        if self.memory == "residual":
            self.kept = target - counted
        elif self.memory == "estimate":
            self.kept = self.kept + counted
        self.steps += 1
        delivered = self.split(mean)
        if self.memory == "estimate":
            self.total = {name: self.total[name] + delivered[name] for name in self.names}
            delivered = self.total
        dense = {name: gradients[name].mean(axis=0) for name in self.shapes if name not in self.names}
        return delivered | dense

    def chosen(self, target: Rows) -> np.ndarray:
        if not isinstance(self.choose, dict):
            return self.choose(target, self.steps)
        return np.concatenate([self.choose[name](target[span], self.steps) for name, span in self.spans().items()])

    def exchange(self, sent: np.ndarray) -> tuple[Rows, np.ndarray]:
        """The mean that everybody gets, and what of each worker's payload counts as sent."""
        exact = sent[0]
        for other in sent[1:]:
            exact = exact + other
        exact = exact / np.float32(self.n)
        if self.downlink is None:
            return exact, sent
        if self.server:
            exact = exact + self.owners
            mean = self.downlink(exact, self.steps)
            self.owners = exact - mean
            return mean, sent
        mean, counted = self.downlink(exact, self.steps), sent.copy()
        shard = -(-exact.shape[0] // self.n)
        for row in range(exact.shape[0]):
            # Encoding the mean took this from all N; its owner answers for it.
            counted[row // shard, row] -= self.n * (exact[row] - mean[row])
        return mean, counted
