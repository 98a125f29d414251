"""What gathering parameters in few bits costs in loss: fully sharded training on eight simulated devices.

    python benchmarks/fsdp.py --bytes --page docs/fsdp.md
    python benchmarks/fsdp.py --page docs/fsdp.md

A multi-layer perceptron of 300 thousand parameters on the digits, or ``--data fashion-mnist``, with Adam. Every device has an
eighth of every matrix. Bytes are read from the compiled step. Some minutes on two idle cores; prints a table in Markdown.
"""

import argparse
import functools
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKERS, AXIS, BLOCK = 8, "data", 512
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={WORKERS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import gradcomp_jax as gc  # noqa: E402
from benchmarks.pages import write_between  # noqa: E402
from benchmarks.tasks import datasets, images  # noqa: E402
from gradcomp_jax import _markdown  # noqa: E402
from gradcomp_jax.experiments.machine import machine, versions  # noqa: E402
from gradcomp_jax.experiments.problem import Problem, classification  # noqa: E402
from gradcomp_jax.experiments.settings import Settings  # noqa: E402


def ways(block: int) -> dict[tuple[str, str], Any]:
    """By how parameters and gradients cross: a compressor, whether of differences, and the exchange of gradients."""

    def integers(bits: int) -> Any:
        return gc.compressors.block_quantized(bits=bits, block=block)

    def dense(dtype: Any) -> Any:
        return functools.partial(gc.dense, axis_name=AXIS, dtype=dtype)

    def quantized(bits: int) -> Any:
        return functools.partial(gc.block_quantized, axis_name=AXIS, bits=bits, block=block)

    three_bits = functools.partial(gc.eden, axis_name=AXIS, bits=3, block=block, error_feedback=True)
    return {
        ("float32", "float32"): (gc.compressors.dense(), False, dense(jnp.float32)),
        ("bfloat16", "bfloat16"): (gc.compressors.dense(jnp.bfloat16), False, dense(jnp.bfloat16)),
        ("int8", "int8"): (integers(8), False, quantized(8)),
        ("int4", "bfloat16"): (integers(4), False, dense(jnp.bfloat16)),
        ("int4", "int4"): (integers(4), False, quantized(4)),
        ("int4 differences", "bfloat16"): (integers(4), True, dense(jnp.bfloat16)),
        ("int4 differences", "int4"): (integers(4), True, quantized(4)),
        ("int4 differences", "EDEN, 3 bits"): (integers(4), True, three_bits),
        ("int2 differences", "int4"): (integers(2), True, quantized(4)),
    }


class Run:
    """One way to train: its step, compiled, and the bytes that a device sends in it."""

    def __init__(self, params: Any, loss: Any, batch: Any, compressor: Any, differences: bool, exchange: Any) -> None:
        self.mesh = jax.make_mesh((WORKERS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self.specs = jax.tree.map(lambda p: P(AXIS) if p.ndim > 1 else P(), params)
        self.tx = optax.chain(exchange(collective=gc.collectives.ReduceScatter(self.specs)), optax.adam(1e-3))
        self.copy = "float32" if differences else None
        self.start(params)
        step = gc.make_train_step(loss, self.tx, self.mesh, param_specs=self.specs, param_compressor=compressor)
        self.compiled = step.lower(self.state, self._placed(batch)).compile()
        self.sent = gc.wire_bytes(self.compiled).sent

    def start(self, params: Any) -> None:
        """Begins anew."""
        self.state = gc.init_state(params, self.tx, self.mesh, param_specs=self.specs, param_copy=self.copy)

    def step(self, batch: Any) -> float:
        self.state, metrics = self.compiled(self.state, self._placed(batch))
        # One step at a time: XLA's collectives between CPU devices starve when many are in flight.
        return float(metrics["loss"])

    def _placed(self, batch: Any) -> Any:
        return jax.device_put(batch, gc.data_sharding(self.mesh))


def train(run: Run, problem: Problem, data: Any, seed: int) -> tuple[float, float, float]:
    """The loss of the last epoch's steps, and test loss and accuracy in percent of the owners' parameters."""
    run.start(problem.init(seed))
    losses: list[float] = []
    for epoch in range(problem.settings.epochs):
        losses = [run.step(batch) for batch in problem.batches(problem.settings, seed, epoch)]
    params = jax.device_get(run.state.params)
    return (
        statistics.fmean(losses),
        float(problem.loss(params, (data.test_x, data.test_y))),
        100 * problem.evaluate(params),
    )


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def show(page: Path | None, name: str, header: Any, cells: Any, said: str) -> None:
    """Prints a table, and puts it between the page's markers."""
    here, installed = machine(), versions()
    where = f"{here['cores']} cores of {here['processor']}, Python {installed['python']}, jax {installed['jax']}"
    lines = [
        *_markdown.table(header, cells, align="llr"),
        "",
        f"`python {shlex.join(sys.argv)}`: {said}; {where}.",
    ]
    print("\n".join(lines))
    if page:
        write_between(page, name, "\n".join(lines))


def show_bytes(page: Path | None) -> None:
    """What a device sends in a step of two large matrices, in blocks of 2,048."""
    params = {"up": jnp.zeros((1024, 4096)), "down": jnp.zeros((4096, 1024))}
    values = sum(p.size for p in params.values())

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["up"] @ params["down"]) ** 2)

    sent = {names: Run(params, loss, jnp.zeros((WORKERS, 1024)), *way).sent for names, way in ways(2048).items()}
    once = sent["bfloat16", "bfloat16"]
    cells = [
        (
            *names,
            f"{n:,}",
            f"{8 * n / values * WORKERS / (WORKERS - 1):.2f}",
            f"{n / once:.4f}",
            f"{n / once / 1.5:.4f}",
        )
        for names, n in sent.items()
    ]
    header = ("parameters", "gradients", "bytes/step", "bits a parameter", "of bfloat16", "of bfloat16, gathered twice")
    said = f"{values:,} parameters, {WORKERS} devices, blocks of 2,048; bytes of the compiled step"
    show(page, "bytes", header, cells, said)


def show_losses(options: argparse.Namespace) -> None:
    """What training comes to."""
    data = datasets.load(options.data)
    settings = Settings(epochs=options.epochs, batch_per_worker=8, learning_rate=1e-3, clip_norm=None, warm_up_epochs=0)
    problem = classification(images.mlp(data.train_x.shape[1:], (512, 512)), data, settings)
    params, batch, found = problem.init(0), next(iter(problem.batches(settings, 0, 0))), {}
    for names, way in ways(BLOCK).items():
        run = Run(params, problem.loss, batch, *way)
        found[names] = run.sent, [train(run, problem, data, seed) for seed in range(options.seeds)]
        print(names, found[names], file=sys.stderr, flush=True)
    cells, dense_sent, exact = [], found["bfloat16", "bfloat16"][0], found["float32", "float32"][1]
    for names, (sent, runs) in found.items():
        # Seed by seed: the same start and the same batches.
        more = [tuple(x - y for x, y in zip(run, same, strict=True)) for run, same in zip(runs, exact, strict=True)]
        columns = zip(*runs, strict=True), zip(*more, strict=True)
        (loss, test, right), (more_loss, more_test, _) = (list(of) for of in columns)
        shown = (spread(loss, 4), spread(more_loss, 4), spread(test, 4), spread(more_test, 4), spread(right, 2))
        cells.append((*names, f"{sent:,}", f"{sent / dense_sent:.3f}", *shown))
    against = "more than float32"
    header = ("parameters", "gradients", "bytes/step", "of bfloat16", "loss", against, "test loss", against, "test %")
    steps = options.epochs * problem.steps_per_epoch(settings)
    said = (
        f"{options.data}, {steps:,} steps of {WORKERS} x 8 examples, blocks of {BLOCK}, mean and standard deviation of"
        f" {options.seeds} seeds"
    )
    show(options.page, options.data, header, cells, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="only the bytes of a step of large matrices")
    parser.add_argument("--data", choices=("digits", "fashion-mnist"), default="digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="write the table between its markers")
    options = parser.parse_args()
    if options.bytes:
        show_bytes(options.page)
    else:
        show_losses(options)


if __name__ == "__main__":
    main()
