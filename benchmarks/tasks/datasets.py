"""Labelled images and texts of the studies, which package clients bring.

Nothing is downloaded here: a loader reads what a package has put on the machine, and says which command installs the
package when it is not there.
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
import zlib
from collections.abc import Callable

import numpy as np

from benchmarks.tasks import packages
from benchmarks.tasks.archives import LARGEST, LARGEST_MEMBER
from gradcomp_jax._errors import MissingDataError, SettingError, look_up
from gradcomp_jax._files import read_file
from gradcomp_jax.experiments import datasets
from gradcomp_jax.experiments.datasets import Data, Dataset, Source, Text


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


_FETCHED: dict[str, Callable[[str, pathlib.Path | None], Data]] = {
    "mnist": _read_mnist,
    "cifar10": _read_cifar10,
    "enwik8": _read_enwik8,
    "penn-treebank": _read_penn_treebank,
}

SOURCES: dict[str, Source] = (
    datasets.SOURCES
    | {
        "fashion-mnist": Source(
            _read_fashion_mnist,
            pathlib.Path("/usr/share/datasets/fashion-mnist"),
            "apt-get install -y dataset-fashion-mnist",
        ),
    }
    | {
        name: Source(read, functools.partial(packages.folder_of, name), f"python benchmarks/data.py {name}")
        for name, read in _FETCHED.items()
    }
)
"""Those of the package among them."""


def load(name: str, *, data_dir: str | pathlib.Path | None = None) -> Data:
    """Reads a data set, as :func:`gradcomp_jax.experiments.load` does."""
    return look_up("data set", name, SOURCES).load(name, data_dir)


def for_tuning(data: Data) -> Data:
    """Returns the data with what is not for the end in the place of the test part.

    That is the validation part of a text, and the last tenth of the images for training, which are then fewer.
    """
    if isinstance(data, Text):
        return dataclasses.replace(data, test=data.validation)
    kept = len(data.train_x) - len(data.train_x) // 10
    x, y = data.train_x, data.train_y
    return Dataset(data.name, x[:kept], y[:kept], x[kept:], y[kept:])
