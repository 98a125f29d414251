"""Laws under random cases: a few here, more of them marked slow, as many as wanted by hand.

``GRADCOMP_RANDOM_CASES=300 GRADCOMP_RANDOM_SEED=7 pytest -s -m slow tests/conformance/test_random_cases.py``
"""

import os
import pathlib
import tempfile

import hypothesis
import pytest

from .environments import ENVIRONMENTS
from .random_cases import Case, cases, run

CASES, SEED = (
    int(os.environ.get(f"GRADCOMP_RANDOM_{name}", default)) for name, default in (("CASES", 20), ("SEED", 1))
)

PART = 20
"""Of how many cases the programs are held at once."""


def check(count: int, seed: int, envs: tuple[str, ...]) -> None:
    taken = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(cases(envs))
    def every(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            taken.append(run(case, pathlib.Path(folder)))

    print(f"{count} random cases of seed {seed}")
    every()
    print(f"{sum(taken)} ran, {len(taken) - sum(taken)} were refused")
    assert sum(taken) > len(taken) / 2


def test_random_cases() -> None:
    check(6, 0, ("vmap",))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-CASES // PART)))
def test_more_random_cases(part: int) -> None:
    check(min(PART, CASES - PART * part), SEED * 1_000 + part, ENVIRONMENTS)
