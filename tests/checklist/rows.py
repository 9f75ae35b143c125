"""A pytest plugin that prints the rows of collected tests, for the table."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One line a test: its rows and its name."""
    for item in items:
        if marker := item.get_closest_marker("row"):
            print(f"row {','.join(map(str, marker.args))} {item.nodeid}")
