"""docs/checkpoints.md: its code runs as written, and what is restored is what was saved."""

import pathlib

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.docs.test_method_pages import check_names_and_links, python_blocks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the page's code leaves."""
    names: dict = {"__name__": "page"}
    for block in python_blocks(TEXT):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def per_device(state) -> list[gc.PerDevice]:
    return [x for x in jax.tree.leaves(state, is_leaf=gc.per_device.is_per_device) if gc.per_device.is_per_device(x)]


def equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_names_and_links() -> None:
    check_names_and_links(TEXT, PAGE.parent)


def test_bit_for_bit_on_as_many_workers(page) -> None:
    saved = gc.restore_checkpoint(page["folder"] / "saved", page["fresh"](8)[0])
    equal(page["restored"], saved)
    equal(page["state"], saved)
    equal(page["same5"], page["state5"])
    assert any(np.any(leaf.value) for leaf in per_device(saved) if leaf.kind == "worker")
    assert int(page["state"].step) == 3 and int(page["state5"].step) == 6


def test_means_are_kept_from_5_workers_to_8(page) -> None:
    """Trained on 8, on 5, and back on 8 through a manager."""
    compared = 0
    for before, after in zip(per_device(page["state5"]), per_device(page["state8"]), strict=True):
        if before.kind != "worker":
            continue
        want, got = (
            np.asarray(leaf.value, np.float64).reshape(n, leaf.rows, -1).mean(axis=0)
            for leaf, n in ((before, 5), (after, 8))
        )
        limit = np.abs(np.asarray(after.value)[: after.rows]).reshape(want.shape) * 2.0**-24 / 8 * 1.01
        assert (np.abs(got - want) <= limit + 2.0**-50).all()
        compared += np.any(want)
    assert compared >= 2
    equal(page["state8"].params, page["state5"].params)


def test_the_manager_keeps_two_steps(page) -> None:
    assert sorted(path.name for path in (page["folder"] / "run").iterdir()) == ["1", "2"]


def test_flax_s_state_comes_back_whole(page) -> None:
    own = page["own5"]
    assert type(own) is page["TrainState"] and own.step == 3 and type(own.step) is int
    equal(own.params, page["own"].params)
    resized = gc.resize_workers(page["own"].opt_state, old=8, new=5)
    equal(own.opt_state, resized)
