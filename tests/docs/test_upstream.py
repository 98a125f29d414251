"""The programs of the drafts for upstream print what the page says, for as long as those libraries do so."""

import contextlib
import importlib.metadata
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "release" / "upstream.md").read_text(encoding="utf-8")
PROGRAM = re.compile(
    r"<!-- program: (\w+) -->\n```python\n(.*?)^```\n\n```text\n(.*?)^```\n\nWith (.*?)\. ", re.DOTALL | re.MULTILINE
)
FOUND = {name: rest for name, *rest in PROGRAM.findall(PAGE)}


@pytest.mark.parametrize("name", FOUND)
def test_a_library_still_does_what_the_draft_says(name: str) -> None:
    program, printed, versions = FOUND[name]
    for package, version in re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", versions):
        if importlib.metadata.version(package) != version:
            pytest.skip(f"the page was made with {package} {version}: run its program with the newer one")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, f"{name} of docs/release/upstream.md", "exec"), {})
    assert out.getvalue() == printed


def test_every_draft_has_a_program() -> None:
    assert len(FOUND) == PAGE.count("**Title:**") == 2
