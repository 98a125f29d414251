"""Published methods that were tried by the protocol, and are not in the package."""

import optax

from benchmarks.adamw.rivals.des_loc import des_loc
from benchmarks.adamw.rivals.dion2 import dion2
from benchmarks.adamw.rivals.ef21_muon import ef21_muon
from benchmarks.adamw.rivals.noloco import noloco
from benchmarks.adamw.rows import AXIS, RATES, Row

OF_MUON = tuple(5 * rate for rate in RATES)
"""Of the matrices of hidden layers; embeddings and vectors have ``RATES``."""

RIVALS: dict[str, Row] = {
    **{
        f"Dion2, 1/{part} of the rows": Row(
            lambda rate, steps, part=part: dion2(rate, axis_name=AXIS, fraction=1 / part), OF_MUON
        )
        for part in (4, 8)
    },
    "EF21-Muon, top-k 0.029, two phases": Row(
        lambda rate, steps: ef21_muon(rate, axis_name=AXIS, density=0.029, collective="two_phase"), OF_MUON
    ),
    "DES-LOC every 72": Row(
        lambda rate, steps: des_loc(rate, axis_name=AXIS, every=72),
        replicas=True,
        every=72,
        branches=(1 - 1 / 72, 1 / 72 - 1 / 216, 1 / 216 - 1 / 432, 1 / 432),
    ),
    "NoLoCo every 54": Row(
        lambda rate, steps: optax.chain(optax.adamw(rate), noloco(axis_name=AXIS, every=54)), replicas=True, every=54
    ),
}
"""Each has about the bytes of a row of the package, but for the 1/4, which is Dion2's default."""
