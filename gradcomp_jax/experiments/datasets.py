"""Small labelled image sets that install with ordinary package clients.

Nothing is downloaded here: a loader reads what a package has put on the machine, and says which command installs the
package when it is not there. A further data set is one more entry of :data:`SOURCES`.
"""

import dataclasses
import gzip
import hashlib
import pathlib
import struct
import zlib
from collections.abc import Callable

import numpy as np

from gradcomp_jax._errors import MissingDataError, SettingError, look_up

_SPLIT_SEED = 2017


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Dataset:
    """Images and labels, split once and for all.

    Attributes:
      name: the registry's name.
      train_x: float32 ``[train, height, width, channels]`` in ``[0, 1]``.
      train_y: int32 ``[train]``, class numbers from 0.
      test_x: float32 ``[test, height, width, channels]`` in ``[0, 1]``.
      test_y: int32 ``[test]``.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a data set comes from.

    Attributes:
      read: makes the data set from the folder that holds its files.
      folder: where the package puts the files; None when they are part of a Python package.
      install: the command that puts them there.
    """

    read: Callable[[str, pathlib.Path | None], Dataset]
    folder: pathlib.Path | None
    install: str


def load(name: str, *, data_dir: str | pathlib.Path | None = None) -> Dataset:
    """Reads a data set that is installed on this machine.

    Args:
      name: a name of :data:`SOURCES`.
      data_dir: the folder of its files, if they are not where the package puts them.

    Raises:
      UnknownNameError: if there is no such data set.
      MissingDataError: if its files are missing or are not the published ones.
      SettingError: if ``data_dir`` is given for a data set that has no files of its own.
    """
    source = look_up("data set", name, SOURCES)
    if data_dir is not None and source.folder is None:
        raise SettingError(f"{name} is part of a Python package and reads no folder: drop data_dir")
    folder = pathlib.Path(data_dir) if data_dir is not None else source.folder
    return source.read(name, folder)


def unpack(path: pathlib.Path, install: str) -> bytes:
    """Reads a gzip file, or says that it is none, and how to get one: ``install`` is the command."""
    try:
        with gzip.open(path) as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"{path} is not a readable gzip file ({error}); install it again: {install}") from error


def parse_idx(path: pathlib.Path, raw: bytes) -> np.ndarray:
    """Reads an idx file of unsigned bytes, the format of MNIST and its kin, as uint8 in the shape that its header states."""
    # Two zero bytes, the element type (8: unsigned byte), the number of dimensions, then one
    # big-endian uint32 for each dimension.
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise MissingDataError(f"{path} does not start with the header of an idx file of bytes")
    rank = raw[3]
    shape = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if data.size != int(np.prod(shape, dtype=np.int64)):
        raise MissingDataError(f"{path} promises shape {shape} and holds {data.size} bytes")
    return data.reshape(shape)


def _read_digits(name: str, folder: pathlib.Path | None) -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        install = SOURCES[name].install
        raise MissingDataError(f"digits come with scikit-learn; install it: {install}") from error
    bunch = load_digits()
    images = (bunch.images.astype(np.float32) / np.float32(16.0))[..., None]
    labels = bunch.target.astype(np.int32)
    # A fifth of every class is the test set, the same fifth for everybody.
    order = np.random.default_rng(_SPLIT_SEED)
    is_test = np.zeros(labels.shape, bool)
    for label in np.unique(labels):
        members = order.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) / 5)]] = True
    return Dataset(name, images[~is_test], labels[~is_test], images[is_test], labels[is_test])


# Of the unpacked bytes, so that a file which was packed again is still recognised.
_FASHION_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def _read_fashion_mnist(name: str, folder: pathlib.Path | None) -> Dataset:
    if folder is None:
        raise SettingError(f"{name} is read from a folder: give data_dir")
    arrays = {}
    for stem, digest in _FASHION_SHA256.items():
        path = folder / f"{stem}.gz"
        if not path.is_file():
            raise MissingDataError(f"{name} is not installed: there is no {path}; install it: {SOURCES[name].install}")
        raw = unpack(path, SOURCES[name].install)
        if hashlib.sha256(raw).hexdigest() != digest:
            raise MissingDataError(
                f"{path} is not the published file (its sha256 differs); install it again: {SOURCES[name].install}"
            )
        arrays[stem] = parse_idx(path, raw)

    def images(stem: str) -> np.ndarray:
        return (arrays[stem].astype(np.float32) / np.float32(255.0))[..., None]

    return Dataset(
        name,
        images("train-images-idx3-ubyte"),
        arrays["train-labels-idx1-ubyte"].astype(np.int32),
        images("t10k-images-idx3-ubyte"),
        arrays["t10k-labels-idx1-ubyte"].astype(np.int32),
    )


SOURCES: dict[str, Source] = {
    "digits": Source(_read_digits, None, "pip install 'gradcomp-jax[cli]'"),
    "fashion-mnist": Source(
        _read_fashion_mnist,
        pathlib.Path("/usr/share/datasets/fashion-mnist"),
        "apt-get install -y dataset-fashion-mnist",
    ),
}
