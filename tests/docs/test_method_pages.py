"""The pages on the methods are there, in one form, their examples run, and their numbers are the programs'."""

import contextlib
import inspect
import io
import math
import re
from pathlib import Path

import jax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.cli import method_table
from gradcomp_jax.methods import registry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
OTHERS = {"index", "sufficient_factors"}
HEADINGS = [
    "Use",
    "When to use it, and when not",
    "What it costs, and how it trains",
    "Mathematics",
    "Wire format",
    "State",
    "Source",
]
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem not in OTHERS)
COMMAND = "gradcomp methods --markdown"
TABLE = re.compile(r"<!-- methods-table -->\n(.*?)<!-- /methods-table -->", re.DOTALL)
FORMATS = re.compile(r"<!-- formats -->\n(.*?)<!-- /formats -->", re.DOTALL)
BITS = re.compile(r"^Per value at N = 8(?: in (\w+))?: uplink ([\d.]+) bits, downlink ([\d.]+) bits\.$", re.MULTILINE)


def text_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def page_of(method: str) -> str:
    """Methods that are one function with other options share a page."""
    return registry.METHODS[method].make.__name__


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(block: str, name: str) -> dict:
    namespace: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, name, "exec"), namespace)
    return namespace


def agrees(stated: str, actual: float) -> bool:
    """To three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(actual)) - 2) if actual else 0.0
    return abs(float(stated) - actual) <= unit / 2


def check_headings(text: str) -> None:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    title, sentence, *_ = text.split("\n\n")
    assert title.startswith("# ") and "\n" not in title
    assert sentence.endswith(".") and not sentence.startswith("#")


def check_names_and_links(text: str, folder: Path) -> None:
    for name in re.findall(r"\bgc\.([a-z_\d]+(?:\.[a-z_\d]+)*)", text):
        found = gc
        for part in name.split("."):
            found = getattr(found, part)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (folder / target).exists(), target


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert set(PAGES) == {page_of(method) for method in registry.METHODS}


@pytest.mark.parametrize("page", PAGES)
def test_headings(page: str) -> None:
    check_headings(text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_the_example_runs(page: str) -> None:
    (block,) = python_blocks(text_of(page))
    assert 3 <= sum(bool(line.strip()) for line in block.splitlines()) <= 6
    assert f"gc.{page}(" in block
    state = run(block, f"docs/methods/{page}.md")["state"]
    inside = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, gc.ExchangeState))
    assert any(isinstance(node, gc.ExchangeState) for node in inside)


def test_examples_of_policies_build() -> None:
    blocks = python_blocks((ROOT / "docs" / "policies.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    for block in blocks:
        tx = run(block, "docs/policies.md")["tx"]
        tx.init({"head": {"kernel": jax.numpy.zeros((8, 4))}, "norm": {"scale": jax.numpy.zeros(4)}})


@pytest.mark.slow
@pytest.mark.parametrize("form", [0, 1])
def test_dgc_by_path_gives_every_tensor_its_momentum(form: int) -> None:
    """By mask or by policy: what is not selected moves as with ordinary momentum, and only the others wait for their turn."""
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    section = page.partition("## DGC by path")[2].partition("\n## ")[0]
    tx = run(python_blocks(section)[form], "docs/policies.md")["tx"]
    shapes = {"embed": (64, 64), "head": {"kernel": (64, 64)}, "layer": {"kernel": (64, 64), "bias": (64,)}}
    params = jax.tree.map(jax.numpy.zeros, shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    state = gc.init_state(params, tx, mesh)
    gradient = 1e-3  # Too small to be clipped, and the same on all workers.

    def loss(params: dict, batch: jax.Array) -> jax.Array:
        return gradient * sum(leaf.sum() for leaf in jax.tree.leaves(params)) + 0.0 * batch.sum()

    batch = jax.device_put(jax.numpy.zeros(4), gc.data_sharding(mesh))
    step = gc.make_train_step(loss, tx, mesh, donate=False)
    for _ in range(10):
        before, (state, _) = state.params, step(state, batch)
    moved = jax.tree.map(lambda a, b: float((b - a).mean()) / (0.1 * gradient), state.params, before)
    velocity = (1 - 0.9**10) / (1 - 0.9)
    for full in (moved["embed"], moved["head"]["kernel"], moved["layer"]["bias"]):
        assert full == pytest.approx(velocity, rel=0.02)
    assert 0 < moved["layer"]["kernel"] < velocity / 2


def test_errors_of_formats_are_those_of_the_results() -> None:
    table = FORMATS.findall(text_of("block_quantized"))[0].strip().splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    results = (ROOT / "docs" / "results" / "errors.md").read_text(encoding="utf-8").splitlines()
    measured = [[cell.strip() for cell in row.split("|")[1:-1]] for row in results if row.startswith("| ")]
    (heads,) = (row for row in measured if row[0] == "compressor")
    places = [heads.index(head) for head in rows[0]]
    by_name = {row[0]: [row[place] for place in places] for row in measured if len(row) == len(heads)}
    assert len(rows) == 2 + 7
    for row in rows[2:]:
        assert row == by_name[row[0]]


@pytest.mark.parametrize("page", ["docs/methods/index.md", "README.md"])
def test_the_table_is_the_programs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = TABLE.findall(text)
    assert len(found) == text.count("<!-- methods-table -->")
    if page.endswith("index.md"):
        assert found
    expected = method_table.markdown_table()
    for table in found:
        assert table == expected, f"the table in {page} is out of date; put in its place what this prints:\n{COMMAND}"


@pytest.mark.parametrize("page", PAGES)
def test_bits_for_a_value(page: str) -> None:
    stated = {dtype or None: (uplink, downlink) for dtype, uplink, downlink in BITS.findall(text_of(page))}
    rows = {row.name: row for row in method_table.table() if page_of(row.name) == page}
    # A page of several methods says which by the width of the values: "in float32", "in two", of two bits.
    names = {None if len(rows) == 1 else _width(registry.METHODS[name]): name for name in rows}
    assert stated.keys() == names.keys()
    for key, (uplink, downlink) in stated.items():
        row = rows[names[key]]
        assert agrees(uplink, row.uplink), f"{row.name}: {row.uplink} bits uplink"
        assert agrees(downlink, row.downlink), f"{row.name}: {row.downlink} bits downlink"


def _width(method: registry.Method) -> str:
    default = inspect.signature(method.make).parameters["dtype"].default
    return "two" if method.options.get("bits") == 2 else method.options.get("dtype", default)


@pytest.mark.parametrize("page", [*PAGES, *sorted(OTHERS)])
def test_names_and_links_lead_somewhere(page: str) -> None:
    check_names_and_links(text_of(page), FOLDER)


@pytest.mark.parametrize("name", [name for name, method in registry.METHODS.items() if method.kept != "nothing"])
def test_a_page_says_where_the_learning_rate_is(name: str) -> None:
    """Of every method that keeps something: in units of gradients, and what is there for the papers' form."""
    differs = text_of(page_of(name)).split("Where ours differs")[1]
    assert "learning rate" in differs and ("`gc.rate_weighted" in differs or "`rate=schedule`" in differs)


def test_the_index_lists_every_page() -> None:
    toctree = text_of("index").split("```{toctree}")[1].split("```")[0].split("\n\n", 1)[1].split()
    assert sorted(toctree) == sorted([*PAGES, "sufficient_factors"])
