"""The record of a run is not believed blindly."""

import json
import os
import shutil
import time
import warnings

import numpy as np
import pytest

from gradcomp_jax.experiments import SettingError, train_with_checkpoints
from gradcomp_jax.experiments import record as records
from tests.experiments.descent import STEPS, everything_in, thesis


def edited(**changed):
    """The record with other values, as JSON."""
    return lambda record: json.dumps({**record, **changed})


def without(name: str):
    return lambda record: json.dumps({key: value for key, value in record.items() if key != name})


BAD = {
    "epoch in quotes": edited(epoch="2"),
    "half an epoch": edited(epoch=2.5),
    "no epoch": edited(epoch=None),
    "epoch true": edited(epoch=True),
    "epoch nan": edited(epoch=float("nan")),
    "epoch negative": edited(epoch=-2),
    "epoch huge": edited(epoch=10**9),
    "epoch of 4,000 digits": edited(epoch=10**4000),
    "another epoch": edited(epoch=1),
    "losses in quotes": edited(loss=["1"] * 2 * STEPS),
    "a loss null": edited(loss=[None] * 2 * STEPS),
    "losses an object": edited(loss={"a": 1}),
    "losses in lists": edited(loss=[[1.0]] * 2 * STEPS),
    "losses too few": edited(loss=[1.0]),
    "losses too many": edited(loss=[1.0] * 99),
    "evaluations too many": edited(evaluation=[1.0] * 3),
    "seconds too few": edited(seconds=[]),
    "seconds negative": edited(seconds=[-1.0] * 2 * STEPS),
    "seconds nan": edited(seconds=[float("nan")] * 2 * STEPS),
    "workers a string": edited(workers="2"),
    "workers none": edited(workers=0),
    "what a list": edited(what=[]),
    "another run's name": edited(run="../../etc"),
    "another format": edited(format="gradcomp_jax run 999"),
    "a field more": edited(extra=1),
    "no losses": without("loss"),
    "nested": lambda _: '{"loss":' + "[" * 200_000,
    "nested what": lambda record: json.dumps(record).replace(
        '"what": {', '"what": {"a": ' + "[" * 900 + "]" * 900 + ","
    ),
    "cut off": lambda record: json.dumps(record)[:-10],
    "empty": lambda _: "",
    "not UTF-8": lambda _: b"\xff\xfe{}",
    "a list": lambda _: "[]",
    "null": lambda _: "null",
    "NaN": lambda _: "NaN",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_record_that_cannot_be_right_is_one_sentence(descent, run, bad) -> None:
    text = bad(json.loads((run / "run.json").read_bytes()))
    (run / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    before, start = everything_in(run), time.monotonic()
    with pytest.raises(SettingError, match=r"run.json is not the record of a run \(.*\): use another folder$") as error:
        train_with_checkpoints(descent, 0, run)
    # It is said at once, in one line.
    assert time.monotonic() - start < 5
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert everything_in(run) == before


def test_a_record_that_is_no_file_or_too_large_is_one_sentence(descent, run, monkeypatch) -> None:
    monkeypatch.setattr(records, "_LARGEST_RECORD", 10)
    with pytest.raises(SettingError, match=r"not the record of a run \(This has more than 10 bytes\)"):
        train_with_checkpoints(descent, 0, run)
    (run / "run.json").unlink()
    thesis(run / "run.json")
    with pytest.raises(SettingError, match=r"not the record of a run \(This is not a file\)"):
        train_with_checkpoints(descent, 0, run)
    assert (run / "run.json" / "chapter-1.tex").read_text() == "mine"
    shutil.rmtree(run / "run.json")
    os.mkfifo(run / "run.json")
    with pytest.raises(SettingError, match=r"not the record of a run \(This is not a file\)"):
        train_with_checkpoints(descent, 0, run)


def test_a_record_comes_back_bit_for_bit_also_of_a_run_that_diverged(tmp_path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)
    loss = (*bits.view(np.float64).tolist(), float("nan"), float("inf"), -0.0, 5e-324)
    what = {"method": "dgc", "learning_rate": 0.1, "clip_norm": None}
    record = records.Record(
        run="0" * 16, what=what, workers=2, epoch=1, loss=loss, evaluation=(float("nan"),), seconds=(0.0,) * len(loss)
    )
    records.write(tmp_path / "run.json", record)
    again = records.read_record(tmp_path / "run.json", len(loss))
    np.testing.assert_array_equal(np.array(again.loss), np.array(loss))
    assert np.isnan(again.evaluation) and again.what == what


def a_record() -> records.Record:
    """Of 40 steps, as long as one of a short run."""
    rng = np.random.default_rng(0)
    return records.Record(
        run="0123456789abcdef",
        what={"method": "dgc", "dataset": "digits", "seed": 0, "learning_rate": 0.1, "clip_norm": None},
        workers=2,
        epoch=2,
        loss=tuple(rng.uniform(0, 3, 40).tolist()),
        evaluation=(0.5, 0.75),
        seconds=tuple(rng.uniform(0, 1, 40).tolist()),
    )


def test_a_record_with_a_bit_flipped_is_refused_or_the_same(tmp_path) -> None:
    path, record, rng = tmp_path / "run.json", a_record(), np.random.default_rng(14)
    records.write(path, record)
    whole, refused = path.read_bytes(), 0
    for bit in rng.integers(0, 8 * len(whole), 2000).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert records.read_record(path, 20) == record
        except SettingError as error:
            assert str(error).endswith("use another folder")
            refused += 1
    assert refused > 1900


@pytest.mark.parametrize("name, value", [("loss", 300.0), ("evaluation", 0.99), ("seconds", 0.0)])
def test_a_figure_that_somebody_has_changed_is_refused(name: str, value: float, tmp_path) -> None:
    path = tmp_path / "run.json"
    records.write(path, a_record())
    written = json.loads(path.read_bytes())
    written[name][0] = value
    path.write_text(json.dumps(written))
    with pytest.raises(SettingError, match="it differs from what was saved"):
        records.read_record(path, 20)


def test_a_record_of_before_there_were_digests_is_read_with_a_warning(tmp_path) -> None:
    path = tmp_path / "run.json"
    records.write(path, a_record())
    path.write_text(without("crc32")(json.loads(path.read_bytes())))
    with pytest.warns(UserWarning, match="run.json has no digest, because an earlier version wrote it"):
        assert records.read_record(path, 20) == a_record()
    records.write(path, a_record())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert records.read_record(path, 20) == a_record()
