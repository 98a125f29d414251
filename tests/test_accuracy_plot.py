"""The picture of all methods on digits is drawn from its table."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import accuracy_plot, pareto
from gradcomp_jax.methods import registry

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results" / "digits-all.md").read_text(encoding="utf-8")


def test_every_method_of_the_table_is_drawn() -> None:
    title, points = accuracy_plot.read(PAGE)
    # Another width of a method's values has its place before AdamW, in the protocol.
    forms = {name for name, method in registry.METHODS.items() if "bits" in method.options}
    assert {point.name.replace("-", "_") for point in points} == set(registry.METHODS) - forms
    assert [point.sent for point in points] == sorted(point.sent for point in points)
    (axes,) = accuracy_plot.draw(title, points).axes
    drawn = [(line[0].get_xdata()[0], line[0].get_ydata()[0]) for line in axes.containers]
    assert drawn == [(point.sent, point.mean) for point in points]
    best = pareto.frontier(points, more_is_better=True)
    beaten = [p for p in points if any(q.mean >= p.mean and (q.sent, -q.mean) < (p.sent, -p.mean) for q in points)]
    assert not {p.name for p in best} & {p.name for p in beaten} and len(best) + len(beaten) == len(points)
    assert {text.get_text() for text in axes.texts} == {p.name for p in best} | set(accuracy_plot.BASELINES)
    assert "conv net" in title and "8 workers" in title


def test_the_results_show_it_and_name_the_model() -> None:
    page = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    picture = page.index("(digits-all.png)")
    assert "conv net" in page[picture : picture + 300]
    assert (ROOT / "docs" / "results" / "digits-all.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="gradcomp compare has written"):
        accuracy_plot.read("# digits: 8 workers\n")
