"""The site is whole: every public name is on a page of the API, every page in the navigation once, and links lead somewhere."""

import collections
import importlib
import re
import types
from pathlib import Path

import pytest

import gradcomp_jax as gc
from gradcomp_jax import training, transforms
from tests.docs.test_method_pages import check_names_and_links

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(module|data):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEW = (
    "index",
    "api",
    "when_not_to_compress",
    "coming_from",
    "debugging",
    "recipes",
    "fsdp",
    "stability",
    "SECURITY",
    "CONTRIBUTING",
    "release/checklist",
    "release/upstream",
)


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def public_modules() -> list[types.ModuleType]:
    """``gc``, the submodules that it imports by name, and the two whose names it mostly has itself."""
    source = Path(gc.__file__).with_name("_public.py").read_text(encoding="utf-8")
    names = re.findall(r"^from gradcomp_jax(?:\.transforms)? import (\w+) as \1$", source, re.MULTILINE)
    found = [getattr(gc, name) for name in names]
    return [gc, *(thing for thing in found if isinstance(thing, types.ModuleType)), training, transforms]


def is_of(module: types.ModuleType, name: str, value: object) -> bool:
    """Whether a name is defined in a module, and not imported into it."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    defined = getattr(value, "__module__", None) == module.__name__
    return defined or re.search(rf"^{name}\b.* = ", source, re.MULTILINE) is not None


def names_of(module: types.ModuleType) -> dict[str, object]:
    """What a module has for its users. A package has what it imports, a file what it defines."""
    each = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    names = {name: value for name, value in each.items() if not isinstance(value, types.ModuleType)}
    is_package = hasattr(module, "__path__")
    return {name: value for name, value in names.items() if is_package or is_of(module, name, value)}


def documented() -> list[tuple[str, object]]:
    """Names on the pages of the API and what they are, as Sphinx reads the directives."""
    found: list[tuple[str, object]] = []
    for page in DOCS.glob("api*.md"):
        for kind, path, options in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if kind == "data":
                path, _, listed = path.rpartition(".")
            else:
                listed = re.search(r":members:(.*)", options)[1]
            module = importlib.import_module(path)
            if listed.strip():
                members = {name: getattr(module, name) for name in re.split(r"[,\s]+", listed.strip())}
            else:
                members = {
                    name: value
                    for name, value in names_of(module).items()
                    if is_of(module, name, value) or (":imported-members:" in options and callable(value))
                }
            found += members.items()
    return found


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_every_public_name_is_on_a_page(module: types.ModuleType) -> None:
    there = documented()
    names = names_of(module)
    assert names
    missing = [name for name, value in names.items() if not any(n == name and v is value for n, v in there)]
    assert not missing, f"add {missing} of {module.__name__} to a page docs/api*.md"


def test_every_page_is_in_the_navigation_once() -> None:
    entries: list[str] = []
    for page in PAGES:
        for block in TOCTREE.findall(text_of(page)):
            assert ":glob:" not in block
            lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
            names = [re.sub(r"^.*<(.*)>$", r"\1", line) for line in lines]
            entries += [(Path(page).parent / name).as_posix() for name in names]
    assert not [name for name, count in collections.Counter(entries).items() if count > 1]
    assert set(PAGES) - {"index"} <= set(entries)


def test_the_groups_of_the_navigation() -> None:
    groups = re.findall(r"^:caption: (.*)$", text_of("index"), re.MULTILINE)
    assert groups == [
        "Start",
        "Guides",
        "Methods",
        "Replicas",
        "Planner",
        "Clusters",
        "Results",
        "Reference",
        "Project",
    ]
    first = TOCTREE.findall(text_of("index"))[0]
    assert "<when_not_to_compress>" in first.split("\n\n")[1].splitlines()[0]


def test_the_first_page_names_each_public_name_once() -> None:
    """In the groups above the list, which a person reads first."""
    listed = re.findall(r"`gc\.(\w+) <gradcomp_jax\.\1>`", text_of("api"))
    assert not [name for name, count in collections.Counter(listed).items() if count > 1]
    missing = set(names_of(gc)) - set(listed)
    assert not missing, f"add {missing} to the groups at the top of docs/api.md"


@pytest.mark.parametrize("page", NEW)
def test_names_and_links_lead_somewhere(page: str) -> None:
    check_names_and_links(text_of(page), (DOCS / page).parent)


def test_every_notebook_is_shown_with_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="sphinx is not installed: pip install -e '.[docs]'")
    monkeypatch.syspath_prepend(str(DOCS))
    notebooks = importlib.import_module("notebooks")
    (gallery,) = re.findall(r"^```\{notebooks\}\n(.*?)^```", text_of("index"), re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^(\w+)(?: (\d+))?: .", gallery, re.MULTILINE)
    assert {name for name, _ in shown} == {path.stem for path in (DOCS.parent / "colabs").glob("*.ipynb")}
    for name, number in shown:
        title, pictures = notebooks.read(name)
        assert title and pictures[int(number or 1) - 1].startswith(b"\x89PNG\r\n")


def test_the_table_of_what_to_take_is_one() -> None:
    """The first page includes the README's; the page on methods has the same rows."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    table = re.compile(r"<!-- decision-table -->\n\n(.*?)\n\n<!-- /decision-table -->", re.DOTALL)
    rows = table.search(readme)[1]
    assert rows.count("\n") >= 4 and rows.replace("](docs/", "](../") == table.search(text_of("methods/index"))[1]
    included = re.search(r"^```\{include\} ../README.md\n(.*?)^```", text_of("index"), re.MULTILINE | re.DOTALL)[1]
    assert included.splitlines() == [
        ":start-after: <!-- decision-table -->",
        ":end-before: <!-- /decision-table -->",
        ":relative-docs: docs/",
    ]
