"""What the commands write: whole files, through no link that the user did not name; and which folders they refuse."""

import io
import json
import os
import re

import pytest
from rich.console import Console

pytest.importorskip("typer")

from gradcomp_jax.cli import runs
from gradcomp_jax.cli.options import Training
from gradcomp_jax.experiments import Listener, SettingError, summarize
from tests.experiments.descent import Descent


@pytest.fixture(scope="module")
def result():
    return summarize([Descent().run(0, listener=Listener())], {"dense": 8, "dense-bf16": 4})


def write(result, training: Training) -> None:
    runs.finish(Console(file=io.StringIO()), result, training, "train", "gradcomp train")


def test_links_in_the_folder_are_replaced_and_a_link_that_is_named_is_followed(result, tmp_path) -> None:
    results, site = tmp_path / "results", tmp_path / "site"
    results.mkdir()
    site.mkdir()
    for name in ("diary", "holiday"):
        (tmp_path / name).write_text("mine")
    (results / "train-here-descent.json").symlink_to(tmp_path / "diary")
    (results / "train-here-descent.png").symlink_to(tmp_path / "holiday")
    (site / "page.md").write_text("old")
    (tmp_path / "page.md").symlink_to(site / "page.md")
    (tmp_path / "out").symlink_to(results)
    training = Training(out=tmp_path / "out", markdown=tmp_path / "page.md")
    write(result, training)
    assert [(tmp_path / name).read_text() for name in ("diary", "holiday")] == ["mine"] * 2
    assert json.loads((results / "train-here-descent.json").read_text())["dataset"] == "here:descent"
    assert (results / "train-here-descent.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "page.md").is_symlink() and "| dense |" in (site / "page.md").read_text()
    assert len(os.listdir(results)) == 2 and os.listdir(site) == ["page.md"]


def test_a_full_disk_leaves_the_earlier_results(result, tmp_path) -> None:
    resource = pytest.importorskip("resource")
    training = Training(out=tmp_path, markdown=tmp_path / "page.md")
    write(result, training)
    written = sorted(tmp_path.iterdir())
    before = [path.read_bytes() for path in written]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(SettingError, match=r"cannot write the results.*File too large"):
            write(result, training)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_bytes() for path in written] == before
    assert len(os.listdir(tmp_path)) == 3


def test_a_page_may_go_to_a_device(result, tmp_path) -> None:
    write(result, Training(out=tmp_path, markdown=tmp_path / "null"))
    (tmp_path / "null").unlink()
    (tmp_path / "null").symlink_to(os.devnull)
    write(result, Training(out=tmp_path, markdown=tmp_path / "null"))
    assert (tmp_path / "null").is_char_device()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--checkpoint", "file"), r"--checkpoint must name a folder, and .*\bfile is none: name another"),
        (("--checkpoint", os.devnull), "--checkpoint must name a folder, and /dev/null is none: name another"),
        (("--checkpoint", "file/run"), "file/run is not a folder: name one to save in"),
        (("--checkpoint", ""), "--checkpoint must name a folder of its own, not the current one"),
        (
            ("--checkpoint", "theirs"),
            "theirs holds epoch-1 and no run: name a new or an empty folder, or add --share-f",
        ),
        (("--share-folder",), "--share-folder needs --checkpoint"),
    ],
)
def test_a_folder_that_cannot_be_the_run_s_is_refused_before_anything_is_compiled(
    gradcomp, tmp_path, words, message, monkeypatch
) -> None:
    from gradcomp_jax.cli import train

    monkeypatch.setattr(train, "Trainer", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "theirs" / "epoch-1").mkdir(parents=True)
    result = gradcomp("train", "--workers", "2", "--batch", "128", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert re.match(f"gradcomp: {message}", line)
    assert sorted(os.listdir(tmp_path)) == ["file", "theirs"] and os.listdir(tmp_path / "theirs") == ["epoch-1"]
