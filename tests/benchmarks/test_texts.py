"""Networks of the studies that predict the next token."""

import jax
import numpy as np
import pytest

from benchmarks.tasks import texts

MODELS = {
    "transformer": lambda vocabulary: texts.transformer(vocabulary, width=16, layers=1, heads=2, length=8),
    "lstm": lambda vocabulary: texts.lstm(vocabulary, width=8, layers=1, length=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_place_sees_nothing_that_comes_after_it(name):
    model = MODELS[name](11)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
    other = tokens.copy()
    other[:, 5:] = (other[:, 5:] + 1) % 11
    apply = jax.jit(model.apply)
    before, after = apply(params, tokens), apply(params, other)
    assert before.shape == (2, 8, 11)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, 5:], after[:, 5:], atol=1e-4)


def test_the_sizes_that_the_docstrings_say():
    counts = []
    for model in (texts.transformer(256), texts.lstm(10_000)):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        counts.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    assert counts == [858_880, 4_651_600]
