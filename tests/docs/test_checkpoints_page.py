"""docs/checkpoints.md: its code runs as written, and what is restored is what was saved."""

import pathlib

import jax
import numpy as np
import pytest
from flax import jax_utils

import gradcomp_jax as gc
from tests.docs.test_method_pages import check_names_and_links, python_blocks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
TEXT = PAGE.read_text(encoding="utf-8")
PMAP = TEXT.partition("## Under pmap")[2].partition("## ")[0]


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the page's code leaves."""
    names: dict = {"__name__": "page"}
    for block in python_blocks(TEXT.replace(PMAP, "")):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def per_device(state) -> list[gc.PerDevice]:
    return [x for x in jax.tree.leaves(state, is_leaf=gc.per_device.is_per_device) if gc.per_device.is_per_device(x)]


def equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_names_and_links() -> None:
    check_names_and_links(TEXT, PAGE.parent)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_manager_keeps_two_steps(page) -> None:
    assert sorted(path.name for path in (page["folder"] / "run").iterdir()) == ["1", "2"]


def test_flax_s_state_comes_back_whole(page) -> None:
    own = page["own5"]
    assert type(own) is page["TrainState"] and own.step == 3 and type(own.step) is int
    equal(own.params, page["own"].params)
    resized = gc.resize_workers(page["own"].opt_state, old=8, new=5)
    equal(own.opt_state, resized)


@pytest.mark.slow
def test_under_pmap_unreplicate_loses_what_the_page_s_way_keeps(page) -> None:
    """The mean of what workers hold back is kept, on other numbers of workers too; the first one's alone is another."""
    names = dict(page)
    for block in python_blocks(PMAP):
        exec(compile(block, str(PAGE), "exec"), names)
    replicated, folder, tx = names["replicated"], names["folder"], names["tx"]
    equal(names["same"], replicated)
    batch = (names["split"], np.sin(names["split"][..., :1]))
    equal(names["pmapped"](*names["same"], batch), names["pmapped"](*replicated, batch))

    def held(state) -> np.ndarray:
        """The sum over the workers of what they hold back of both tensors."""
        memories = [leaf for leaf in per_device(state) if leaf.value.shape[-1] > 1]
        rows = [np.asarray(leaf.value, np.float64).reshape(-1, leaf.rows, leaf.value.shape[-1]) for leaf in memories]
        return np.concatenate([each.sum(axis=0).ravel() for each in rows])

    params = jax.tree.map(lambda x: x[0], replicated[0])
    want = held(replicated)
    for workers in (8, 4):
        lanes = {"axis_name": "data", "axis_size": workers, "in_axes": None}
        axes = gc.state_axes(jax.eval_shape(jax.vmap(tx.init, **lanes), params))
        like = (params, jax.vmap(tx.init, out_axes=axes, **lanes)(params))
        restored = gc.restore_checkpoint(folder / "pmap", like)
        np.testing.assert_allclose(held(restored) / workers, want / 8, rtol=1e-6, atol=1e-9)
    # The other way: nothing shows it to the save, and seven eighths of what was not sent are gone.
    one = jax_utils.unreplicate(replicated)
    gc.save_checkpoint(folder / "unreplicated", one)
    lost = gc.restore_checkpoint(folder / "unreplicated", one)
    equal(lost, one)
    assert np.abs(held(lost) - want / 8).max() > 0.1 * np.abs(want / 8).max()
