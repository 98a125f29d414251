"""Data sets, networks, tasks and recipes of the studies, which the package does without."""

from benchmarks.tasks import datasets, recipes, tasks
from gradcomp_jax import experiments
from gradcomp_jax.experiments import recipes as own_recipes

TABLES = (
    (experiments.datasets.SOURCES, datasets.SOURCES),
    (experiments.tasks.TASKS, tasks.TASKS),
    (own_recipes.RECIPES, recipes.RECIPES),
    (own_recipes.GROUPS, recipes.GROUPS),
)
"""Tables of the package, and what is added to each."""


def add() -> None:
    """Adds all of it to the tables of the package, so that its runs and commands know the names; scripts call it once."""
    for table, own in TABLES:
        table.update(own)  # type: ignore[attr-defined]
