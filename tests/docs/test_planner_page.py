"""The planner's page: its example runs, and the claims are what the benchmark prints."""

from pathlib import Path

from benchmarks.planning import claims
from tests.docs.test_method_pages import python_blocks, run

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    found = run(python_blocks(PAGE)[0], "planner.md")
    assert found["verdict"].compress == (found["verdict"].gain >= 1.05)


def test_the_claims_are_those_of_the_benchmark() -> None:
    assert "\n".join(claims.table()) in PAGE
