"""The table of what is quick names tests that exist, and leaves something of each."""

import ast
import pathlib

import pytest

from tests import quick
from tests.conftest import HAS_QUICK

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", quick.QUICK)
def test_every_name_is_that_of_a_test(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}


def test_something_of_each_is_quick(request: pytest.FixtureRequest) -> None:
    """A misspelt parameter would leave all of a test to the continuous build."""
    has_quick = request.config.stash[HAS_QUICK]
    files = {name.partition("::")[0] for name in has_quick}
    if not files >= {name.partition("::")[0] for name in quick.QUICK}:
        pytest.skip("needs the whole suite collected")
    assert [name for name in quick.QUICK if not has_quick.get(name)] == []
