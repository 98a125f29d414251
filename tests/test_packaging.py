"""What is published: the source distribution, the wheel, the facts in pyproject.toml and the pages that repeat them."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest

import gradcomp_jax as gc

ROOT = Path(__file__).parents[1]
FOLDERS = ("gradcomp_jax", "tests", "benchmarks", "colabs", "docs")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def build(kind: str, folder: Path) -> Path:
    """Returns the path of a new ``sdist`` or ``wheel`` of this tree."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[test]'")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


def test_a_source_distribution_has_all_that_the_tests_read(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    wanted = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()} | {"README.md", "LICENSE"}
    with tarfile.open(build("sdist", tmp_path)) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    # What single runs gave is in a checkout alone; tests that read it are skipped without it.
    runs = {name for name in wanted if name.startswith(("docs/results/runs/", "docs/results/adamw/"))}
    assert runs and not runs & found
    assert sorted(wanted - found - runs) == []


def test_the_page_on_citing_says_what_the_table_says() -> None:
    table = PYPROJECT["tool"]["gradcomp"]["citation"]
    page = (ROOT / "docs" / "citing.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,?$", page, re.MULTILINE))
    assert shown == {
        "title": table["title"],
        "author": " and ".join(author["name"] for author in table["authors"]),
        "year": str(table["year"]),
        "version": gc.__version__,
        "license": table["license"],
        "url": table["repository"],
    }
    assert table["license"] == PROJECT["license"]
    assert table["authors"] == PROJECT["authors"]
    assert table["repository"] == PROJECT["urls"]["Repository"]


def test_an_accelerators_extra_is_jaxs_own() -> None:
    extras = PROJECT["optional-dependencies"]
    jax = next(one.removeprefix("jax") for one in PROJECT["dependencies"] if re.match(r"jax\W", one))
    offered = metadata.metadata("jax").get_all("Provides-Extra")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for name in ("cuda12", "cuda13", "tpu"):
        assert extras[name] == [f"jax[{name}]{jax}"]
        assert name in offered
        assert f"[{name}]" in page
    assert set(extras) == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) | {"cuda12", "cuda13", "tpu"}


def test_classifiers_name_the_pythons_that_it_runs_on() -> None:
    named = {
        int(c.rpartition(".")[2])
        for c in PROJECT["classifiers"]
        if c.startswith("Programming Language :: Python :: 3.")
    }
    low, high = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    assert named == set(range(low, high))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Python with the wheel, and an empty folder to run it in. All else comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build("wheel", folder / "dist")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs a virtual environment as POSIX systems have them")
    # pip runs there with --python; a path in a .pth file comes after the environment's own packages, and what lies in it
    # (the editable installation of this tree) is not read.
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = (folder / "venv").glob("lib/python3*/site-packages")
    (site / "tests_environment.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    empty = folder / "empty"
    empty.mkdir()
    return python, empty


def environment() -> dict[str, str]:
    """Of a user, who has no checkout on the path."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}


@pytest.mark.slow
def test_the_wheel_runs_the_readme_without_a_checkout(elsewhere: tuple[Path, Path]) -> None:
    python, empty = elsewhere
    example = re.search(r"<!-- usage-example -->\s*```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    where = "\nimport sys\nprint(gc.__file__, sys.prefix)\n"
    done = subprocess.run(
        [str(python), "-c", example.group(1) + where],
        cwd=empty,
        env=environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, loss, places = done.stdout.splitlines()
    file, prefix = places.split()
    assert file.startswith(prefix), "the package is the wheel's"
    assert 0 <= float(loss) < 0.95


@pytest.mark.slow
def test_the_wheel_runs_the_first_notebook_without_a_checkout(
    elsewhere: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    python, empty = elsewhere
    spec = empty / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(empty))
    for name in ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(ROOT / "colabs" / "swap_pmean.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(gc.__file__.startswith(sys.prefix))"))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(empty))
    assert notebook.cells[-1].outputs[0].text == "True\n"
