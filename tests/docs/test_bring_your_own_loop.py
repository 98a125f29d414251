"""The page's loops, run as they are written: they send less than before, and all of them end with the same losses."""

import difflib
import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.marks import slow_but

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "bring_your_own_loop.md").read_text()
LOOPS = ("shard-map", "plain-jit", "flax-nnx", "linen", "equinox", "keras", "pmap")
EXCHANGES = {"dgc": None, "terngrad": lambda: gc.terngrad(axis_name="data", bucket_size=64)}
BLOCK = re.compile(r"<!-- ([\w-]+) -->\n```python\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.standard_promotion


def section(anchor: str) -> dict[str, str]:
    """The marked blocks of the section whose heading has this anchor."""
    for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if text.partition("\n")[0].lower().replace(" ", "-") == anchor:
            return dict(BLOCK.findall(text))
    raise AssertionError(f"the page has no section {anchor!r}")


def need(loop: str) -> None:
    """Skips a loop whose package is not there; no extra has Keras."""
    if loop == "equinox":
        pytest.importorskip("equinox", reason="equinox is not installed: pip install -e '.[test]'")
    if loop == "keras":
        os.environ["KERAS_BACKEND"] = "jax"
        pytest.importorskip("keras", reason="keras is not installed: pip install keras")


def setup(exchange: str) -> dict[str, Any]:
    """The names that all blocks share, with another exchange in the place of the page's."""
    space: dict[str, Any] = {}
    exec(dict(BLOCK.findall(PAGE))["setup"], space)
    if EXCHANGES[exchange] is not None:
        space["exchange"] = EXCHANGES[exchange]()
        space["chain"] = optax.chain(space["exchange"], space["optimizer"])
    return space


def run(block: str, exchange: str) -> dict[str, Any]:
    space = setup(exchange)
    exec(block, space)
    return space


ARGUMENTS = {
    "flax-nnx": "model state placed",
    "linen": "state placed",
    "equinox": "model opt_state placed",
    "keras": "params others opt_state memory placed",
    "pmap": "params opt_state split",
}
"""What a loop's step is called with, if not as in plain jit; before the change there is no memory."""


def audit(space: dict[str, Any], loop: str, form: str, exchange: str) -> None:
    """The assertion for anybody's program sees no fault in a loop of the page, at a limit without a byte to spare."""
    names = ARGUMENTS.get(loop, "params opt_state placed").split()
    arguments = (space[name] for name in names if form == "after" or name != "memory")
    program = space["step"].lower(*arguments).compile()
    program = program.compiled if loop == "equinox" else program
    if form == "after":
        limits = {"at_most": sent_by(exchange), "dtypes": ("uint8", "float32"), "kinds": ("all-to-all", "all-gather")}
    else:
        limits = {"at_most": DENSE, "dtypes": "float32", "kinds": "all-reduce"}
    gc.testing.assert_wire(program, axis="data", **limits)
    with pytest.raises(AssertionError, match="one device sends"):
        gc.testing.assert_wire(program, axis="data", at_most=limits["at_most"] - 1)


LOSS = 7
"""Bytes that the mean of a float32 takes among eight devices."""
DENSE = 7 * (16 * 32 + 32) + LOSS


@functools.cache
def sent_by(exchange: str) -> int:
    """Bytes of an exchange by itself, which is lowered and not compiled, and of the loss."""
    space = setup(exchange)
    params = {name: space[name] for name in ("w1", "w2")}
    lowered = gc.lower_update(params, space["exchange"], space["mesh"])
    return gc.wire_bytes(lowered.as_text(dialect="hlo")).sent + LOSS


@functools.cache
def expected(exchange: str) -> list[float]:
    """What the library's own step makes of it; ``dense`` is plain jit before the change."""
    if exchange == "dense":
        return run(section("plain-jit")["before"], "dgc")["losses"]
    return run(section("the-train-step")["train-step"], exchange)["losses"]


@pytest.mark.parametrize(
    ("loop", "exchange"),
    slow_but([("plain-jit", "dgc")], [*((loop, "dgc") for loop in LOOPS), ("shard-map", "terngrad")]),
)
def test_all_loops_train_alike(loop: str, exchange: str, compiled: Callable[[], int]) -> None:
    need(loop)
    space = run(section(loop)["after"], exchange)
    losses = space["losses"]
    np.testing.assert_allclose(losses, expected(exchange), rtol=1e-4)
    assert losses[-1] < losses[0]
    before = compiled()
    audit(space, loop, "after", exchange)
    assert compiled() == before


@pytest.mark.slow
def test_variables_of_an_nnx_model_change() -> None:
    """Statistics are the mean over the workers, and every step draws another mask, on each worker its own."""
    space = setup("dgc")
    exec(section("flax-nnx")["after"], space)
    exec(section("flax-nnx")["variables"], space)
    jax, nnx, model = space["jax"], space["nnx"], space["noisy"]
    assert space["noisy_losses"][-1] < space["noisy_losses"][0]
    assert jax.tree.leaves(nnx.state(model, nnx.RngCount)) == [5]
    _, params, others = nnx.split(model, nnx.Param, ...)
    # Where all workers have the same examples, their gradients differ by mask alone.
    workers = jax.device_count()
    same = jax.tree.map(lambda a: np.tile(a[: len(a) // workers], (workers, 1)), space["batch"])
    placed = jax.device_put(same, space["placed"][0].sharding)
    (_, changed), gradients = space["value_and_grad"](params, placed, others=others)
    own = np.asarray(jax.tree.leaves(gradients["second"]["kernel"])[0])
    assert len({gradient.tobytes() for gradient in own}) == len(own) == workers
    hidden = same[0] @ np.asarray(model.first.kernel[...]) + np.asarray(model.first.bias[...])
    seen = 0.99 * np.asarray(model.norm.mean[...]) + 0.01 * hidden.mean(axis=0)
    np.testing.assert_allclose(changed["norm"]["mean"][...], seen, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_an_nnx_optimizer(tmp_path) -> None:
    """Its marks are in ``opt_state``: the same number of workers or another goes on from it, and plain arrays are refused."""
    space = setup("dgc")
    exec(section("flax-nnx")["after"], space)
    jax, nnx, state = space["jax"], space["nnx"], space["state"]
    gc.save_checkpoint(tmp_path / "saved", state.opt_state)
    for workers in (4, 8):
        mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
        other = nnx.Optimizer(space["model"], gc.unreduced(space["chain"], mesh), wrt=nnx.Param)
        other.opt_state = gc.restore_checkpoint(tmp_path / "saved", other.opt_state)
        shapes = jax.tree.map(lambda a: a.sharding.num_devices, nnx.state(other)["opt_state"])
        assert set(jax.tree.leaves(shapes)) == {workers}
        assert jax.tree.structure(other.opt_state) == jax.tree.structure(
            gc.restore_checkpoint(tmp_path / "saved", other.opt_state)
        )
    with pytest.raises(ValueError, match=r"of a Flax NNX optimizer that is optimizer.opt_state"):
        gc.save_checkpoint(tmp_path / "other", nnx.state(state))
    with pytest.raises(ValueError, match=r"of a Flax NNX optimizer that is optimizer.opt_state"):
        gc.resize_workers(nnx.state(state), old=8, new=4)


@pytest.mark.slow
def test_a_model_of_eqx_nn() -> None:
    """Its activation is a function among its leaves: the page takes the arrays out, and the error says how."""
    need("equinox")
    space = setup("dgc")
    exec(section("equinox")["after"], space)
    exec(section("equinox")["partition"], space)
    assert space["mlp_losses"][-1] < space["mlp_losses"][0]
    with pytest.raises(TypeError, match=r"no array but a .*eqx\.partition\(model"):
        space["value_and_grad"](space["model"], space["placed"])
    with pytest.raises(TypeError, match=r"no array but a .*eqx\.partition\(model"):
        gc.init_state(space["model"], space["chain"], space["mesh"])


def test_statistics_and_seeds_of_a_keras_model() -> None:
    """The page's step takes a model with both: statistics are the workers' mean, and the seed goes on by one a step."""
    need("keras")
    space = setup("dgc")
    block = section("keras")["after"].replace("model.set_weights([w1, w2])\n", "")
    layers = "first, keras.layers.BatchNormalization(), keras.layers.Dropout(0.1, seed=7), second])"
    exec(block.replace("first, second])", layers), space)
    assert space["losses"][-1] < space["losses"][0]
    # Keras's own variables have kept what the loop began with.
    begun = [np.asarray(variable.value) for variable in space["model"].non_trainable_variables]
    assert space["others"][2].tolist() == [7, 5] and begun[2].tolist() == [7, 0]
    params = [variable.value for variable in space["model"].trainable_variables]
    (_, (mean, _, seed)), _ = space["value_and_grad"](params, space["placed"], others=begun)
    hidden = np.tanh(space["batch"][0] @ np.asarray(params[0]))
    np.testing.assert_allclose(mean, 0.01 * hidden.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert seed.tolist() == [7, 1]


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "plain-jit"])
def test_all_of_them_trained_alike_before(loop: str) -> None:
    need(loop)
    space = run(section(loop)["before"], "dgc")
    np.testing.assert_allclose(space["losses"], expected("dense"), rtol=1e-4)
    audit(space, loop, "before", "dgc")


@pytest.mark.slow
def test_model_axes() -> None:
    """Only the exchange of shards and the mean of the loss cross the workers' axis, though the loss has constraints."""
    space = setup("dgc")
    exec(section("model-axes")["model-axes"], space)
    assert space["losses"][-1] < space["losses"][0]
    params, jax, mesh = space["params"], space["jax"], space["mesh"]
    state = gc.training.TrainState(0, params, space["opt_state"])
    places = gc.state_shardings(state, mesh, param_specs=space["specs"])
    pinned = jax.jit(space["step"], out_shardings=(places.params, places.opt_state, None))
    program = pinned.lower(params, space["opt_state"], space["placed"]).compile()
    sent = gc.wire_bytes(program, mesh=mesh).by("axis")
    # A device's shard of ``w1`` is of 8 blocks of 16, of which half go out and come back; ``w2`` is dense.
    w1, w2 = 8 * (16 + 4), 16 // 2 * 4
    assert sent[("data",)].sent <= w1 + w2 + LOSS + 16
    tensor, fsdp = sent[("tensor",)].sent, sent[("fsdp",)].sent
    loose = gc.wire_bytes(space["step"].lower(params, space["opt_state"], space["placed"]).compile(), mesh=mesh).by(
        "axis"
    )
    assert (tensor, fsdp) == (loose[("tensor",)].sent, loose[("fsdp",)].sent)


def test_plain_jit_sends_less_than_before() -> None:
    sent = {}
    for form, block in section("plain-jit").items():
        if form in ("before", "after"):
            space = setup("dgc")
            exec(block, space)
            sent[form] = gc.wire_bytes(
                space["step"].lower(space["params"], space["opt_state"], space["placed"]).compile()
            )
    assert sent["after"].sent < sent["before"].sent / 3
    assert "all-reduce" in sent["before"].by("kind")


def test_typed_gradients() -> None:
    np.testing.assert_allclose(run(section("plain-jit")["typed"], "dgc")["losses"], expected("dgc"), rtol=1e-4)


@pytest.mark.parametrize("name", slow_but(("options",), ("options", "narrow")))
def test_the_train_steps_options(name: str) -> None:
    space = setup("dgc")
    exec(section("the-train-step")[name], space)
    assert float(space["metrics"]["skipped"]) == 0 and np.isfinite(float(space["metrics"]["loss"]))


@pytest.mark.slow
def test_batch_normalisation_over_all_workers() -> None:
    """With the axis's name the step is that of one worker that has the whole batch; without it is another."""
    block = section("the-train-step")["batch-norm"]

    def trained(block: str, workers: int) -> list[np.ndarray]:
        space = setup("dgc")
        jax = space["jax"]
        space["mesh"] = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
        space["chain"] = optax.chain(gc.dense(axis_name="data"), space["optimizer"])
        space["placed"] = jax.device_put(space["batch"], gc.data_sharding(space["mesh"]))
        exec(block, space)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((space["state"].params, space["state"].model_state))]

    one, together, apart = trained(block, 1), trained(block, 8), trained(block.replace(', axis_name="data"', ""), 8)
    for a, b in zip(one, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(one, apart, strict=True)) > 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_the_table_counts_the_lines(loop: str) -> None:
    """Changed: lines of yours that are gone or another; new: what the loop is longer by."""
    blocks = section(loop)
    before, after = (blocks[form].splitlines() for form in ("before", "after"))
    diff = list(difflib.ndiff(before, after))
    gone = sum(line.startswith("- ") for line in diff)
    new = max(0, sum(line.startswith("+ ") for line in diff) - gone)
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"(#{loop})" in line)
    assert [int(cell) for cell in row.strip("| ").split("|")[1:]] == [gone, new]
