"""The page on islands runs as it is written, and names what is there."""

import os
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands.deciding import MOST_WINDOWS
from gradcomp_jax.islands.processes import MEETINGS
from tests.docs.test_guides import DOCS, run, text_of
from tests.docs.test_method_pages import check_names_and_links, python_blocks
from tests.network.processes import PATIENCE_S, environment, free_port, started, wait


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_page_runs(monkeypatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("PLACE", raising=False)
    monkeypatch.delenv("ISLAND", raising=False)
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    names, (trained, followed, weights) = run("islands")
    assert trained.startswith("london {'island/round': ")
    number = int(re.match(r"rounds: (\d+) shape: \(64, 16\)", followed)[1])
    assert number >= 3 and names["island"].diagnostics()["island/accepted"] >= 3
    assert weights.count("delta: ") == 3 and weights.endswith("version 6 equal: True\n")
    # What the follower read is what the island has. How good it is depends on how fast the machine is: a few rounds overshoot.
    own = names["island"]._exchanging.island.log.now
    assert own.round == number
    np.testing.assert_array_equal(names["centre"]["w"].reshape(-1), own.state.centre)
    assert (names["centre"]["w"] != 0).any()


@pytest.mark.slow
def test_the_program_runs_as_two_processes_of_one_island(tmp_path) -> None:
    pytest.importorskip("obstore")
    env = environment(2, PYTHONPATH=os.pathsep.join(sys.path), TMPDIR=str(tmp_path), ISLAND="london")
    env |= {"PLACE": str(tmp_path / "run"), "JAX_NUM_PROCESSES": "2"}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    commands = [[sys.executable, "-c", python_blocks(text_of("islands"))[0]]] * 2
    environments = [env | {"JAX_PROCESS_ID": str(index)} for index in range(2)]
    with started(tmp_path / "logs", commands, environments) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    one, other = (process.stdout.splitlines()[-1] for process in running)
    assert one == other and one.startswith("london {'island/round': ")
    assert (tmp_path / "island-london" / "island.record").exists()


def test_names_and_links_lead_somewhere() -> None:
    check_names_and_links(text_of("islands"), DOCS)


def test_the_page_says_what_is_refused_and_how_long_a_window_is() -> None:
    text = " ".join(text_of("islands").split())
    assert MOST_WINDOWS == 8 and "up to eight times as long" in text
    assert MEETINGS == 8 and "every `every // 8` steps after the last departure" in text
    params = {"w": jnp.ones((8, 8))}
    for make in (
        lambda: gc.compressors.rotated(4, block=64),
        lambda: gc.compressors.in_frequency(gc.compressors.block_quantized(block=64)),
        lambda: gc.compressors.low_rank(2, (8, 8)),
    ):
        assert not gc.islands.codec(make(), params, mask=True).same_bits
