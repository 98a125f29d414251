"""Labelled images and texts that install with ordinary package clients.

Nothing is downloaded here: a loader reads what a package has put on the machine, and says which command installs the
package when it is not there. A further data set is one more entry of :data:`SOURCES`.
"""

import ast
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import pathlib
import struct
import sysconfig
import zlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gradcomp_jax._errors import MissingDataError, SettingError, look_up
from gradcomp_jax._files import read_file
from gradcomp_jax.experiments import packages
from gradcomp_jax.experiments.archives import LARGEST, LARGEST_MEMBER

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

    def for_tuning(self) -> "Dataset":
        """Returns the training set alone, its last tenth in the place of the test set."""
        kept = len(self.train_x) - len(self.train_x) // 10
        x, y = self.train_x, self.train_y
        return Dataset(self.name, x[:kept], y[:kept], x[kept:], y[kept:])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Text:
    """A text as numbers, in the split of the publications.

    Attributes:
      name: the registry's name.
      train: ``[length]``, tokens from 0, unsigned integers.
      validation: likewise.
      test: likewise.
      vocabulary: how many different tokens there are.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    vocabulary: int

    def for_tuning(self) -> "Text":
        """Returns the text with its validation part in the place of the test part."""
        return dataclasses.replace(self, test=self.validation)


Data: TypeAlias = Dataset | Text


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a data set comes from.

    Attributes:
      read: makes the data set from the folder that holds its files.
      folder: where the package puts the files, or a function that returns it; None when they are part of a Python package.
      install: the command that puts them there.
    """

    read: Callable[[str, pathlib.Path | None], Data]
    folder: pathlib.Path | Callable[[], pathlib.Path] | None
    install: str


def load(name: str, *, data_dir: str | pathlib.Path | None = None) -> Data:
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
    usual = source.folder() if callable(source.folder) else source.folder
    folder = pathlib.Path(data_dir) if data_dir is not None else usual
    return source.read(name, folder)


def unpack(path: pathlib.Path, install: str) -> bytes:
    """Reads a gzip file, or says that it is none, and how to get one: ``install`` is the command."""
    try:
        # Nothing is waited for, as opening a pipe would.
        packed = read_file(path, limit=LARGEST, follow=True)
        with gzip.GzipFile(fileobj=io.BytesIO(packed or b"")) as file:
            raw = file.read(LARGEST_MEMBER + 1)
        if len(raw) > LARGEST_MEMBER:
            raise OSError(f"it holds more than {LARGEST_MEMBER:,} bytes")
        return raw
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

    return _of_digits(name, {stem.split("-idx")[0]: array for stem, array in arrays.items()})


def _of_digits(name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    """MNIST and its kin, of the arrays of their four files."""

    def images(stem: str) -> np.ndarray:
        return (arrays[stem].astype(np.float32) / np.float32(255.0))[..., None]

    return Dataset(
        name,
        images("train-images"),
        arrays["train-labels"].astype(np.int32),
        images("t10k-images"),
        arrays["t10k-labels"].astype(np.int32),
    )


def _read_mnist(name: str, folder: pathlib.Path | None) -> Dataset:
    arrays = {}
    for stem in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        file = f"{stem}-idx{3 if 'images' in stem else 1}-ubyte"
        arrays[stem] = parse_idx(pathlib.Path(file), packages.read_file(name, folder, file))
    return _of_digits(name, arrays)


def _read_cifar10(name: str, folder: pathlib.Path | None) -> Dataset:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDataError(
            f"{name} is kept as PNG; install pillow: pip install -e '.[cli]' in a checkout"
        ) from error

    def images(*files: str) -> np.ndarray:
        # Each image is one row of a picture: its pixels one after the other, three bytes each.
        rows = []
        for file in files:
            with Image.open(io.BytesIO(packages.read_file(name, folder, file))) as picture:
                rows.append(np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3))
        return np.concatenate(rows).astype(np.float32) / np.float32(255.0)

    def labels(file: str) -> np.ndarray:
        return np.asarray(json.loads(packages.read_file(name, folder, file)), np.int32)

    return Dataset(
        name,
        images(*(f"data_batch_{i}.png" for i in range(1, 6))),
        labels("train_lables.json"),
        images("test_batch.png"),
        labels("test_lables.json"),
    )


def _read_enwik8(name: str, folder: pathlib.Path | None) -> Text:
    """The first 90 million bytes for training, five million each for validation and test, as is usual."""
    text = np.frombuffer(gzip.decompress(packages.read_file(name, folder, "enwik8.gz")), np.uint8)
    return Text(name, text[:90_000_000], text[90_000_000:95_000_000], text[95_000_000:], 256)


def _read_penn_treebank(name: str, folder: pathlib.Path | None) -> Text:
    """Mikolov's split and vocabulary; the end of a line is a word of its own."""
    # Texts as literals in a module, which is read and not run.
    module = ast.parse(packages.read_file(name, folder, "__init__.py"))
    texts = {
        node.targets[0].slice.value: node.value.value  # type: ignore[attr-defined]
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    }
    words = {split: [*text.rstrip("\n").replace("\n", " <eos> ").split(), "<eos>"] for split, text in texts.items()}
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words["train"]))}
    train, validation, test = (
        np.array([numbers[word] for word in words[split]], np.uint16) for split in ("train", "valid", "test")
    )
    return Text(name, train, validation, test, len(numbers))


_PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml")
"""Of the standard library, beside the modules that are no packages."""
_LEAST_TEXT, _MOST_TEXT = 10_000, 1 << 23
"""Characters."""


def _standard_library() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _read_standard_library(name: str, folder: pathlib.Path | None) -> Text:
    """The source of modules in order, in ASCII: nine tenths for training, a twentieth each for validation and test."""
    if folder is None:
        raise SettingError(f"{name} is read from a folder: give data_dir")
    found = [*folder.glob("*.py"), *(path for package in _PACKAGES for path in (folder / package).rglob("*.py"))]
    # What an installation has written about itself differs by machine.
    own = ("_sysconfigdata", "sitecustomize", "usercustomize")
    parts, length = [], 0
    for path in sorted(found):
        if path.name.startswith(own) or {"test", "tests"} & set(path.relative_to(folder).parts) or length >= _MOST_TEXT:
            continue
        try:
            raw = read_file(path, limit=_MOST_TEXT, follow=True) or b""
        except OSError as error:
            raise MissingDataError(f"{path} cannot be read: {error.strerror or error}") from error
        parts.append(raw.replace(b"\r\n", b"\n").decode("ascii", "ignore"))
        length += len(parts[-1])
    if length < _LEAST_TEXT:
        raise MissingDataError(
            f"{name} is the source of Python's standard library, and {folder} has {length:,} characters of it: name a folder"
            " that has Python files, by data_dir or --data-dir, or take a Python whose library is not in a zip file"
        )
    text = np.frombuffer("".join(parts)[:_MOST_TEXT].encode("ascii"), np.uint8)
    train, validation, test = np.split(text, [len(text) * twentieths // 20 for twentieths in (18, 19)])
    return Text(name, train, validation, test, 128)


_FETCHED: dict[str, Callable[[str, pathlib.Path | None], Data]] = {
    "mnist": _read_mnist,
    "cifar10": _read_cifar10,
    "enwik8": _read_enwik8,
    "penn-treebank": _read_penn_treebank,
}

SOURCES: dict[str, Source] = {
    "digits": Source(_read_digits, None, "pip install -e '.[cli]' in a checkout"),
    "fashion-mnist": Source(
        _read_fashion_mnist,
        pathlib.Path("/usr/share/datasets/fashion-mnist"),
        "apt-get install -y dataset-fashion-mnist",
    ),
    "standard-library": Source(_read_standard_library, _standard_library, "a Python with its library's source"),
} | {
    name: Source(read, functools.partial(packages.folder_of, name), f"gradcomp data {name}")
    for name, read in _FETCHED.items()
}
