"""Error of one worker's round trip against bits on the wire, for every compressor.

    python benchmarks/errors.py --markdown docs/results/errors.md --plot docs/results/errors.png

Inputs: normal numbers, heavy-tailed ones, and gradients of the conv net that ``gradcomp train`` trains on digits. Prints
the page, which is also what ``--markdown`` writes. About two minutes on two cores. All is seeded.
"""

import argparse
import dataclasses
import functools
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_plot import PUBLISHED, plot
from error_subjects import CODES, FRACTION_BITS, TASK, Code, gaussian, gradients, heavy_tailed, matrix_shape

from gradcomp_jax import _markdown, kernels
from gradcomp_jax.compressors import Compressor, RowInfo
from gradcomp_jax.experiments import load
from gradcomp_jax.experiments.machine import machine, versions

WARM_UP = 4
"""Steps on the same matrix before the one that counts, for a code with a warm start."""

CAPTION = "*Measured: random matrices, and gradients of the conv net on digits.*"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one code on several tensors: bits on the wire for each value, and normalised mean square error."""

    bits: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def mean_bits(self) -> float:
        return statistics.fmean(self.bits)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.errors)

    @property
    def spread(self) -> float:
        """Standard deviation over the tensors."""
        return statistics.stdev(self.errors) if len(self.errors) > 1 else 0.0


Table = dict[str, dict[str, Measured]]
"""By the code's name, then by the input's."""


@functools.partial(jax.jit, static_argnums=0)
def round_trip(compressor: Compressor, x: jax.Array, key: jax.Array) -> jax.Array:
    """What everybody decodes of one worker's tensor; a code with a state has been through ``WARM_UP`` steps of it."""
    rows, count = kernels.as_rows(x, compressor.block), kernels.valid_counts(x.size, compressor.block)
    own, common = jax.random.split(key)

    def step(state: Any) -> tuple[Any, Any, Any]:
        statistic, side = compressor.statistic(rows, RowInfo(count), state), None
        if compressor.side_information == "max":
            side = jnp.broadcast_to(statistic, count.shape)
        elif compressor.side_information == "mean":
            side = compressor.from_mean(statistic)
        elif compressor.side_information:
            side = compressor.side_of(kernels.row_seeds(common, rows.shape[0]), 0)
        info = RowInfo(count, own, statistic, side)
        payload, state = compressor.encode(rows, state, info)
        return payload, info, state

    state = compressor.init(x.shape)
    for _ in range(WARM_UP if jax.tree.leaves(state) else 0):
        payload, _, state = step(state)
        state = compressor.next_state(state, payload)
    payload, info, _ = step(state)
    return kernels.from_rows(compressor.decode(payload, info), x.shape, x.dtype)


def bits_per_value(compressor: Compressor, size: int) -> float:
    """Payload, with scales, indices and padding, and what the workers agree on."""
    rows = kernels.row_count(size, compressor.block)
    agreed = compressor.statistic_spec(rows)
    besides = 0 if agreed is None else agreed.size * agreed.dtype.itemsize
    return 8 * (compressor.payload_bytes(rows) + besides) / size


def normalised_error(got: np.ndarray, x: np.ndarray) -> float:
    """Squared distance over squared length, summed in float64."""
    exact = np.asarray(x, np.float64)
    return float(np.sum((np.asarray(got, np.float64) - exact) ** 2) / np.sum(exact**2))


def measure(code: Code, tensors: Sequence[np.ndarray]) -> Measured:
    """Every tensor once, each with a key of its own."""
    bits, errors = [], []
    for number, x in enumerate(tensors):
        compressor = code.make(matrix_shape(x.shape))
        bits.append(bits_per_value(compressor, x.size))
        errors.append(normalised_error(np.asarray(round_trip(compressor, x, jax.random.key(number))), x))
    return Measured(tuple(bits), tuple(errors))


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, and no exponent above a thousandth."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded >= 10 ** (digits - 1):
        return f"{rounded:.0f}"
    if rounded >= 1e-3:
        return f"{rounded:#.{digits}g}"
    mantissa, _, exponent = f"{rounded:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def cell(measured: Measured) -> str:
    return f"{number(measured.mean)} ± {number(measured.spread, digits=2)}"


def conclusions(table: Table) -> list[str]:
    """What the figures say, in the figures of this run."""

    def error(name: str, on: str = "Gaussian") -> str:
        return number(table[name][on].mean)

    def bits(name: str, on: str = "Gaussian") -> str:
        return f"{table[name][on].mean_bits:.2f}"

    ternary, whole, bucket = (
        f"ternary, clip {c}, by {g}" for c, g in ((2.5, "tensor"), (None, "tensor"), (None, "bucket"))
    )
    one, two, four = (f"rotated, {b} bits, unbiased" for b in (1, 2, 4))
    top, integers = "topk, 0.01, bfloat16", "block_quantized, 4 bits, {}, stochastic"
    nearest, e3m0 = "block_quantized, 4 bits, max, nearest", "block_quantized, e3m0, nearest"
    int8, eight, mx, nv = (f"block_quantized, {f}" for f in ("8 bits, max, nearest", "mxfp8", "mxfp4", "nvfp4"))
    return [
        f"**For few bits, rotate.** On Gaussian input TernGrad's code (`{ternary}`) has an error of {error(ternary)} at "
        f"{bits(ternary)} bits, where `rotated` has {error(one)} at {bits(one)} and {error(two)} at {bits(two)}. The error of "
        "`rotated` hardly depends on the input: after a rotation every block looks Gaussian. At 4 bits it has "
        f"{error(four)}, unbiased, against {error(integers.format('max'))} for stochastic integers.",
        "**Unbiased costs error, biased needs a residual.** The unbiased scale stretches what the least-squares scale "
        "shrinks, and makes an error of D into D / (1 - D). Over many workers the errors of an unbiased code average "
        "out; the bias of the other does not, so it is for use with error feedback.",
        f"**One norm for each bucket.** Without clipping, one scale for the whole tensor has an error of {error(whole)} on "
        f"Gaussian and {error(whole, 'Student t')} on heavy-tailed input, one for each 2048 entries {error(bucket)} and "
        f"{error(bucket, 'Student t')}: the largest entry grows with the number of entries. Clipping at 2.5 standard "
        f"deviations bounds it ({error(ternary)} and {error(ternary, 'Student t')}) and costs a bias. For integers the largest "
        f"magnitude is the better norm: {error(integers.format('max'))} against {error(integers.format('l2'))} for the l2 norm "
        "at 4 bits, stochastic. Of 256 entries that norm is 16 times their root mean square, so most integers are 0.",
        f"**Powers of two for heavy tails.** Of the same 4 bits, `{e3m0}` has an error of {error(e3m0)} on Gaussian and "
        f"{error(e3m0, 'Student t')} on heavy-tailed input, integers {error(nearest)} and {error(nearest, 'Student t')}: their "
        "steps are right for what is near the largest, those of the powers for what is far below it.",
        f"**Formats of matrix units.** Of those with elements of 4 bits `{nv}` has an error of {error(nv)} on Gaussian and "
        f"{error(nv, 'Student t')} on heavy-tailed input, at {bits(nv)} bits: blocks of 16 entries are more alike than those "
        f"of 256. `{mx}` has {error(mx)} and {error(mx, 'Student t')}: its scales are powers of two, so the largest entry of a "
        "block is 4 to 8 of them, where the largest number is 6. "
        f"`{eight}` has the elements of `float8, e4m3` and, for the same reason, more error, {error(eight)} and "
        f"{error(eight, 'Student t')} against {error('float8, e4m3')} and {error('float8, e4m3', 'Student t')}; int8 has "
        f"{error(int8)} and {error(int8, 'Student t')}.",
        f"**Selections are poor in one step.** The largest hundredth (`{top}`) leaves {error(top)} of Gaussian, "
        f"{error(top, 'Student t')} of heavy-tailed and {error(top, 'gradients')} of the gradients' squared length behind. "
        "They live from error feedback, which sends the rest in later steps. What it makes of any code here is no part "
        "of this table. The cosine transform is no help on these inputs: "
        f"{error('in_frequency(topk), 0.01', 'gradients')} of the gradients stays behind. Rescaled random selections are "
        "unbiased at an error of about block / k - 1.",
        f"**Signs cannot say zero.** On Gaussian input they are as good as a rotated bit ({error('sign, l1')} and "
        f"{error('rotated, 1 bits, biased')}); on gradients, many of which are zero, {error('sign, l1', 'gradients')} and "
        f"{error('rotated, 1 bits, biased', 'gradients')}.",
        f"**int8 values** halve the value of a selected entry and add a scale for each block: `topk, 0.05` takes "
        f"{bits('topk, 0.05, int8')} bits in place of {bits('topk, 0.05, bfloat16')} for the same error; `topk, 0.001`, with "
        "one entry of each block, takes more.",
        f"**Fixed point does not adapt.** Its step and range are the same for every input, here "
        f"{FRACTION_BITS[16]} bits of fraction of 16 (a range of ±8) and {FRACTION_BITS[8]} of 8 (±4), chosen for a root mean "
        "square of 1. What lies beyond saturates: that is nearly all of its error on the heavy-tailed input "
        f"({error('fixed_point, 16 bits, 12 of fraction', 'Student t')} with 16 bits).",
        f"**Low rank is for structure.** In noise there is none (rank 4: {error('low_rank, rank 4')}). One worker's gradient "
        "of a dense layer has no more rank than the batch has examples: "
        f"of the two matrices here {error('low_rank, rank 4', 'gradients')} remains. At these small sizes that takes "
        f"{bits('low_rank, rank 4', 'gradients')} bits a value, on the large matrix {bits('low_rank, rank 4')}.",
    ]


def ternary_expected(clip: float) -> float:
    r"""Error of the ternary code on a Gaussian, :math:`s E[c] - 2 E[|x| c] + 1` with :math:`c = \min(|x|, s)`."""
    inside = statistics.NormalDist().cdf(clip)
    density = statistics.NormalDist().pdf(clip)
    clipped = 2 * (statistics.NormalDist().pdf(0) - density + clip * (1 - inside))
    return clip * clipped - 2 * (1 - 2 * (1 - inside)) + 1


def comparison(table: Table) -> list[str]:
    """Measured beside published."""
    rows = []
    for nominal, published in PUBLISHED.items():
        one = table[f"rotated, {nominal} bits, unbiased"]["Gaussian"]
        rows.append((f"rotated, {nominal} bits, unbiased", f"{one.mean_bits:.3f}", cell(one), published))
    name = "ternary, clip 2.5, by tensor"
    one = table[name]["Gaussian"]
    rows.append((name, f"{one.mean_bits:.3f}", cell(one), f"{ternary_expected(2.5):.2f} (formula)"))
    return _markdown.table(
        ("code, Gaussian input", "bits/value", "measured", "published, or by formula"), rows, align="lr"
    )


def page(
    table: Table,
    *,
    command: str,
    seeds: int,
    side: int,
    steps: Sequence[int],
    tensors: Sequence[np.ndarray],
    image: str,
) -> str:
    """The result page.

    Args:
        table: of all codes on all inputs.
        command: what was run.
        seeds: of inputs, training and rounding.
        side: of the random matrices.
        steps: of training, before the gradients.
        tensors: the gradients.
        image: the picture's path from the page, or nothing.
    """
    shapes = " and ".join("x".join(map(str, shape)) for shape in dict.fromkeys(x.shape for x in tensors))
    zeros = 100 * sum(int(np.sum(x == 0)) for x in tensors) / sum(x.size for x in tensors)
    when = ", ".join(map(str, steps))
    lines = [
        "# Error of one round trip against bits on the wire",
        "",
        f"```\n{command}\n```",
        "",
        "Normalised mean square error, ‖x̂ - x‖² / ‖x‖², of what is decoded of one worker's payload. An error of 1 is that of "
        "sending nothing.",
        "",
        *([f"![Error against bits for each value]({image})", "", CAPTION, ""] if image else []),
    ]
    rows = []
    for name, on in table.items():
        bits = on["Gaussian"].mean_bits
        cells = [f"{bits:.3f}", cell(on["Gaussian"]), number(4**-bits), cell(on["Student t"])]
        cells += [f"{on['gradients'].mean_bits:.3f}", cell(on["gradients"])]
        rows.append((name, *cells))
    heads = ("compressor", "bits/value", "Gaussian", "4^-b", "Student t", "gradients: bits/value", "gradients")
    lines += _markdown.table(heads, rows, align="lr")
    notes = [
        "bits/value: the payload's bytes times 8 over the entries, with scales, indices, the padding of the last block and "
        "what the workers agree on beforehand (the scale of `ternary`, P of `low_rank`). The uplink alone.",
        f"Gaussian: {side} x {side} normal entries. Student t: as many with 3 degrees of freedom, which have a variance but "
        f"no fourth moment. Mean and standard deviation over {seeds} seeds of input and rounding.",
        "4^-b: the rate-distortion bound for Gaussian input at these bits. No code is below it there; inputs with "
        "structure or heavy tails have lower bounds.",
        f"gradients: of the conv net that `gradcomp train` trains on digits, one worker's ({TASK.settings.batch_per_worker} "
        f"examples), after {when} steps of dense training; the largest two matrices, {shapes}, as they are, so bits "
        f"include padding. {zeros:.0f}% of their entries are exactly zero. Mean and standard deviation over the "
        f"{len(tensors)} tensors of {seeds} trainings.",
        f"All inputs are scaled to a root mean square of 1. `low_rank` has had {WARM_UP} steps on the same matrix before.",
    ]
    lines += ["", *(f"- {note}" for note in notes), "", "## What follows", ""]
    lines += [f"- {each}" for each in conclusions(table)]
    lines += ["", "## Measured and published", "", *comparison(table), ""]
    lines += [
        "- published: unbiased DRIVE (1 bit) and EDEN, Vargaftik et al., 2022, <https://arxiv.org/abs/2108.08842>, without the "
        "bits of scales; not measured here.",
        "- formula: for a Gaussian x of unit variance, clipped to c = min(|x|, 2.5), the ternary code's error is "
        "2.5 E[c] - 2 E[|x| c] + 1.",
        "",
        "Machine: " + ", ".join(f"{k} {v}" for k, v in machine().items()) + ".",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in versions().items()) + ".",
        "",
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="of the random matrices (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="of inputs, training and rounding (default: %(default)s)")
    parser.add_argument(
        "--epochs", default="1,7,15", help="after which gradients are taken, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    parser.add_argument("--plot", type=Path, help="where to write the picture")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # As many workers as the experiments have; read when the first array is made.
    flag = f"--xla_force_host_platform_device_count={TASK.settings.workers}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    jax.config.update("jax_platforms", "cpu")
    epochs = sorted({int(epoch) for epoch in options.epochs.split(",")})
    inputs = {
        "Gaussian": gaussian(options.seeds, options.side),
        "Student t": heavy_tailed(options.seeds, options.side),
        "gradients": gradients(options.seeds, epochs),
    }
    table: Table = {}
    for code in CODES:
        table[code.name] = {name: measure(code, tensors) for name, tensors in inputs.items()}
        print(f"{len(table)} of {len(CODES)}: {code.name}", file=sys.stderr)
    image = ""
    if options.plot:
        plot(CODES, table, options.plot)
        image = os.path.relpath(options.plot, options.markdown.parent if options.markdown else ".")
    per_epoch = TASK.settings.steps_per_epoch(len(load(TASK.dataset).train_x))
    text = page(
        table,
        command=shlex.join(["python", *sys.argv]),
        seeds=options.seeds,
        side=options.side,
        steps=[epoch * per_epoch for epoch in epochs],
        tensors=inputs["gradients"],
        image=image,
    )
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
