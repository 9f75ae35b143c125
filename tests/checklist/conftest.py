"""
Shared setup of the rows: the launcher under test, a time limit, and a report for the table.

``ELASTICLIB_PEER`` selects elasticlib (the default), torchrun or nothing. Torchrun is that of the
interpreter that runs the rows. A row with ``since=(2, 15)`` is skipped if torchrun is older. Only
elasticlib's rows must pass. The table shows the results of the other two
(``python -m tests.checklist``).
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Generator, Iterator
from importlib.metadata import version
from types import FrameType

import pytest

from tests.checklist.peers import LAUNCHERS, Peer

LAUNCHER = LAUNCHERS[os.environ.get("ELASTICLIB_PEER", "elasticlib")]
ROW_LIMIT = 150
"""Seconds that a row may take."""


@pytest.fixture
def peer(tmp_path: pathlib.Path) -> Iterator[Peer]:
    """The launcher under test; what it leaves running is ended with the row."""
    under_test = Peer(LAUNCHER, tmp_path)
    yield under_test
    under_test.close()


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """A row that hangs fails."""

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the row took more than {ROW_LIMIT} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(ROW_LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("row")
        if marker is None or LAUNCHER.name == "elasticlib":
            continue
        if LAUNCHER.name == "torchrun" and (why := peer_cannot(marker)):
            item.add_marker(pytest.mark.skip(reason=why))


def peer_cannot(marker: pytest.Mark) -> str:
    """Why the peer is not run with a row; empty where it is."""
    since = marker.kwargs.get("since")
    here = tuple(map(int, version("torch").split(".")[:2]))
    if since is not None and here < since:
        return f"torch {since[0]}.{since[1]} has it, the peer's is {here[0]}.{here[1]}"
    return str(marker.kwargs.get("peer_cannot", ""))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    path, marker = os.environ.get("ELASTICLIB_CHECKLIST_REPORT"), item.get_closest_marker("row")
    if path and marker is not None and (report.when == "call" or report.outcome != "passed"):
        facts = {
            "rows": list(marker.args),
            "improvement": bool(marker.kwargs.get("improvement")),
            "peer_cannot": peer_cannot(marker) if LAUNCHER.name == "torchrun" else "",
            "test": item.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
    return report
