"""Labelled images and a text that ordinary packages have put on the machine.

Nothing is downloaded here: a loader says which command installs the package when it is not there. A further data set is one
more entry of :data:`SOURCES`.
"""

import dataclasses
import pathlib
import sysconfig
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gradcomp_jax._errors import MissingDataError, SettingError, look_up
from gradcomp_jax._files import read_file

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

    def load(self, name: str, data_dir: str | pathlib.Path | None = None) -> Data:
        """Reads the data set from ``data_dir``, or from where its package puts it; see :func:`load`."""
        if data_dir is not None and self.folder is None:
            raise SettingError(f"{name} is part of a Python package and reads no folder: drop data_dir")
        usual = self.folder() if callable(self.folder) else self.folder
        return self.read(name, usual if data_dir is None else pathlib.Path(data_dir))


def load(name: str, *, data_dir: str | pathlib.Path | None = None) -> Data:
    """Reads a data set that is installed on this machine."""
    return look_up("data set", name, SOURCES).load(name, data_dir)


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


_PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml")
"""Of the standard library, beside the modules that are no packages."""
_LEAST_TEXT, _MOST_TEXT = 10_000, 1 << 23
"""Characters."""


def _read_standard_library(name: str, folder: pathlib.Path | None) -> Text:
    """Reads the source of modules in order, in ASCII: nine tenths for training, a twentieth each for validation and test."""
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


SOURCES: dict[str, Source] = {
    "digits": Source(_read_digits, None, "pip install -e '.[cli]' in a checkout"),
    "standard-library": Source(
        _read_standard_library,
        lambda: pathlib.Path(sysconfig.get_paths()["stdlib"]),
        "a Python with its library's source",
    ),
}
