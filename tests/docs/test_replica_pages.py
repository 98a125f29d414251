"""The pages on methods whose replicas differ: there, in one form, with examples that run and names that exist."""

import inspect
import re
from fractions import Fraction
from pathlib import Path

import jax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.replicas import MARKED
from tests.docs.test_method_pages import check_headings, check_names_and_links, python_blocks, run

FOLDER = Path(__file__).parents[2] / "docs" / "replicas"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SHARED = {"diloco": {"diloco", "sparse_loco", "outer_average", "fragments"}}
"""What has its page together with something else."""


def text_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def test_every_method_has_a_page() -> None:
    public = {
        name
        for name in dir(gc)
        if (getattr(getattr(gc, name), "__module__", None) or "").startswith("gradcomp_jax.replicas")
    }
    described = set().union(*(SHARED.get(page, {page}) for page in PAGES))
    assert described == public - {"consolidate", "mean_wire_bytes", "replica_spread", "staleness"}


@pytest.mark.parametrize("page", PAGES)
def test_headings(page: str) -> None:
    check_headings(text_of(page))


@pytest.mark.parametrize("page", [*PAGES, "index"])
@pytest.mark.standard_promotion
def test_the_example_runs(page: str) -> None:
    (block,) = python_blocks(text_of(page))
    state = run(block, f"docs/replicas/{page}.md")["state"]
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MARKED))
    assert any(isinstance(node, MARKED) for node in found)


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_names_and_links_lead_somewhere(page: str) -> None:
    check_names_and_links(text_of(page), FOLDER)


def test_sparse_loco_s_defaults_are_those_on_the_page() -> None:
    """What a model of 72B parameters was trained with."""
    (sentence,) = re.findall(r"was trained with: (.*?)no outer momentum", text_of("diloco"), re.DOTALL)
    stated = {name: float(Fraction(value)) for name, value in re.findall(r"`(\w+)=([\d./]+)`", sentence)}
    defaults = {name: p.default for name, p in inspect.signature(gc.sparse_loco).parameters.items()}
    assert stated.keys() == {"every", "density", "chunk", "decay", "learning_rate"}
    assert stated == {name: defaults[name] for name in stated}


def test_what_a_chunk_of_sparse_loco_costs() -> None:
    """The figure on the page."""
    code = gc.compressors.topk(1 / 64, block=4096, bits=2, pack_positions=True)
    assert code.payload_bytes(1) == 84
    assert "84 bytes for 4,096 entries, 0.164 bits an entry" in text_of("diloco")
    assert round(84 * 8 / 4096, 3) == 0.164
