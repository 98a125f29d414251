"""A network that predicts the next token, and the problem made of it."""

import functools
import math

import jax
import numpy as np
import pytest

from gradcomp_jax.experiments import language_models
from gradcomp_jax.experiments.datasets import Text
from gradcomp_jax.experiments.problem import language_modelling
from gradcomp_jax.experiments.tasks import TASKS

MODEL = functools.partial(language_models.decoder, model=language_models.Decoder(16, 1, 2, 8))


def assert_a_place_sees_nothing_that_comes_after_it(model):
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
    other = tokens.copy()
    other[:, 5:] = (other[:, 5:] + 1) % 11
    apply = jax.jit(model.apply)
    before, after = apply(params, tokens), apply(params, other)
    assert before.shape == (2, 8, 11)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, 5:], after[:, 5:], atol=1e-4)


@pytest.mark.slow
def test_a_place_sees_nothing_that_comes_after_it():
    assert_a_place_sees_nothing_that_comes_after_it(MODEL(11))


def problem(metric, judged=33):
    random = np.random.default_rng(0)
    parts = [random.integers(0, 11, count).astype(np.uint8) for count in (500, 60, 60)]
    text = Text("made up", *parts, 11)
    settings = TASKS["language-model"].settings
    return language_modelling(MODEL, text, settings, metric=metric, steps=3, judged=judged), text


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["bits per character", "perplexity"])
def test_the_metric_is_the_mean_over_sequences_that_do_not_overlap(metric):
    made, text = problem(metric)
    params = made.init(0)
    windows = [text.test[i : i + 9].astype(np.int32) for i in range(0, 32, 8)]
    nats = np.mean([float(made.loss(params, window[None])) for window in windows])
    expected = nats / math.log(2) if metric == "bits per character" else math.exp(nats)
    assert made.evaluate(params) == pytest.approx(expected, rel=1e-5)


def test_batches_depend_on_seed_and_epoch_alone():
    made, text = problem("bits per character")
    settings = made.settings
    first = list(made.batches(settings, 1, 2))
    again = list(made.batches(settings, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert len(first) == made.steps_per_epoch(settings) == 3
    assert first[0].shape == (settings.batch, 9) and first[0].dtype == np.int32
    assert not np.array_equal(first[0], next(iter(made.batches(settings, 1, 3))))
    joined = text.train.tobytes()
    assert all(row.astype(np.uint8).tobytes() in joined for row in first[0])


def test_the_size_that_the_docstring_says():
    shapes = jax.eval_shape(language_models.decoder(128).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 55_536 + 48 * 128


@pytest.mark.slow
def test_the_loss_of_a_decoder_is_the_cross_entropy_of_its_logits():
    model = language_models.Decoder(16, 1, 2, 8)
    params = model.init(jax.random.key(0), 11)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 9)).astype(np.int32)
    logits = np.asarray(jax.jit(model.apply)(params, tokens[:, :-1]), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, tokens[:, 1:, None], -1)).mean()
    assert float(jax.jit(model.loss)(params, tokens)) == pytest.approx(expected, rel=1e-5)
