"""Replicas on TPU: an exchange that arrives late waits for nothing of the step that it is in."""

import pytest

from benchmarks import tpu_programs as tpu
from tests.compiled_programs import exchanges_wait

from .programs import needs_compiler

pytestmark = needs_compiler


@pytest.mark.slow
@pytest.mark.parametrize("delay", (0, 5))
def test_an_exchange_that_arrives_late_waits_for_nothing_of_its_step(delay: int) -> None:
    assert exchanges_wait(tpu.LARGE, delay) == [delay == 0] * 4
