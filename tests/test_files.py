"""Files that appear whole, and follow no link that is not meant."""

import os
import pathlib
import stat

import pytest

from gradcomp_jax._files import is_draft, local_folder, read_file, write_whole


def listed(folder: pathlib.Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").symlink_to("mine")
    write_whole(tmp_path / "out", "new", follow=False)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "out").read_text() == "new" and not (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_that_the_user_names_is_followed(there: bool, tmp_path) -> None:
    (tmp_path / "site").mkdir()
    if there:
        (tmp_path / "site" / "page").write_text("old")
    (tmp_path / "page").symlink_to("site/page")
    write_whole(tmp_path / "page", "new")
    assert (tmp_path / "page").is_symlink()
    assert (tmp_path / "site" / "page").read_text() == "new"
    assert listed(tmp_path / "site") == ["page"]


def test_a_device_is_written_to_and_stays_one(tmp_path) -> None:
    (tmp_path / "null").symlink_to(os.devnull)
    write_whole(tmp_path / "null", "new")
    write_whole(os.devnull, "new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.parametrize("follow", [False, True])
def test_a_folder_is_refused(follow: bool, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "out", "new", follow=follow)
    assert listed(tmp_path) == ["out"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_when_writing_fails_the_earlier_file_is_there_and_nothing_else(failing: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "out").write_text("old")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "out", "new")
    assert (tmp_path / "out").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_a_disk_that_takes_no_more_leaves_the_earlier_file(tmp_path) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "out").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError):
            write_whole(tmp_path / "out", "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_the_mode_stays_and_a_new_file_has_the_usual_one(tmp_path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "usual").write_text("as open makes it")
    os.chmod(tmp_path / "old", 0o640)
    write_whole(tmp_path / "old", "new")
    write_whole(tmp_path / "fresh", b"new")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o640
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_only_a_file_is_read(tmp_path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file", limit=7) == b"content"
    assert read_file(tmp_path / "nothing", limit=7) is None
    for name in ("link", "folder", "pipe"):
        with pytest.raises(OSError):
            read_file(tmp_path / name, limit=7)
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_file(tmp_path / "file", limit=6)


def test_a_name_may_be_as_long_as_names_are(tmp_path) -> None:
    write_whole(tmp_path / ("x" * 255), "new")
    write_whole(tmp_path / ("ü" * 127), "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"] * 2


def test_a_draft_is_known_by_its_name() -> None:
    assert is_draft("run.json.0123456789abcdef.new", "run.json")
    for name in ("run.json", "run.json.new", "run.json.draft", "other.0123456789abcdef.new", "run.json.mine.new"):
        assert not is_draft(name, "run.json")


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket", "file:///tmp/run", pathlib.Path("gs://bucket/run")])
def test_a_url_is_no_folder(url) -> None:
    with pytest.raises(ValueError, match=r"is a URL.*CheckpointManager.*custom_metadata"):
        local_folder(url)


@pytest.mark.parametrize("path", ["/tmp/run", "run", "a:b", "./a:/b", "/tmp/gs://bucket", "C:/run"])
def test_what_has_no_scheme_is_a_folder(path: str) -> None:
    assert local_folder(path) == pathlib.Path(os.path.abspath(path))
