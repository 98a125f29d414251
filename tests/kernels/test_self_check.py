"""Kernels for TPU are used only where they returned what NumPy returns."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.core import passes
from gradcomp_jax.kernels import dealt_on_tpu, self_check
from gradcomp_jax.memory.residual import Residual

DEAL = kernels.Deal(1023 * 1024, 1024, 1024)


@pytest.fixture
def on_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets this process have a TPU, whose kernels are interpreted."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.delenv(dealt_on_tpu.SWITCH, raising=False)
    checked = self_check.difference
    monkeypatch.setattr(self_check, "difference", lambda: checked(interpret=True))
    self_check.passed.cache_clear()
    yield
    self_check.passed.cache_clear()


def test_kernels_that_agree_are_used(on_tpu: None) -> None:
    def step(x: Any) -> Any:
        # It is asked while a program is traced, under an axis.
        assert dealt_on_tpu.takes(DEAL, 1024)
        return jax.lax.psum(x, "workers")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(jax.vmap(step, axis_name="workers"))(np.ones(2, np.float32))


def test_kernels_that_differ_are_not_used_and_one_warning_says_so(
    on_tpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = dealt_on_tpu.placed_in_matrix

    def one_bit_off(*args: Any, **options: Any) -> Any:
        return place(*args, **options).at[5, 7].add(1)

    monkeypatch.setattr(dealt_on_tpu, "placed_in_matrix", one_bit_off)
    with pytest.warns(RuntimeWarning, match="not used on this TPU .*: one entry of each block differs in 1 of 65536"):
        assert not dealt_on_tpu.takes(DEAL, 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dealt_on_tpu.takes(DEAL, 1024)


def test_kernels_that_do_not_compile_are_not_used(on_tpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("no such instruction\nand more")

    monkeypatch.setattr(dealt_on_tpu, "best_of_dealt", fails)
    with pytest.warns(RuntimeWarning, match="NotImplementedError: no such instruction. XLA"):
        assert not dealt_on_tpu.takes(DEAL, 1024)


def test_a_kernel_makes_only_targets_that_are_made_entry_by_entry() -> None:
    class ByRow(Residual):
        by_entry = False

        def compensate(self, gradient: Any, memory: Any) -> Any:
            return (gradient + memory) / abs(gradient).max(axis=1, keepdims=True), memory

    rows = np.ones((2, 4), np.float32)
    turn = passes.Bucket([])
    assert turn.parts(gc.memory.residual(), rows, rows) is not None
    assert turn.parts(ByRow(1.0), rows, rows) is None
    assert turn.parts(gc.memory.residual(), rows, rows.astype(np.float16)) is None
    traced = jax.jit(lambda m: jnp.float32(turn.parts(gc.memory.residual(decay=m), rows, rows) is None))
    assert traced(0.5) == 1


def test_nothing_is_checked_without_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dealt_on_tpu.SWITCH, raising=False)
    self_check.passed.cache_clear()
    monkeypatch.setattr(self_check, "difference", lambda: pytest.fail("checked"))
    assert not dealt_on_tpu.takes(DEAL, 1024)
