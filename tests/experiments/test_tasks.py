"""Tasks: the names of their results, and their data."""

import numpy as np
import pytest

from gradcomp_jax.experiments.datasets import SOURCES, Dataset, Text
from gradcomp_jax.experiments.tasks import TASKS

IMAGES, LABELS = np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, np.int32)
TOKENS = np.zeros(300, np.uint8)


@pytest.mark.parametrize("name", TASKS)
def test_results_are_called_after_the_task(name: str) -> None:
    """Two tasks on one data set must not write the same files."""
    task = TASKS[name]
    assert task.dataset in SOURCES
    is_text = task.dataset in ("enwik8", "penn-treebank")
    data = (
        Text(task.dataset, TOKENS, TOKENS, TOKENS, 9)
        if is_text
        else Dataset(task.dataset, IMAGES, LABELS, IMAGES, LABELS)
    )
    assert task.on(data).name == name
