"""``--from module:function``: what it trains, what it is judged by, and what each mistake is told."""

import dataclasses
import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")

from gradcomp_jax.experiments import SettingError, Trainer, compare, own_problem

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
PARAMS = {"w": np.zeros((6, 2), np.float32), "frozen": None}
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]
HELD_OUT = [(X[32:37], Y[32:37]), (X[37:], Y[37:])]


def loss(params, batch):
    x, y = batch
    logits = jax.nn.log_softmax(x @ params["w"])
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


def loss_and_accuracy(params, batch):
    x, y = batch
    return loss(params, batch), {"accuracy": jnp.mean(jnp.asarray(jnp.argmax(x @ params["w"], 1) == y, jnp.float32))}


def problem(*returned, **more):
    return own_problem("mine:make", lambda: returned, **more)


def test_a_run_evaluates_what_it_can() -> None:
    """Accuracy, evaluation loss or the steps' own loss; examples are weighed alike, not batches."""
    settings = None
    found = {}
    for name, parts in {
        "accuracy": (loss_and_accuracy, PARAMS, BATCHES, HELD_OUT),
        "evaluation loss": (loss, PARAMS, BATCHES, HELD_OUT),
        "training loss": (loss_and_accuracy, PARAMS, lambda epoch: BATCHES[::-1] if epoch else BATCHES),
    }.items():
        one = problem(*parts)
        assert one.metric == name
        found[name] = one
        settings = one.settings
    params = {"w": jax.random.normal(jax.random.key(0), (6, 2))}
    whole = (X[32:], Y[32:])
    assert found["accuracy"].evaluate(params) == pytest.approx(float(loss_and_accuracy(params, whole)[1]["accuracy"]))
    assert found["evaluation loss"].evaluate(params) == pytest.approx(float(loss(params, whole)), rel=1e-5)
    second = list(found["training loss"].batches(settings, 0, 1))
    np.testing.assert_array_equal(second[0][0], BATCHES[-1][0])


def test_training_is_training_of_the_whole_batch() -> None:
    """Dense, two workers: plain SGD with momentum on the same batches."""
    one = problem(loss, PARAMS, BATCHES)
    settings = dataclasses.replace(one.settings, workers=2, batch_per_worker=4, epochs=2, learning_rate=0.1)
    result = Trainer("dense", one, settings).run(0)
    w, velocity, losses = jnp.zeros((6, 2)), jnp.zeros((6, 2)), []
    step = jax.jit(jax.value_and_grad(lambda w, batch: loss({"w": w}, batch)))
    for batch in BATCHES * 2:
        value, gradient = step(w, batch)
        velocity = 0.9 * velocity + gradient
        w = w - 0.1 * velocity
        losses.append(float(value))
    np.testing.assert_allclose(result.loss, losses, rtol=1e-4)
    assert result.metric == "training loss"
    np.testing.assert_allclose(result.evaluation, [np.mean(losses[:4]), np.mean(losses[4:])], rtol=1e-4)


def test_a_seed_reaches_a_function_that_takes_one() -> None:
    def make(seed=0):
        return loss, {"w": np.full((6, 2), seed, np.float32)}, BATCHES

    assert float(own_problem("mine:make", make).init(3)["w"][0, 0]) == 3
    one = problem(loss, PARAMS, BATCHES)
    assert not one.has_seeds
    with pytest.raises(SettingError, match="mine:make takes no seed, so all runs of a method would be one run"):
        compare(one, ["dense"], seeds=[0, 1])

    def changes(seed=0):
        return loss, {"w": np.zeros((6, 2 + seed), np.float32)}, BATCHES

    with pytest.raises(SettingError, match="the parameters of seed 1 have other shapes than those of seed 0"):
        own_problem("mine:make", changes).init(1)


class Loader:
    """Says that it has more batches than it has."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (({"loss": loss},), r"must return \(loss, params, batches\) or .*, got a tuple of 1"),
        ((PARAMS, loss, BATCHES), "got a tuple of 3 that starts with a dict; loss is a function of params and a batch"),
        ((loss, {}, BATCHES), "params has no arrays"),
        ((loss, {"w": 1.5}, BATCHES), r"params\['w'\] is a float, not an array"),
        (
            (loss, {"f": jnp.tanh, **PARAMS}, BATCHES),
            r"params\['f'\] is a .*, not an array: leave out what is not trained",
        ),
        ((loss, {"n": np.zeros(2, np.int32)}, BATCHES), r"params\['n'\] is int32, not floating point"),
        ((loss, PARAMS, X), "batches is a ndarray: return a list of batches"),
        ((loss, PARAMS, iter(BATCHES)), "batches is a list_iterator, which has no length: return a list of batches"),
        ((loss, PARAMS, []), "batches is empty"),
        ((loss, PARAMS, [(X[:8], Y[:7])]), r"batches\[0\] has arrays of 7, 8 examples"),
        ((loss, PARAMS, [(X[:8], 1.0)]), r"batches\[0\]\[1\] has no dimension of examples"),
        (
            (loss, PARAMS, (X, Y)),
            "the loss of mine:make: ValueError: too many values to unpack.*test_own_task.py, line",
        ),
        ((loss, PARAMS, [(X[:8], ["cat"] * 8)]), r"batches\[0\]\[1\]\[0\] is a str, not an array of numbers"),
        (
            (lambda p, b: b[0] @ p["w"], PARAMS, BATCHES),
            r"loss must return a floating-point scalar.*got float32\[8, 2\]",
        ),
        ((lambda p, b: (jnp.float32(1), {"accuracy": b[1]}), PARAMS, BATCHES), r"accuracy must be a scalar.*got \[8\]"),
        ((lambda p, b: p["v"], PARAMS, BATCHES), "the loss of mine:make: KeyError: 'v' .*test_own_task.py, line"),
        ((loss, PARAMS, BATCHES, []), "evaluation is empty"),
    ],
)
def test_a_wrong_return_is_one_sentence(returned, message) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        problem(*returned)
    assert "mine:make" in str(caught.value) and "\n" not in str(caught.value)


def test_batches_that_change_are_found_where_they_do() -> None:
    one = problem(loss, PARAMS, [*BATCHES, (X[:4], Y[:4])])
    with pytest.raises(SettingError, match=r"batches\[4\] has shapes .*float32\[4, 6\].* leave out a smaller last one"):
        list(one.batches(one.settings, 0, 0))
    with pytest.raises(SettingError, match="epoch 0 of seed 0 has 4 batches and the first one had 5"):
        list(problem(loss, PARAMS, Loader()).batches(one.settings, 0, 0))


MODULE = """
    import jax, jax.numpy as jnp, numpy as np

    def make(seed=0):
        def loss(params, batch):
            x, y = batch
            return jnp.mean((x @ params["w"] - y) ** 2)
        x = np.random.default_rng(0).normal(size=(48, 16)).astype(np.float32)
        return loss, {"w": jnp.zeros((16, 4))}, [(x[i : i + 12], x[i : i + 12, :4]) for i in range(0, 48, 12)]

    def fails():
        raise RuntimeError("no data")

    number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_module.py").write_text("import jax\n1 / 0\n")
    monkeypatch.delitem(__import__("sys").modules, "own_module", raising=False)


def test_train_takes_it_from_the_current_folder(gradcomp, tmp_path, module) -> None:
    words = ("train", "--method", "dense", "--from", "own_module:make", "--workers", "2", "--epochs", "3")
    result = gradcomp(*words, "--learning-rate", "0.05")
    assert result.exit_code == 0, result.stderr
    assert "own_module:make: 2 workers x 6 examples, 3 epochs, SGD 0.05" in result.stdout
    fields = json.loads((tmp_path / "gradcomp-results/train-dense-own_module-make.json").read_text())
    assert fields["metric"] == "training loss" and fields["dataset"] == "own_module:make"
    first, *_, last = fields["methods"][0]["runs"][0]["evaluation"]
    assert last < first
    assert f"{last:.4g}" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--from", "own_module"), "--from must be MODULE:NAME"),
        (("--from", "./own_module.py:make"), "--from must be MODULE:NAME"),
        (("--from", "no_module:make"), "there is no module no_module in"),
        (("--from", "own_module.py:make"), "write own_module:make"),
        (("--from", "own_module:mkae"), "did you mean 'make'"),
        (("--from", "own_module:number"), "own_module:number must be a function that returns (loss, params, batches)"),
        (("--from", "own_module:fails"), "own_module:fails: RuntimeError: no data (own_module.py, line 12)"),
        (("--from", "broken_module:make"), "ZeroDivisionError: division by zero (broken_module.py, line 2)"),
        (("--from", "own_module:make"), "own_module:make: a batch of 12 does not divide among 8 workers: use 8 or 16"),
        (("--from", "own_module:make", "--batch", "8"), "--from brings its own data and batches: drop --batch"),
        (("--from", "own_module:make", "--dataset", "digits"), "drop --task"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_mistake_is_one_sentence_and_exit_code_2(gradcomp, module, command, words, message) -> None:
    result = gradcomp(command, *words)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gradcomp: ") and message in line
