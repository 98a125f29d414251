"""Data sets: shapes, the split, and what is said when files are missing."""

import numpy as np
import pytest

from gradcomp_jax._errors import MissingDataError, SettingError, UnknownNameError
from gradcomp_jax.experiments import datasets


def test_digits_shapes_and_ranges():
    data = datasets.load("digits")
    assert len(data.train_x) + len(data.test_x) == 1797
    for images, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert images.shape == (len(labels), 8, 8, 1)
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        assert images.min() == 0.0
        assert images.max() == 1.0
        assert set(labels.tolist()) == set(range(10))


def test_digits_split_takes_a_fifth_of_every_class():
    data = datasets.load("digits")
    for label in range(10):
        test = int(np.sum(data.test_y == label))
        total = test + int(np.sum(data.train_y == label))
        assert abs(test - total / 5) <= 0.5


def test_digits_split_is_a_partition_and_always_the_same():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    first, second = datasets.load("digits"), datasets.load("digits")
    np.testing.assert_array_equal(first.test_x, second.test_x)
    np.testing.assert_array_equal(first.train_y, second.train_y)
    both = np.concatenate([first.train_x, first.test_x]).reshape(-1, 64)
    original = sklearn_datasets.load_digits().data.astype(np.float32) / np.float32(16)
    np.testing.assert_array_equal(both[np.lexsort(both.T)], original[np.lexsort(original.T)])


def test_unknown_name_suggests_the_closest():
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        datasets.load("digts")


def test_a_folder_for_digits_is_refused(tmp_path):
    with pytest.raises(SettingError, match="drop data_dir"):
        datasets.load("digits", data_dir=tmp_path)


def test_the_standard_library_is_there_wherever_python_is():
    text, again = (datasets.load("standard-library") for _ in range(2))
    parts = (text.train, text.validation, text.test)
    assert all(part.dtype == np.uint8 and part.max() < text.vocabulary for part in parts)
    length = sum(map(len, parts))
    assert length > 2_000_000
    np.testing.assert_allclose([len(part) / length for part in parts], [0.9, 0.05, 0.05], atol=1e-5)
    np.testing.assert_array_equal(text.train, again.train)
    # A text, and not what a machine has written of itself.
    whole = b"".join(part.tobytes() for part in parts)
    assert b"def dataclass(" in whole and b"class JSONEncoder" in whole and b"build_time_vars = {" not in whole


def test_a_library_is_its_modules_in_order_without_tests_and_in_ascii(tmp_path):
    package = tmp_path / "tests" / "json"
    (package / "tests").mkdir(parents=True)
    (tmp_path / "tests" / "b.py").write_text("b" * 9_990 + "\u00e4", encoding="utf-8")
    (tmp_path / "tests" / "a.py").write_bytes(b"a\r\n")
    (package / "__init__.py").write_text("c" * 8)
    for left_out in ("json/tests/test_json.py", "sitecustomize.py", "_sysconfigdata_m.py", "notes.txt"):
        (tmp_path / "tests" / left_out).write_text("x")
    text = datasets.load("standard-library", data_dir=tmp_path / "tests")
    whole = b"".join(part.tobytes() for part in (text.train, text.validation, text.test))
    assert whole == b"a\n" + 9_990 * b"b" + 8 * b"c"


def test_a_library_without_its_source_is_one_sentence_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(MissingDataError, match=r"python311\.zip has 0 characters of it: name a folder.* --data-dir"):
        datasets.load("standard-library")
