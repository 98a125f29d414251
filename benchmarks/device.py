"""Everything that a GPU should be asked once, in five minutes: kernels against a copy, and whole exchanges with their launches.

    python benchmarks/device.py --write docs/performance.md
    python benchmarks/device.py --tree 'Few leaves, float32' --calls 2 --no-kernels   # a trial, anywhere

First ``benchmarks/kernels.py`` at 2^25 and 2^27 entries. Then one update of a ResNet-50's tensors by two workers, simulated on
the one device: their encoding, an owner's work for each, and the decoding, without a network. Methods take turns, so that a
noisy machine is noisy for all of them; printed are medians over rounds with their quartiles.
"""

import argparse
import functools
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

import gradcomp_jax as gc
from benchmarks.compiled import model
from benchmarks.compiled.traffic import traffic
from benchmarks.kernels import Round, machine, measure
from benchmarks.pages import write_between
from gradcomp_jax import _markdown
from gradcomp_jax.methods.registry import METHODS

WORKERS, AXIS = 2, "workers"
COMPARED = ("dense", "dense_bf16", "block_quantized", "terngrad", "topk_sgd", "dgc")


def start(method: str, tree: model.Shapes) -> tuple[Round, int]:
    """Returns the update of a method, ready to run with its state donated, and how many kernels its program launches."""
    tx, params = METHODS[method].build(axis_name=AXIS), {name: jnp.zeros(a.shape, a.dtype) for name, a in tree.items()}
    lanes = {"axis_name": AXIS, "axis_size": WORKERS}
    axes = gc.state_axes(jax.eval_shape(lambda p: jax.vmap(tx.init, in_axes=None, out_axes=0, **lanes)(p), params))
    state = jax.jit(jax.vmap(tx.init, in_axes=None, out_axes=axes, **lanes))(params)
    keys = dict(zip(params, jax.random.split(jax.random.key(0), len(params)), strict=True))
    gradients = {name: jax.random.normal(keys[name], (WORKERS, *a.shape), a.dtype) for name, a in params.items()}
    mapped = jax.vmap(lambda g, s: tx.update(g, s, params), (0, axes), (None, axes), axis_name=AXIS)
    update = functools.partial(jax.jit, donate_argnums=1)(mapped).lower(gradients, state).compile()
    held = [state]

    def step() -> object:
        updates, held[0] = update(gradients, held[0])
        return updates

    return Round(step, None), traffic(update.as_text()).launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", choices=model.TREES, default="ResNet-50, float32", help="default: %(default)s")
    parser.add_argument(
        "--calls", type=int, default=20, help="updates that the device gets in a row (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed rounds after one that warms up (default: %(default)s)"
    )
    parser.add_argument("--no-kernels", action="store_true", help="exchanges alone")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a Markdown page with the sections' markers")
    options = parser.parse_args()
    facts, tree = machine(), model.TREES[options.tree]()
    if options.write and facts["platform"] == "cpu":
        parser.error("--write is for an accelerator's section; this is a CPU")
    if not options.no_kernels:
        page = ["--write", str(options.write)] if options.write else []
        sizes = ["--sizes", "2^25,2^27", "--rounds", str(options.rounds), "--calls", str(options.calls), "--no-torch"]
        subprocess.run([sys.executable, Path(__file__).with_name("kernels.py"), *sizes, *page], check=True)
    started = {method: start(method, tree) for method in COMPARED}
    seconds = measure({method: round for method, (round, _) in started.items()}, options.rounds, calls=options.calls)
    rows = []
    for method, values in seconds.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(values, n=4))
        ratio = statistics.median(a / b for a, b in zip(values, seconds["dense"], strict=True))
        launches = started[method][1]
        each = f"{1e3 * middle / launches:.2f}" if launches else "-"
        rows.append((f"`{method}`", f"{middle:.3g} ({low:.3g} .. {high:.3g})", f"{ratio:.2f}", f"{launches:,}", each))
    heads = (f"{options.tree}, {WORKERS} workers", "ms (quartiles)", "x dense", "launches", "µs a launch")
    said = (
        f"*Measured on {facts['device']}, Python {facts['python']}, jax {facts['jax']}; no network."
        f" `python benchmarks/device.py --calls {options.calls} --rounds {options.rounds}`*"
    )
    text = "\n\n".join(["\n".join(_markdown.table(heads, rows, align="lr")), said])
    print(text)
    if options.write:
        write_between(options.write, f"{facts['platform']}-exchanges", text)


if __name__ == "__main__":
    main()
