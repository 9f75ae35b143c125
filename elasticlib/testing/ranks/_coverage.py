"""
Coverage of what runs in a rank, by the settings that the measurement in pytest's process has.

Rules of this file: nothing is written to disk; what was measured goes back with each outcome, so that a worker which
dies later takes nothing along.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from elasticlib.testing.ranks._call import Call

_made: tuple[bytes, Any] = (b"", None)
"""Settings, and the measurement with them."""


@contextlib.contextmanager
def measured(call: Call) -> Iterator[Callable[[], bytes]]:
    """Measure the block; what the result returns afterwards is coverage's data."""
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
        measurement.erase()


def _measurement(settings: bytes) -> Any:
    global _made
    if _made[0] != settings:
        found: Any = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, messages=False)
        found.config = pickle.loads(settings)
        _made = settings, found
    return _made[1]
