"""The package's tables with what the studies add, for one test."""

import pytest

from benchmarks import tasks


@pytest.fixture
def added(monkeypatch):
    for table, own in tasks.TABLES:
        for name, value in own.items():
            monkeypatch.setitem(table, name, value)
