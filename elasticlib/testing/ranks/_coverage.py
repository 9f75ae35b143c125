"""
Coverage of the code that runs in ranks, for pytest-cov and ``coverage run``.

Rules of this file: coverage.py is imported only if the tests' own process measures coverage. A rank
writes nothing to disk: it sends its data with each outcome, so a later death loses nothing. The
data is added to the measurement before that is written.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

from elasticlib.testing.ranks._rank_call import RankCall

# In the tests' own process.


class Measuring:
    """Coverage data of a session's ranks."""

    def __init__(self, config: Any) -> None:
        self._has_contexts = getattr(config.option, "cov_context", None) == "test"
        self._found: Any = None
        self._settings: tuple[int, bytes] = (0, b"")

    def settings(self) -> bytes:
        """Return the settings of this process's measurement, pickled; empty if there is none."""
        current = _current()
        if current is None:
            return b""
        if self._settings[0] != id(current):
            self._settings = id(current), pickle.dumps(current.config)
        return self._settings[1]

    def context(self, test: str) -> str:
        """Return coverage's dynamic context for *test*, named as by pytest-cov."""
        return f"{test}|run" if self._has_contexts else ""

    def add(self, data: bytes) -> None:
        """Add the data of a rank."""
        if not data:
            return
        kind: Any = sys.modules["coverage"]
        found = kind.CoverageData(no_disk=True)
        found.loads(data)
        if self._found is None:
            self._found = kind.CoverageData(no_disk=True)
        self._found.update(found)

    def write(self) -> None:
        """Add the data of all ranks to the measurement of this process."""
        current = _current()
        if current is not None and self._found is not None:
            current.get_data().update(self._found)
            self._found = None


def _current() -> Any:
    """Return the running measurement of this process; None if there is none."""
    found: Any = sys.modules.get("coverage")
    return None if found is None else found.Coverage.current()


# In a rank.

_made: tuple[bytes, Any] = (b"", None)
"""Settings, and the measurement that uses them."""


@contextlib.contextmanager
def measured(call: RankCall) -> Iterator[Callable[[], bytes]]:
    """Measure the block; the yielded function returns the data afterwards."""
    if not call.coverage:
        yield bytes
        return

    measurement = _measurement(call.coverage)
    data = b""
    measurement.start()
    if call.context:
        measurement.switch_context(call.context)
    try:
        yield lambda: data
    finally:
        measurement.stop()
        data = measurement.get_data().dumps()
        # The data of this test must not be sent again with the next one.
        measurement.erase()


def _measurement(settings: bytes) -> Any:
    global _made
    # All tests of a session have the same settings.
    if _made[0] != settings:
        found: Any = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, messages=False)
        found.config = pickle.loads(settings)
        _made = settings, found
    return _made[1]
