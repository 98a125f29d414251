"""Tasks: the names of their results, and their data."""

import numpy as np
import pytest

from gradcomp_jax.experiments.datasets import SOURCES, Dataset, Text
from gradcomp_jax.experiments.recipes import RECIPES
from gradcomp_jax.experiments.tasks import TASKS

IMAGES, LABELS = np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, np.int32)
TOKENS = np.zeros(300, np.uint8)


@pytest.mark.parametrize("name", TASKS)
def test_results_are_called_after_the_task(name: str) -> None:
    """Two tasks on one data set must not write the same files."""
    task = TASKS[name]
    assert task.dataset in SOURCES
    is_text = task.dataset == "standard-library"
    data = (
        Text(task.dataset, TOKENS, TOKENS, TOKENS, 9)
        if is_text
        else Dataset(task.dataset, IMAGES, LABELS, IMAGES, LABELS)
    )
    assert task.on(data).name == name


@pytest.mark.parametrize("name", TASKS)
def test_what_a_task_compares_is_there(name: str) -> None:
    task = TASKS[name]
    assert task.methods[0] == "dense-bf16" and set(task.methods) <= set(RECIPES) and task.seeds > 0
    # The recipe with AdamW in it is refused elsewhere.
    assert "sparse-adamw" not in task.methods or task.settings.optimizer == "adamw"
