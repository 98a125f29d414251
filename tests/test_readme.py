"""The README is true: its example runs, its names exist, its links lead somewhere."""

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

import gradcomp_jax as gc

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block_after(marker: str) -> str:
    """The first code block after a marker comment."""
    match = re.search(rf"<!-- {marker} -->\s*```\w*\n(.*?)```", README, re.DOTALL)
    assert match, f"README.md has no code block after {marker}"
    return match.group(1)


@pytest.mark.standard_promotion  # optax: an integer count to a power
def test_usage_example_runs_and_is_short() -> None:
    example = block_after("usage-example")
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 15
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    *report, fewer, loss = printed.getvalue().strip().splitlines()
    assert any("all-to-all" in line for line in report), "the example prints what is sent"
    assert 3 < float(fewer.split()[0]) < 4
    # A sine's mean square is 0.43.
    assert 0 <= float(loss) < 0.01


def test_commands() -> None:
    assert "pytest" in block_after("test-command")
    assert "pip install -e '.[cli]' && gradcomp compare" in README


def test_names_exist() -> None:
    names = set(re.findall(r"`gc\.([\w.]+)", README))
    assert {"dense", "terngrad", "dgc", "wire_bytes"} <= names
    for name in names:
        found = gc
        for part in name.split("."):
            found = getattr(found, part)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_top_level_is_as_promised() -> None:
    """What git tracks at the top: the folders that the project names, its metadata, and nothing else."""
    if not (ROOT / ".git").exists():  # an unpacked source distribution may lie within another repository
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    visible = {name for name in top if not name.startswith(".")}
    folders = {"gradcomp_jax", "tests", "benchmarks", "colabs", "docs"}
    assert visible == {"pyproject.toml", "README.md", "LICENSE", *folders}
