"""What the options and the environment say about a process, and what they cannot."""

import dataclasses
import pathlib

import pytest

pytest.importorskip("typer")

from gradcomp_jax.cli.options import Training
from gradcomp_jax.distributed import cluster
from gradcomp_jax.experiments import SettingError

ENVIRONMENT = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
FOLDERS = ("checkpoint", "log_dir", "data_dir", "out", "markdown")


def test_options_go_before_the_environment():
    assert cluster.find_place(None, None, None, environment=ENVIRONMENT) == cluster.Place("10.0.0.1:8476", 3, 4)
    assert cluster.find_place("[::1]:1", 0, 2, environment=ENVIRONMENT) == cluster.Place("[::1]:1", 0, 2)
    assert cluster.find_place(None, None, None, environment={}) == cluster.Place()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--coordinator", "10.0.0.1"), "the coordinator must be HOST:PORT, such as 10.0.0.1:8476, got '10.0.0.1'"),
        (("--coordinator", ":80"), "must be HOST:PORT"),
        (("--coordinator", "host:http"), "must be HOST:PORT"),
        (("--coordinator", "host:65536"), "must be HOST:PORT"),
        (("--process-id", "2", "--processes", "2"), "process id must be at least 0 and below the 2 processes, got 2"),
        (("--process-id", "-1"), "--process-id must be a whole number from 0 to 65,535, got -1"),
        (("--processes", "0"), "--processes must be a whole number from 1 to 65,536, got 0"),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(gradcomp, words, message):
    result = gradcomp("train", "--distributed", *words)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert message in line


def test_options_of_processes_need_distributed(gradcomp):
    result = gradcomp("train", "--coordinator", "10.0.0.1:8476")
    assert result.exit_code == 2
    assert "--coordinator, --process-id and --processes need --distributed" in result.stderr


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_an_environment_that_is_no_number(name):
    with pytest.raises(SettingError, match=f"{name} must be a whole number, got 'two'"):
        cluster.find_place(None, None, None, environment={name: "two"})


def test_every_option_but_folders_must_be_equal_in_all_processes():
    told = Training().must_be_equal()
    assert set(told.values()) == {None, False}
    for field in dataclasses.fields(Training):
        changed = Training(**{field.name: pathlib.Path("elsewhere") if field.name in FOLDERS else 3}).must_be_equal()
        differs = [option for option in told if changed[option] != told[option]]
        # Whether there is a checkpoint counts, and not where.
        assert len(differs) == (field.name not in FOLDERS or field.name == "checkpoint"), field.name
    assert (
        Training(checkpoint=pathlib.Path("a")).must_be_equal() == Training(checkpoint=pathlib.Path("b")).must_be_equal()
    )


def test_parameters_that_differ_are_not_verified(gradcomp):
    result = gradcomp("train", "--method", "gossip", "--verify-every", "1")
    assert result.exit_code == 2
    assert "the workers of gossip have parameters that differ: drop --verify-every" in result.stderr


@pytest.mark.parametrize("ids", ["0,1,1", "0,x", "-1", "0,"])
def test_devices_that_cannot_be_those_of_a_process_are_refused(ids):
    with pytest.raises(SettingError, match="JAX_LOCAL_DEVICE_IDS must be whole numbers with commas between, each once"):
        cluster.find_place(None, None, None, environment={cluster.DEVICES: ids})
    assert cluster.find_place(None, None, None, environment={cluster.DEVICES: "0, 3"}) == cluster.Place()
