"""Calibration on simulated devices: that it runs, agrees, and survives a file. Its times say nothing here."""

import copy
import importlib
import json
import math
import types

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import planning
from gradcomp_jax.planning import Calibration, calibrate
from gradcomp_jax.planning.calibrate import KINDS, _entries, _once

SIZES = (2**10, 2**14)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def found(mesh) -> Calibration:
    params = {"w": jax.ShapeDtypeStruct((64, 1024), "float32")}
    return calibrate(mesh, axis_name="data", sizes=SIZES, repeats=2, methods=("dense", "terngrad"), params=params)


@pytest.mark.slow
def test_every_kind_is_measured(found) -> None:
    assert found.workers == 4 and set(found.fits) == set(KINDS)
    for kind, fitted in found.fits.items():
        assert [p.sent for p in fitted.points] == [pytest.approx(size, rel=0.1) for size in SIZES], kind
        assert all(0 < p.least <= p.seconds <= p.most for p in fitted.points)
        assert found.seconds(kind, 2**12) > 0
    assert found.seconds("reduce-scatter", 2**12) == found.seconds("all-to-all", 2**12)
    assert set(found.device.copies) == {"dense", "terngrad"} and found.device.copy_rate > 0


@pytest.mark.parametrize(("longest", "times"), [(math.inf, 3), (1e3, 3), (0.4, 2), (1e-3, 1)])
def test_a_pause_before_each_collective_and_fewer_where_they_take_long(mesh, monkeypatch, longest, times) -> None:
    paused: list[float] = []
    # The clock stands still, so every collective takes the least time there is, whatever this machine is doing.
    clock = types.SimpleNamespace(sleep=paused.append, perf_counter=lambda: 0.0)
    monkeypatch.setattr(importlib.import_module("gradcomp_jax.planning.calibrate"), "time", clock)
    calibrate(
        mesh, axis_name="data", kinds=["all-reduce"], sizes=SIZES, repeats=3, longest=longest, pause=0.2, methods=()
    )
    assert paused == [0.2] * times * len(SIZES)


@pytest.mark.slow
def test_a_file_holds_all_of_it(found, tmp_path) -> None:
    found.save(tmp_path / "link.json")
    assert Calibration.load(tmp_path / "link.json") == found
    kept = json.loads((tmp_path / "link.json").read_text())
    assert kept["fits"]["all-reduce"]["worst_error"] >= kept["fits"]["all-reduce"]["median_error"] >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_has_that_collective_and_sends_those_bytes(mesh, kind) -> None:
    """What is timed is what its size says, by the audit of the compiled program."""
    entries, sent = _entries(kind, 2**14, 4)
    spec = jax.P("data")
    mapped = jax.shard_map(
        lambda x: _once(kind, "data", 4, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    once = jax.jit(mapped)
    x = jax.device_put(np.arange(4 * entries, dtype=np.float32), jax.NamedSharding(mesh, spec))
    report = gc.wire_bytes(once.lower(x).compile())
    assert {k: (t.count, t.sent) for k, t in report.by("kind").items()} == {kind: (1, sent)}
    assert once(x).shape == x.shape


@pytest.mark.slow
def test_a_prediction_uses_it(found) -> None:
    workload = gc.Workload(1.0, ((1024, 1024),))
    cluster = gc.Cluster(4, gc.Link(1.0, 100.0))
    got = gc.predict(workload, cluster, "dense", calibration=found)
    sent = 2 * 3 / 4 * 4 * 2**20
    assert got.outer == pytest.approx(found.seconds("all-reduce", sent), rel=1e-3)
    assert got.compress == found.device.compression("dense", 2**20)
    with pytest.raises(ValueError, match="the calibration is of 4 workers, and 8 exchange here"):
        gc.predict(workload, gc.Cluster(8, gc.Link(1.0, 0.0)), "dense", calibration=found)


@pytest.mark.slow
def test_between_nodes_a_device_sends_its_shard(found) -> None:
    """The devices of a node shared its link when it was calibrated: a prediction must not count them again."""
    inner = gc.Link(1e9, 1e-6)
    cluster = gc.Cluster(8, gc.Link(1.0, 100.0), 2, inner)
    got = gc.predict(gc.Workload(1.0, [(1024, 1024)]), cluster, "dense", calibration=found)
    shard = 2 * 3 / 4 * 4 * 2**20 / 2
    assert got.layout == "hierarchical"
    assert got.outer == pytest.approx(found.seconds("all-reduce", shard), rel=1e-3)
    assert got.sent == pytest.approx(2 * shard, rel=1e-3)


def test_bad_input_is_named(mesh, tmp_path) -> None:
    with pytest.raises(ValueError, match="axis_name must be one of 'data', got 'date'; did you mean 'data'"):
        calibrate(mesh, axis_name="date")
    with pytest.raises(ValueError, match="sizes must be at least two"):
        calibrate(mesh, axis_name="data", sizes=[8, 8])
    with pytest.raises(ValueError, match="kind must be one of"):
        calibrate(mesh, axis_name="data", kinds=["all_reduce"])
    with pytest.raises(ValueError, match="method must be one of"):
        calibrate(mesh, axis_name="data", sizes=SIZES, kinds=["all-reduce"], methods=["terngard"])
    with pytest.raises(ValueError, match="pause must be seconds of at least 0, got -1"):
        calibrate(mesh, axis_name="data", pause=-1)
    alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="has one device"):
        calibrate(alone, axis_name="data")
    (tmp_path / "no.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="this is no calibration"):
        Calibration.load(tmp_path / "no.json")
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        Calibration.load(tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"nothing is known of all-gather: calibrate\(mesh, kinds="):
        Calibration(2, {}).seconds("all-gather", 1.0)


_KEPT = {
    "workers": 4,
    "fits": {
        "all-reduce": {
            "alpha_s": 1e-4,
            "beta_s_per_byte": 1e-9,
            "points": [[8, 1e-4, 1e-4, 2e-4], [64, 3e-4, 1e-4, 4e-4]],
        }
    },
    "device": {"copy_rate": 1e12, "copies": {"dgc": 3.0}},
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workers", "four", "workers must be a Python number"),
        ("workers", 0, "workers must be an integer of at least 1, got 0"),
        ("fits", [], "has no attribute 'items'"),
        ("fits", {"all-reduced": {}}, "did you mean 'all-reduce'"),
        ("fits/all-reduce/alpha_s", "fast", "alpha_s of all-reduce must be a number of at least 0, got 'fast'"),
        ("fits/all-reduce/beta_s_per_byte", math.nan, "must be a number of at least 0, got nan"),
        ("fits/all-reduce/points", [[64, 1, 1, 1], [8, 1, 1, 1]], "points of all-reduce must be of sizes that rise"),
        ("fits/all-reduce/points", [[8, 0, 0, 0]], "the bytes and the seconds of all-reduce must be above 0"),
        ("fits/all-reduce/points", [[8, 1]], "a point of all-reduce must be four numbers"),
        ("fits/all-reduce", {"points": [[8, 1, 1, 1]]}, "'alpha_s' is missing"),
        ("device/copy_rate", 0, "copy_rate must be above 0"),
        ("device/copies", {"dgc": -3.0}, "copies of dgc must be a number of at least 0, got -3.0"),
        ("device/copies", {"dcg": 3.0}, "did you mean 'dgc'"),
        ("device", {"rate": 1}, "'copies' is missing"),
    ],
)
def test_a_file_that_was_edited_is_one_sentence(path, value, message) -> None:
    assert Calibration.from_dict(copy.deepcopy(_KEPT)).fits["all-reduce"].seconds(8) == 1e-4
    kept = copy.deepcopy(_KEPT)
    *folders, name = path.split("/")
    place = kept
    for folder in folders:
        place = place[folder]
    place[name] = value
    with pytest.raises(ValueError, match=r"^this is no calibration \(") as caught:
        Calibration.from_dict(kept)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_step_of_a_user_is_profiled() -> None:
    def step(params, batch):
        loss, gradient = jax.value_and_grad(lambda p: ((batch @ p["w"]) ** 2).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    params = {"w": np.ones((64, 32), np.float32), "b": np.ones((5,), np.float32)}
    # Donated arguments are copies: the second call has them again.
    found = planning.profile_step(jax.jit(step, donate_argnums=0), (params, np.ones((8, 64), np.float32)), repeats=3)
    assert sorted(found.shapes) == [(5,), (64, 32)] and found.values == 64 * 32 + 5
    assert found.compute > 0 and found.memory >= 4 * found.values
    with pytest.raises(ValueError, match="repeats must be an integer of at least 1"):
        gc.profile_step(step, (params, np.ones((8, 64), np.float32)), repeats=0)
