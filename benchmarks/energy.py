"""How much of the energy that an exact selection would send a selection of blocks sends, of tensors with structure.

    python benchmarks/energy.py --markdown docs/results/energy.md

The squares of what one step without a memory sends, over the squares of as many of a tensor's largest entries: of blocks that
are stretches of the tensor (``view="rows"``) and of blocks that it is dealt out over, the default. Then of single blocks, of
which as many entries are chosen as the methods choose of theirs. Seeded; about a minute on two cores.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp_jax as gc
from gradcomp_jax import _markdown, kernels
from gradcomp_jax.experiments.machine import machine, versions
from gradcomp_jax.kernels import dealt_on_tpu, dealt_selection

DENSITIES = (0.001, 0.01)
BLOCKS = ((1024, 4), (1024, 10), (4096, 32), (4096, 64), (4096, 128))


def tensors() -> dict[str, np.ndarray]:
    """All else is a thousandth of what stands out."""
    rng = np.random.default_rng(0)

    def quiet(*shape: int) -> np.ndarray:
        return 1e-3 * rng.standard_normal(shape)

    def rows(shape: tuple[int, int], hot: int) -> np.ndarray:
        x = quiet(*shape)
        x[rng.choice(shape[0], hot, replace=False)] += rng.standard_normal((hot, shape[1]))
        return x

    def columns(shape: tuple[int, int], chosen: np.ndarray | slice) -> np.ndarray:
        x = quiet(*shape)
        x[:, chosen] += rng.standard_normal(x[:, chosen].shape)
        return x

    head = quiet(256, 16, 256)
    head[:, 5] += rng.standard_normal((256, 256))
    kernel = quiet(3, 3, 256, 256)
    kernel[1, 1] += rng.standard_normal((256, 256))
    return {
        "embedding, 256 hot rows of 32768": rows((32768, 256), 256),
        "embedding, rows by Zipf's law": rng.standard_normal((32768, 256)) / (1 + rng.permutation(32768))[:, None],
        "32 hot rows of 4096": rows((4096, 1024), 32),
        "8 hot columns of 1024, neighbours": columns((4096, 1024), slice(8)),
        "8 hot columns of 1024, anywhere": columns((4096, 1024), rng.choice(1024, 8, replace=False)),
        "every 64th entry": columns((4096 * 16, 64), slice(5, 6)).reshape(4096, 1024),
        "one head of 16": head,
        "the centre of 3 x 3 kernels": kernel,
        "lognormal": np.exp(rng.standard_normal((4096, 1024))) * rng.choice([-1.0, 1.0], (4096, 1024)),
        "normal": rng.standard_normal((4096, 1024)),
        "3 hot rows of 301, 333 wide": rows((301, 333), 3),
        "one hot row of 64, 64 wide": rows((64, 64), 1),
    }


def blocks(block: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    side = round(block**0.5)

    def quiet() -> np.ndarray:
        return 1e-3 * rng.standard_normal((256, block))

    strided, row = quiet(), quiet()
    strided[:, 5::64] += rng.standard_normal((256, block // 64))
    row[:, block // 2 : block // 2 + block // 16] += rng.standard_normal((256, block // 16))
    falling = np.outer(1 / (1 + np.arange(side)), 1 / (1 + np.arange(block // side))).reshape(-1)
    return {
        "every 64th entry": strided,
        "one hot row": row,
        "frequencies of a smooth chunk": rng.standard_normal((256, block)) * falling,
        "normal": rng.standard_normal((256, block)),
    }


def energy_in(x: np.ndarray, density: float, view: str | None) -> float:
    """What an exchange sends of a tensor."""
    code = gc.compressors.topk(density, block=1024, dtype="float32")
    tx = gc.exchange(code, axis_name=None, view=view, mask=True)
    gradient = jnp.asarray(x, jnp.float32)
    sent = np.asarray(jax.jit(tx.update)(gradient, tx.init(gradient))[0], np.float64)
    best = np.sort(np.square(x.reshape(-1)))[-max(1, round(density * x.size)) :]
    return float(np.square(sent).sum() / best.sum())


def energy_by_kernels(x: np.ndarray, density: float) -> float | None:
    """What the kernels for TPU find of ten entries of a block or so: the best of each run of lines are candidates.

    ``None`` for a tensor that they do not serve. ``tests/kernels/test_dealt_on_tpu.py`` compares them with the same runs.
    """
    block, flat = 1024, np.abs(x.reshape(-1))
    deal = kernels.Deal(x.size, block, kernels.dealt_rows(x.size, block, kernels.periods_of(x.shape)))
    k = max(1, round(density * block))
    if x.size % block or deal.rows < 1024:
        return None
    run, apart = dealt_selection._run_on_tpu(deal, k)
    rows = math.prod(dealt_on_tpu._tiles(x.size // block, block, 2, run * apart * deal.rows))
    place = np.arange(x.size)
    found = np.zeros((-(-x.size // (rows * block)), apart, deal.rows))
    np.maximum.at(found, (place // (rows * block), place // deal.rows % apart, place % deal.rows), flat)
    sent = np.sort(found.reshape(-1, deal.rows), axis=0)[-k:]
    best = np.sort(np.square(flat))[-max(1, round(density * x.size)) :]
    return float(np.square(sent).sum() / best.sum())


def energy_of_blocks(x: np.ndarray, k: int) -> float:
    """What a selection of a block finds."""
    index = np.asarray(kernels.top_of_rows(jnp.asarray(x, jnp.float32), k))
    return float(np.square(np.take_along_axis(x, index, 1)).sum() / np.sort(np.square(x), axis=1)[:, -k:].sum())


def page(command: str) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in (machine() | versions()).items())
    lines = ["# Energy of a selection", "", f"`{command}`", "", f"{facts}.", ""]
    lines += [
        "Squares of what is sent over squares of as many of the tensor's largest entries; one step, no memory.",
        "",
    ]
    heads = [f"{view}, {density:g}" for density in DENSITIES for view in ("stretches", "dealt")]
    rows: list[tuple[str, ...]] = []
    for name, x in tensors().items():
        parts = [energy_in(x, density, view) for density in DENSITIES for view in ("rows", None)]
        on_tpu = energy_by_kernels(x, 0.01)
        last = "-" if on_tpu is None else f"{on_tpu:.3f}"
        rows.append((name, " x ".join(map(str, x.shape)), *(f"{s:.3f}" for s in parts), last))
    lines += _markdown.table(("tensor", "shape", *heads, "dealt, 0.01, by kernels of TPU"), rows, align="llr")
    lines += ["", "Within a block, k of its entries over its k largest:", ""]
    table = {block: blocks(block) for block, _ in BLOCKS}
    rows = [(name, *(f"{energy_of_blocks(table[b][name], k):.3f}" for b, k in BLOCKS)) for name in table[1024]]
    lines += _markdown.table(("block", *(f"{k} of {block}" for block, k in BLOCKS)), rows, align="lr")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file to write as well")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    text = page(shlex.join(["python", *sys.argv]))
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
