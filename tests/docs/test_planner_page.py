"""The planner's page: its example runs, and the claims are what the benchmark prints."""

import json
from pathlib import Path

import pytest

from benchmarks import platforms
from benchmarks.planning import claims, report
from benchmarks.planning.validate import held_out
from gradcomp_jax.planning.predict import FORMULAS_OFF
from tests.docs.test_method_pages import check_names_and_links, python_blocks, run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planner.md").read_text(encoding="utf-8")
RESULTS = DOCS / "results"


@pytest.mark.slow
def test_the_example_runs() -> None:
    found = run(python_blocks(PAGE)[0], "planner.md")
    assert found["verdict"].compress == (found["verdict"].gain >= 1.05)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_choice_at_the_start_of_a_run_works_as_the_page_has_it() -> None:
    chosen, moved = python_blocks(PAGE)[3:5]
    found = run(chosen + moved, "planner.md")
    assert found["choice"].name in found["candidates"]
    assert int(found["state"].opt_state[0].choice) == 2
    assert found["step"]._cache_size() == 1


def test_the_example_of_prices_is_of_a_method_that_is_only_faster_a_step() -> None:
    verdict = run(python_blocks(PAGE)[1], "planner.md")["verdict"]
    assert verdict.method == "powersgd" and verdict.trains_worse.method == "dgc"


def test_the_names_of_the_page_are_public() -> None:
    check_names_and_links(PAGE, DOCS)


def test_the_claims_are_those_of_the_benchmark() -> None:
    assert "\n".join(claims.claims_table()) in PAGE


def test_the_figures_of_platforms_are_those_of_the_package() -> None:
    assert platforms.page() in PAGE
    other = (DOCS / "when_not_to_compress.md").read_text(encoding="utf-8")
    for name in ("h100", "v5e"):
        assert f"{platforms.gain('dgc', name):.2f} times" in other


def test_the_command_says_the_same_of_the_formulas() -> None:
    by_formula = PAGE.split("### The same cells by the formulas")[1]
    assert f"| {100 * FORMULAS_OFF:.1f}% of " in by_formula.split("###")[0]


@pytest.mark.slow
def test_the_errors_and_verdicts_are_those_of_the_benchmark() -> None:
    """Of the programs as they are now: who changes what a method sends writes the page again."""
    results, cells = (json.loads((RESULTS / name).read_text()) for name in ("planner.json", "network.json"))
    held, formulas = (held_out(cells["cells"], results["links"], formulas=f) for f in (False, True))
    # Without the line of the command.
    found = report.markdown(results, held, formulas, "").splitlines()[1:]
    assert "\n".join(found).strip() in PAGE
