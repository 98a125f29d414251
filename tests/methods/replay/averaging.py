"""The exchange once more, slowly: who sends what, who averages what, and what stays where. NumPy and float64.

What comes from the library is layout only: which entries make a row, which rows a worker owns, whose key draws what.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import kernels
from gradcomp_jax.kernels.packing import packed_length, plane_starts
from gradcomp_jax.kernels.random import uniform_of_planes

Tree = dict[str, np.ndarray]
_LAST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one tensor is cut into rows of ``block`` entries; ``block`` 0 makes a row of each column."""

    shape: tuple[int, ...]
    block: int

    @property
    def width(self) -> int:
        return self.block or int(np.prod(self.shape[:-1]))

    @property
    def rows(self) -> int:
        return -(-int(np.prod(self.shape)) // self.width)

    def cut(self, x: np.ndarray) -> np.ndarray:
        flat = (x if self.block else np.moveaxis(x, -1, 0)).reshape(-1).astype(np.float64)
        return np.pad(flat, (0, self.rows * self.width - flat.size)).reshape(self.rows, self.width)

    def join(self, rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1)[: int(np.prod(self.shape))]
        if self.block:
            return flat.reshape(self.shape)
        return np.moveaxis(flat.reshape(self.shape[-1], *self.shape[:-1]), 0, -1)


class Draws:
    """Random numbers of one group: a worker's own, by (axis index, leaf, step), and of the owners' downlink."""

    def __init__(self, draws: str | None, bits: int, leaves, group: int, workers: int, *, in_turn: bool, seed=0):
        self.draws, self.bits = draws, bits
        block = leaves[0][1].width
        total = sum(layout.rows for _, layout in leaves)
        shard = -(-total // workers)
        base = jax.random.key(seed)

        def key(stream: Any, leaf: int, step: Any) -> Any:
            return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, stream), leaf), step)

        def at(step: Any) -> tuple[Any, Any]:
            if draws == "turns":
                seeds = jnp.concatenate([kernels.row_seeds(key(_LAST, i, step), segment.rows) for i, segment in leaves])
                own = [self.turns(kernels.fold_seeds(seeds, w), block) for w in range(workers)]
                return jnp.stack(own), self.turns(jnp.pad(seeds, (0, shard * workers - total)), block)
            own = [[self.draw(key(w, i, step), segment.rows, block) for i, segment in leaves] for w in range(workers)]
            downlink = [self.draw(key(w, _LAST - group, step), shard, block) for w in range(workers)]
            # Owners with a residual take rows in turn, others as many as follow one another.
            by_row = (
                jnp.stack(downlink, axis=1).reshape(-1, *downlink[0].shape[1:])
                if in_turn
                else jnp.concatenate(downlink)
            )
            return jnp.stack([jnp.concatenate(o) for o in own]), by_row

        self.at = (lambda step: (None, None)) if draws is None else jax.jit(at)

    @staticmethod
    def turns(seeds: Any, block: int) -> Any:
        """The signs of three rotations, and the tangents of their planes' half angles, side by side."""
        of = [seeds, *(kernels.fold_seeds(seeds, number) for number in (_LAST, _LAST - 2))]
        signs = [1.0 - 2.0 * (kernels.seeded_bits(s, block) >> 31).astype(jnp.float32) for s in of]
        bits = [kernels.seeded_bits(kernels.fold_seeds(s, _LAST - 1), block // 2) >> 8 for s in of]
        tangents = [b.astype(jnp.int32).astype(jnp.float32) / 2**23 - 1 for b in bits]
        return jnp.concatenate([*signs, *tangents], axis=1)

    def draw(self, key: Any, rows: int, block: int) -> Any:
        if self.draws == "coin":
            return kernels.hash_bits(key, (rows, block)) >> 31
        if self.draws == "threefry":
            return jax.random.uniform(key, (rows, block), jnp.float32)
        if self.draws == "uniform":
            return kernels.uniform(key, (rows, block))
        base = 2**self.bits
        starts, width = plane_starts(block, base, 8), packed_length(block, base, 8)
        return uniform_of_planes(key, rows, block, starts, width)


@dataclasses.dataclass
class Kept:
    """Attributes: ``workers`` ``[N, rows, block]``, what each holds back; ``owners``, what the owners do."""

    workers: np.ndarray
    owners: np.ndarray


class Group:
    """The tensors that go through one code together."""

    def __init__(self, code, leaves, group, workers, *, collective, remainder, memory):
        self.code, self.leaves, self.n = code, leaves, workers
        self.collective, self.remainder, self.memory = collective, remainder, memory
        self.layouts = [layout for _, _, layout in leaves]
        self.block, self.rows = self.layouts[0].width, sum(layout.rows for layout in self.layouts)
        self.shard = -(-self.rows // workers)
        self.valid = self.stack([np.ones(layout.shape) for layout in self.layouts]) > 0
        numbered = [(number, layout) for number, _, layout in leaves]
        self.draws = Draws(
            code.draws, getattr(code, "bits", 0), numbered, group, workers, in_turn=remainder == "server"
        )

    def stack(self, tensors: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([layout.cut(t) for layout, t in zip(self.layouts, tensors, strict=True)])

    def start(self) -> Kept:
        return Kept(np.zeros((self.n, self.rows, self.block)), np.zeros((self.shard * self.n, self.block)))

    def segments(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows ``[..., rows, block]`` of each tensor."""
        return np.split(rows, np.cumsum([layout.rows for layout in self.layouts])[:-1], axis=-2)

    def step(self, gradients: Tree, kept: Kept, drawn: tuple) -> tuple[Tree, Kept, Tree]:
        """The update, what is kept now, and which entries are in rows where every decision was clear."""
        own, downlink = drawn
        local = np.stack([self.stack([gradients[name][i] for _, name, _ in self.leaves]) for i in range(self.n)])
        target = local + kept.workers if self.memory else local
        encoded = [self.code(target[i], self.valid, None if own is None else own[i]) for i in range(self.n)]
        sent, decided = np.stack([s for s, _ in encoded]), np.all([ok for _, ok in encoded], axis=0)
        mean, owners = sent.mean(axis=0), kept.owners
        if self.collective == "two_phase":
            # Rows that fill up the owners' shards, as many for each.
            padding = [(0, self.shard * self.n - self.rows), (0, 0)]
            exact = np.pad(mean, padding) + owners
            decoded, ok = self.code(exact, np.pad(self.valid, padding), downlink)
            decided, mean = decided & ok[: self.rows], decoded[: self.rows]
            if self.remainder == "server":
                owners = exact - decoded
            if self.remainder == "put_back":
                # What rounding took is the owner's, for all N.
                for row in range(self.rows):
                    sent[row // self.shard, row] -= self.n * (exact[row] - mean[row])
        workers = target - sent if self.memory else kept.workers
        return self.tree(mean), Kept(workers, owners), self.tree(np.broadcast_to(decided[:, None], mean.shape))

    def tree(self, rows: np.ndarray) -> Tree:
        segments = zip(self.leaves, self.segments(rows), strict=True)
        return {name: layout.join(segment) for (_, name, layout), segment in segments}


class Averaging:
    """All tensors: those of two or more dimensions through ``code``, the others as their exact mean."""

    def __init__(self, code, shapes, workers, *, block, collective, remainder=None, memory=False):
        self.shapes, self.n = shapes, workers
        by_width: dict[int, list] = {}
        for number, name in enumerate(sorted(shapes)):
            if len(shapes[name]) > 1:
                layout = Layout(shapes[name], block)
                by_width.setdefault(layout.width, []).append((number, name, layout))
        options = {"collective": collective, "remainder": remainder, "memory": memory}
        self.groups = [Group(code, leaves, i, workers, **options) for i, leaves in enumerate(by_width.values())]
        self.kept = [group.start() for group in self.groups]

    def draws(self, step: int) -> list[tuple]:
        """Of one step, for all gradients that are tried."""
        return [jax.tree.map(np.asarray, group.draws.at(np.int32(step))) for group in self.groups]

    def step(self, gradients: Tree, draws: list[tuple]) -> tuple[Tree, list[Kept], Tree]:
        """The averaged update, the memory after it (not taken over yet), and where every decision was clear."""
        update = {k: g.astype(np.float64).mean(axis=0) for k, g in gradients.items()}
        decided = {k: np.ones(s, bool) for k, s in self.shapes.items()}
        after = []
        for group, kept, drawn in zip(self.groups, self.kept, draws, strict=True):
            mean, new, clear = group.step(gradients, kept, drawn)
            update |= mean
            decided |= clear
            after.append(new)
        return update, after, decided
