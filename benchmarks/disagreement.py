"""Training where workers disagree: each has the examples of some classes only.

    python benchmarks/disagreement.py --json docs/results/disagreement.json --markdown docs/results/disagreement.md

Selections by every collective, on the digits (8 workers) and on Fashion-MNIST (8 and 16), split by label, and once more
with the same examples dealt out at random. Every cell is trained under ``vmap`` on one device with the
hyper-parameters of its data set. Cells that the JSON file has are not trained again. About two hours on two cores;
``--only digits`` takes some minutes.
"""

import argparse
import dataclasses
import functools
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gradcomp_jax as gc
from benchmarks.tasks import datasets
from benchmarks.tasks.tasks import NETWORKS, task
from gradcomp_jax import _markdown
from gradcomp_jax.experiments import models
from gradcomp_jax.experiments.machine import machine, versions

AXIS = "data"
PUT_BACK = gc.collectives.TwoPhase("put_back")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained: a data set, its split, workers, density, steps, and examples of a step that a worker sees."""

    dataset: str
    split: str
    workers: int
    density: float
    steps: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.dataset}, {self.workers} workers, split {'by label' if self.split == 'label' else 'at random'}"


CELLS = [
    Cell(dataset, split, workers, density, steps, batch)
    for dataset, workers, density, steps, batch in (
        ("digits", 8, 0.002, 800, 8),
        ("fashion-mnist", 8, 0.001, 3000, 16),
        ("fashion-mnist", 16, 0.001, 3000, 8),
    )
    for split in ("label", "random")
]


def methods(cell: Cell) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Every method, the optimizer behind it included."""
    settings = task(cell.dataset).settings
    rate, momentum = settings.learning_rate, settings.momentum
    topk = functools.partial(gc.topk_sgd, axis_name=AXIS, density=cell.density)
    dgc = functools.partial(
        gc.dgc, axis_name=AXIS, density=cell.density, momentum=momentum, clip_norm=settings.clip_norm
    )
    heavy_ball = functools.partial(optax.sgd, rate, momentum)
    as_many = (
        {}
        if cell.density * 1024 < 2
        else {
            "top-k, equal downlink": optax.chain(topk(downlink_density=cell.density), heavy_ball()),
            "DGC, equal downlink": optax.chain(dgc(downlink_density=cell.density), optax.sgd(rate)),
        }
    )
    return {
        "dense": optax.chain(gc.dense(axis_name=AXIS), heavy_ball()),
        "top-k, gather": optax.chain(topk(collective="all_gather"), heavy_ball()),
        "top-k, put back": optax.chain(topk(collective=PUT_BACK, downlink_density=cell.density), heavy_ball()),
        "top-k, default": optax.chain(topk(), heavy_ball()),
        "DGC, gather": optax.chain(dgc(collective="all_gather"), optax.sgd(rate)),
        "DGC, put back": optax.chain(dgc(collective=PUT_BACK, downlink_density=cell.density), optax.sgd(rate)),
        "DGC, default": optax.chain(dgc(), optax.sgd(rate)),
        **as_many,
    }


def shards(cell: Cell) -> tuple[jax.Array, jax.Array]:
    """Each worker's examples: images ``[N, n, ...]`` and labels ``[N, n]``."""
    data = datasets.load(cell.dataset)
    count = len(data.train_x) // cell.workers * cell.workers
    order = np.argsort(data.train_y, kind="stable")
    if cell.split == "random":
        order = np.random.default_rng(0).permutation(len(order))
    x, y = data.train_x[order[:count]], data.train_y[order[:count]]
    return jnp.asarray(x.reshape(cell.workers, -1, *x.shape[1:])), jnp.asarray(y.reshape(cell.workers, -1))


def trainer(cell: Cell, tx: optax.GradientTransformationExtraArgs) -> Any:
    """A compiled function of the seed: accuracy in percent, and the rms of the workers' memories and of the owners'."""
    network, data, (images, labels) = NETWORKS[cell.dataset], datasets.load(cell.dataset), shards(cell)

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return models.cross_entropy(network.apply(params, batch[0]), batch[1])

    def worker(seed: jax.Array, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        params = network.init(jax.random.key(seed))
        mine = jax.random.fold_in(jax.random.key(seed), 1 + jax.lax.axis_index(AXIS))

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            chosen = jax.random.randint(jax.random.fold_in(mine, number), (cell.batch,), 0, len(y))
            gradient = jax.grad(loss)(params, (x[chosen], y[chosen]))
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(cell.steps))
        return params, state

    @jax.jit
    def run(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        params, state = jax.vmap(functools.partial(worker, seed), axis_name=AXIS)(images, labels)
        first = jax.tree.map(lambda leaf: leaf[0], params)
        right = jnp.argmax(network.apply(first, jnp.asarray(data.test_x)), -1) == jnp.asarray(data.test_y)
        return 100 * right.astype(jnp.float32).mean(), *memories(state)

    return run


def memories(state: Any) -> tuple[jax.Array, jax.Array]:
    """Root mean squares of what workers and owners hold of the compressed tensors."""

    def rms(arrays: list[jax.Array]) -> jax.Array:
        size = sum(a.size for a in arrays)
        return jnp.sqrt(sum(jnp.sum(a**2) for a in arrays) / size) if size else jnp.float32(0)

    def is_exchange(node: Any) -> bool:
        return isinstance(node, gc.transforms.ExchangeState)

    found = [node for node in jax.tree.leaves(state, is_leaf=is_exchange) if is_exchange(node)]
    compressed = jax.tree.leaves(found[0].memory[0], is_leaf=lambda n: isinstance(n, gc.memory.Momentum))
    kept = [getattr(m, "accumulated", m) for m in compressed]
    return rms(jax.tree.leaves(kept)), rms(jax.tree.leaves(found[0].server))


def report(results: dict[str, list[list[float]]], command: str) -> str:
    """The page in Markdown."""
    here, installed = machine(), versions()
    lines = [
        "# Selections where workers disagree",
        "",
        "Measured: every worker has the examples of some classes only, and the gradients of one cancel those of another.",
        "Accuracy on the test set in percent, mean and standard deviation over the seeds; root mean square of what workers",
        "hold back of the compressed tensors, and of what the owners of the two-phase exchange do. `put back` is the",
        "two-phase exchange in which owners send as many entries as a worker does, and workers take back all others;",
        "`equal downlink` is the default with as many downlink entries as a worker sends, where that is not the default.",
        "",
    ]
    for cell in CELLS:
        rows = {name: results.get(key(cell, name)) for name in methods(cell)}
        if not any(rows.values()):
            continue
        counts = sorted({len(runs) for runs in rows.values() if runs})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        lines += [
            f"## {cell.name}",
            "",
            f"Density {cell.density:g}, {cell.steps:,} steps of {cell.workers} x {cell.batch} examples, {seeds} seeds.",
            "",
        ]
        cells = []
        for name, runs in rows.items():
            if runs:
                accuracy, kept, owned = zip(*runs, strict=True)
                spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
                held = [f"{statistics.fmean(x):.3g}" if any(x) else "-" for x in (kept, owned)]
                cells.append((name, f"{statistics.fmean(accuracy):.2f} ± {spread:.2f}", *held))
        lines += [*_markdown.table(("method", "accuracy %", "workers' rms", "owners' rms"), cells, align="lr"), ""]
    lines += [
        f"`{command}`, {here['cores']} cores of {here['processor']}, Python {installed['python']}, jax {installed['jax']}.",
        "",
    ]
    return "\n".join(lines)


def key(cell: Cell, method: str) -> str:
    return f"{cell.name}, {cell.steps} steps, {method}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--json", type=Path, help="results so far, and new ones")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    results: dict[str, list[list[float]]] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    for cell in (c for c in CELLS if options.only in c.name):
        for name, tx in methods(cell).items():
            runs = results.setdefault(key(cell, name), [])
            run = trainer(cell, tx) if len(runs) < options.seeds else None
            for seed in range(len(runs), options.seeds):
                runs.append([float(x) for x in run(jnp.int32(seed))])
                print(f"{key(cell, name)}, seed {seed}: {runs[-1]}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")
    page = report(results, "python " + shlex.join(sys.argv))
    print(page)
    if options.markdown:
        options.markdown.write_text(page)


if __name__ == "__main__":
    main()
