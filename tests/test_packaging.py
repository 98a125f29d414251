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
import yaml

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


def test_every_link_that_pypi_shows_leads_to_a_file_of_the_tag() -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[test]'")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    readme = json.loads(done.stdout)["readme"]
    assert readme["content-type"] == "text/markdown"
    own = (ROOT / "README.md").read_text(encoding="utf-8")
    repository = PROJECT["urls"]["Repository"]
    links = re.findall(r"\]\(([^)]+)\)", readme["text"])
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", own)) > 50
    assert all(re.match("https?://|#", link) for link in links)
    ours = [re.fullmatch(rf"{repository}/(blob|raw)/v{gc.__version__}/([^#]+)(#.*)?", link) for link in links]
    assert sum(map(bool, ours)) > 30
    assert all(
        (ROOT / found[2]).exists() and (found[1] == "raw") == found[2].endswith(".png") for found in ours if found
    )
    # Nothing else is changed.
    assert re.sub(rf"{repository}/(blob|raw)/v{gc.__version__}/", "", readme["text"]) == own


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


def hidden(name: str) -> str:
    """A file that only a checkout has."""
    if not (ROOT / name).exists():
        pytest.skip(f"{name} is in a checkout alone")
    return (ROOT / name).read_text(encoding="utf-8")


def pythons() -> list[str]:
    low, high = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    return [f"3.{minor}" for minor in range(low, high)]


def test_a_tag_publishes_what_was_built_and_tried() -> None:
    workflow = yaml.safe_load(hidden(".github/workflows/release.yml"))
    # YAML 1.1 takes the word on for a truth value.
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, tried, publish = (workflow["jobs"][name] for name in ("build", "try", "publish"))
    assert set(workflow["jobs"]) == {"build", "try", "publish"}
    assert (tried["needs"], publish["needs"]) == ("build", "try")
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert "python -m hatchling version" in commands[1]
    assert commands[2:] == ["python -m build", "twine check --strict dist/*"]
    assert tried["strategy"]["matrix"]["python"] == pythons()
    commands = [step["run"] for step in tried["steps"] if "run" in step]
    assert commands[-2:] == ["empty/bin/gradcomp --help", "empty/bin/python docs/release/smoke.py"]
    # Only the upload has a token, and nothing of the project's runs beside it.
    assert workflow["permissions"] == {"contents": "read"} and publish["permissions"] == {"id-token": "write"}
    assert "permissions" not in build and "permissions" not in tried
    assert publish["environment"]["name"] == "pypi"
    assert not [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]]


def test_the_workflows_take_the_same_actions() -> None:
    used = [
        set(re.findall(r"uses: (\S+)@(\S+)", hidden(f".github/workflows/{name}.yml"))) for name in ("ci", "release")
    ]
    versions = {action: version for found in used for action, version in found}
    assert len(versions) == len(used[0] | used[1])
    assert all(re.fullmatch(r"v\d+|release/v1", version) for version in versions.values())


@pytest.mark.parametrize(("tag", "code"), [(f"v{gc.__version__}", 0), (gc.__version__, 1), ("v0.0.9", 1)])
def test_a_tag_that_is_not_the_version_ends_the_release(tag: str, code: int) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[test]'")
    workflow = yaml.safe_load(hidden(".github/workflows/release.yml"))
    (command,) = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "The tag" in step.get("name", "")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag, "PATH": path})
    assert done.returncode == code


def test_condas_recipe_says_what_the_project_says() -> None:
    recipe = yaml.safe_load((ROOT / "docs" / "release" / "recipe.yaml").read_text(encoding="utf-8"))
    version = f"{recipe['context']['version']}"
    assert (recipe["package"]["name"], version) == (PROJECT["name"], gc.__version__)
    low, high = PROJECT["requires-python"].split(",")
    python, *others = recipe["requirements"]["run"]
    # conda-forge has a variable for the oldest Python that it builds for.
    assert (low, python) == (f">={pythons()[0]}", "python >=${{ python_min }}," + high)
    assert recipe["tests"][0]["python"]["python_version"] == ["${{ python_min }}.*", f"{pythons()[-1]}.*"]
    assert [one.replace(" ", "") for one in others] == PROJECT["dependencies"]
    (backend,) = PYPROJECT["build-system"]["requires"]
    assert [one.replace(" ", "") for one in recipe["requirements"]["host"]][2:] == [backend]
    extra = [one.replace(" ", "").replace("-base", "") for one in recipe["tests"][1]["requirements"]["run"][1:]]
    assert extra == PROJECT["optional-dependencies"]["cli"]
    ((name, function),) = PROJECT["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {function}"]
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (PROJECT["description"], PROJECT["license"])
    assert [about["license_file"]] == PROJECT["license-files"]
    assert {about["homepage"], about["repository"]} == {PROJECT["urls"]["Repository"]}


def test_zenodo_is_told_what_the_project_says() -> None:
    """But for the version, which Zenodo takes from the tag."""
    told = json.loads(hidden(".zenodo.json"))
    table = PYPROJECT["tool"]["gradcomp"]["citation"]
    (related,) = told["related_identifiers"]
    said = (told["title"], told["license"], told["creators"], related["identifier"])
    assert said == (table["title"], table["license"], table["authors"], table["repository"])
    assert (told["description"], told["keywords"]) == (PROJECT["description"], PROJECT["keywords"])
    assert told["upload_type"] == "software" and "version" not in told


@pytest.mark.parametrize("page", ["stability", "install"])
def test_pages_say_which_pythons_and_which_jax(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    jax = next(one for one in PROJECT["dependencies"] if re.match(r"jax\W", one))
    low, high = re.fullmatch(r"jax>=0\.(\d+),<0\.(\d+)", jax).groups()
    assert f"JAX 0.{low} to 0.{int(high) - 1}" in text
    found = re.search(r"Python ([\d., or]+?) (?:or|to) (3\.\d+)", text)
    assert (found[1].split(",")[0], found[2]) == (pythons()[0], pythons()[-1])


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## \[(.*?)\] - (.*)$", changelog, re.MULTILINE).groups()
    final = re.match(r"[\d.]+", gc.__version__)[0]
    assert version == final
    # A candidate comes before the date.
    assert date == "unreleased" or (re.fullmatch(r"20\d\d-\d\d-\d\d", date) and final == gc.__version__)


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
    assert sorted(named) == [int(one.rpartition(".")[2]) for one in pythons()]


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
def test_the_wheel_passes_the_test_of_a_release(elsewhere: tuple[Path, Path]) -> None:
    python, empty = elsewhere
    smoke = [str(python), str(ROOT / "docs" / "release" / "smoke.py")]
    done = subprocess.run(smoke, cwd=empty, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"gradcomp_jax {gc.__version__}, Python ") and " one step sends " in done.stdout
    # What is not installed there is refused.
    elsewhere_too = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(smoke, cwd=empty, env=elsewhere_too, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "outside the folder of a checkout" in done.stderr


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
