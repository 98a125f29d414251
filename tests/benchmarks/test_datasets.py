"""Data sets of the studies: the idx format, and what is said when files are missing."""

import gzip
import struct

import numpy as np
import pytest

from benchmarks.tasks import datasets
from gradcomp_jax._errors import MissingDataError, UnknownNameError

FASHION = datasets.SOURCES["fashion-mnist"]


def write_idx(path, array, *, shape=None, kind=8):
    shape = array.shape if shape is None else shape
    header = bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def read_idx(path):
    return datasets.parse_idx(path, datasets.unpack(path, "install it"))


def test_read_idx_gives_back_what_was_written(tmp_path):
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz"), array)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shape": (2, 3, 5)}, "promises shape"), ({"kind": 13}, "header of an idx file")],
)
def test_read_idx_refuses_a_wrong_header(tmp_path, options, message):
    write_idx(tmp_path / "a.gz", np.arange(24).reshape(2, 3, 4), **options)
    with pytest.raises(MissingDataError, match=message):
        read_idx(tmp_path / "a.gz")


def test_read_idx_refuses_what_is_not_gzip(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    with pytest.raises(MissingDataError, match="not a readable gzip"):
        read_idx(tmp_path / "a.gz")


@pytest.mark.parametrize("place", [3, 12, 40, -6, -2])
def test_a_flipped_byte_is_one_sentence_with_the_file_and_the_remedy(tmp_path, place):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    write_idx(path, np.random.default_rng(0).integers(0, 255, (2, 28, 28)))
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(MissingDataError, match=r"train-images-idx3-ubyte.gz is .*; install it again: apt-get install"):
        datasets.load("fashion-mnist", data_dir=tmp_path)


def test_missing_fashion_mnist_names_the_command(tmp_path):
    with pytest.raises(MissingDataError, match="apt-get install -y dataset-fashion-mnist"):
        datasets.load("fashion-mnist", data_dir=tmp_path)


def test_other_files_are_not_taken_for_fashion_mnist(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((2, 28, 28)))
    with pytest.raises(MissingDataError, match="not the published file"):
        datasets.load("fashion-mnist", data_dir=tmp_path)


@pytest.mark.skipif(not FASHION.folder.is_dir(), reason=f"needs {FASHION.install}")
def test_fashion_mnist():
    data = datasets.load("fashion-mnist")
    assert data.train_x.shape == (60000, 28, 28, 1)
    assert data.test_x.shape == (10000, 28, 28, 1)
    assert data.train_x.dtype == np.float32
    assert data.train_x.max() == 1.0
    # Ten classes of equal size.
    np.testing.assert_array_equal(np.bincount(data.train_y), [6000] * 10)
    np.testing.assert_array_equal(np.bincount(data.test_y), [1000] * 10)


def test_unknown_name_suggests_the_closest():
    with pytest.raises(UnknownNameError, match="did you mean 'fashion-mnist'"):
        datasets.load("fashon-mnist")
