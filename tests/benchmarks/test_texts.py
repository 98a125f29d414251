"""Networks of the studies that predict the next token."""

import jax
import pytest

from benchmarks.tasks import texts
from tests.experiments.test_language_models import assert_a_place_sees_nothing_that_comes_after_it

MODELS = {
    "transformer": lambda vocabulary: texts.transformer(vocabulary, width=16, layers=1, heads=2, length=8),
    "lstm": lambda vocabulary: texts.lstm(vocabulary, width=8, layers=1, length=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_place_sees_nothing_that_comes_after_it(name):
    assert_a_place_sees_nothing_that_comes_after_it(MODELS[name](11))


def test_the_sizes_that_the_docstrings_say():
    counts = []
    for model in (texts.transformer(256), texts.lstm(10_000)):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        counts.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    assert counts == [858_880, 4_651_600]
