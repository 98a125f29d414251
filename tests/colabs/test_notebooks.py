"""Every notebook runs from its first cell to its last, and is stored with the outputs of such a run.

To store new outputs after an edit: ``jupyter execute --inplace --kernel_name=python3 colabs/NAME.ipynb``.
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[test]'")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install -e '.[test]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e '.[test]'")

REPOSITORY = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "colabs").glob("*.ipynb"))
MAX_BYTES = 600_000
# Folders of the machine that a notebook was executed on: /home/name, C:\Users, and whatever a package lies in.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|Users|tmp|private|var|usr|opt|mnt|srv|work|workspace|content)/|\b[A-Z]:\\|site-packages"
)

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: pathlib.Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def images(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def strings(node: Any) -> Iterator[str]:
    """Every string of a notebook but its images, whose base64 text may spell anything."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            if not key.startswith("image/"):
                yield key
                yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)


@pytest.fixture
def own_kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of this very Python, called python3, that finds this very package and a user's environment."""
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    # A notebook asks for its devices and draws its figures itself.
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRADCOMP_NOTEBOOK_STEPS", "20")
    return "python3"


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@notebooks
def test_runs_from_first_cell_to_last(path: pathlib.Path, own_kernel: str):
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name=own_kernel, allow_errors=False)
    # Raises CellExecutionError, with the cell and its traceback, at the first cell that fails.
    client.execute(cwd=str(path.parent))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert images(notebook) == images(read(path))


@notebooks
def test_says_first_what_runs_where(path: pathlib.Path):
    machines = re.findall(r"^\| ([^|]+) \| .", read(path).cells[0].source, re.MULTILINE)
    assert machines == ["machine", "Colab, CPU", "one GPU", "Colab, v5e-1", "Kaggle, v5e-8"]


def install_cell(path: pathlib.Path) -> str:
    """The first code cell, with what IPython would hand to pip in a variable."""
    source = next(cell.source for cell in read(path).cells if cell.cell_type == "code")
    magic = '    %pip install --quiet "{SOURCE}"'
    assert source.endswith(magic)
    return source.replace(magic, "    installed = SOURCE")


@notebooks
def test_all_install_in_the_same_way(path: pathlib.Path):
    assert install_cell(path) == install_cell(NOTEBOOKS[0])


@pytest.mark.parametrize(
    ("files", "is_there", "expected"),
    [
        (["gradcomp_jax-0.1.0-py3-none-any.whl", "../pyproject.toml"], False, r"\./gradcomp_jax-[\w.-]+\.whl\[cli\]"),
        (["../pyproject.toml"], False, r"\.\.\[cli\]"),
        ([], False, r"gradcomp-jax\[cli\] @ git\+https://[\w./-]+"),
        (["../pyproject.toml"], True, None),
    ],
    ids=["wheel", "checkout", "repository", "installed"],
)
def test_installs_from_what_there_is(
    files: list[str], is_there: bool, expected: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "colabs"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_there else None)
    names: dict[str, Any] = {}
    exec(install_cell(NOTEBOOKS[0]), names)
    if expected is None:
        assert "installed" not in names
    else:
        assert re.fullmatch(expected, names["installed"])


@notebooks
def test_is_stored_with_the_outputs_of_one_clean_run(path: pathlib.Path):
    notebook = read(path)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "execute all cells in a new kernel and store the notebook"
    assert images(notebook)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert notebook.metadata.kernelspec.name == "python3"


@notebooks
def test_tells_nothing_about_the_machine_it_ran_on(path: pathlib.Path):
    here = (f"{REPOSITORY}/", f"{sys.prefix}/")
    texts = strings(read(path))
    assert [text for text in texts if MACHINE_PATH.search(text) or any(folder in text for folder in here)] == []


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("/home/name/x.py", True),
        ('File "/usr/lib/x.py"', True),
        (r"C:\Users\name", True),
        ("https://host/home/page", False),
        ("a and/or b, 1/2, docs/design.md", False),
    ],
)
def test_machine_paths_are_recognised(text: str, is_path: bool):
    assert bool(MACHINE_PATH.search(text)) == is_path


@notebooks
def test_is_small(path: pathlib.Path):
    assert path.stat().st_size < MAX_BYTES


@notebooks
def test_points_to_pages_that_exist(path: pathlib.Path):
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    pages = re.findall(r"`([\w/-]+\.md)`", prose)
    assert pages
    assert [page for page in pages if not (REPOSITORY / page).is_file()] == []
