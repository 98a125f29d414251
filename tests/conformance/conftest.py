"""All tests of one method run in one process, so that each program is compiled once."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        method = getattr(item, "callspec", None) and item.callspec.params.get("method")
        if method and "conformance" in str(item.path):
            item.add_marker(pytest.mark.xdist_group(method))
