"""What the options and the environment say about a process, and what they cannot."""

import pytest

pytest.importorskip("typer")

from gradcomp_jax.distributed import cluster
from gradcomp_jax.experiments import SettingError

ENVIRONMENT = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


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
        (("--process-id", "-1"), "the process id must be at least 0, got -1"),
        (("--processes", "0"), "the number of processes must be at least 1, got 0"),
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
