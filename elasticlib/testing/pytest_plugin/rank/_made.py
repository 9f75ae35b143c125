"""
Arguments of a test that each rank makes: its rank and device, and pytest's fixtures for its process.

Rules of this file: the fixtures are pytest's own classes, with a minimal test item. They are
finalized in reverse order when the function has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from elasticlib.testing.pytest_plugin.rank import _modules
from elasticlib.testing.ranks._rank_call import RankCall

_CAPTURES = {"capsys": "SysCapture", "capsysbinary": "SysCaptureBinary", "capfd": "FDCapture"}
_CAPTURES["capfdbinary"] = "FDCaptureBinary"


@contextlib.contextmanager
def made(call: RankCall, item: Any) -> Iterator[dict[str, Any]]:
    """Make pytest's fixtures among `RankCall.made`; *item* takes the place of their test item."""
    with contextlib.ExitStack() as stack:
        yield {name: _make(name, item, stack) for name in call.made if name not in _OF_RANK}


def of_rank(call: RankCall, rank: int) -> dict[str, Any]:
    """Return the arguments among `RankCall.made` that describe this *rank*."""
    return {name: _OF_RANK[name](call, rank) for name in call.made if name in _OF_RANK}


def _device(call: RankCall, rank: int) -> Any:
    import torch

    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if call.device == "cuda" else torch.device("cpu")


def _group(call: RankCall, rank: int) -> Any:
    import torch.distributed

    return torch.distributed.group.WORLD


_OF_RANK: dict[str, Callable[[RankCall, int], Any]] = {
    "rank": lambda call, rank: rank,
    "world_size": lambda call, rank: int(os.environ["WORLD_SIZE"]),
    "device": _device,
    "group": _group,
}


def _make(what: str, item: Any, stack: contextlib.ExitStack) -> Any:
    if what in _CAPTURES:
        return _capture(_CAPTURES[what], stack)

    if what == "caplog":
        from _pytest.logging import LogCaptureFixture

        fixture = LogCaptureFixture(item, _ispytest=True)
        stack.callback(fixture._finalize)
        return fixture

    if what == "record_property":
        return lambda name, value: item.properties.append((name, value))

    if what == "recwarn":
        from _pytest.recwarn import WarningsRecorder

        return stack.enter_context(WarningsRecorder(_ispytest=True))

    assert what == "monkeypatch", what
    import pytest

    patch = pytest.MonkeyPatch()
    stack.callback(patch.undo)
    return patch


def _capture(kind: str, stack: contextlib.ExitStack) -> Any:
    from _pytest import capture

    fixture: Any = None

    @contextlib.contextmanager
    def disabled() -> Iterator[None]:
        fixture._suspend()
        try:
            yield
        finally:
            fixture._resume()

    manager = SimpleNamespace(global_and_fixture_disabled=disabled)
    plugins = SimpleNamespace(getplugin=lambda _: manager)
    request: Any = SimpleNamespace(config=SimpleNamespace(pluginmanager=plugins))
    fixture = capture.CaptureFixture(getattr(capture, kind), request, _ispytest=True)
    fixture._start()
    stack.callback(fixture.close)
    return fixture


class ItemOnRank:
    """Minimal test item for pytest's logging fixtures."""

    def __init__(self) -> None:
        from _pytest import logging as logs
        from _pytest.stash import Stash

        self.config = _modules.configuration()
        self.properties: list[tuple[str, object]] = []
        """Properties of the fixture ``record_property``."""
        self.handler = logs.LogCaptureHandler()
        self.stash = Stash()
        self.stash[logs.caplog_handler_key] = self.handler
        self.stash[logs.caplog_records_key] = {"setup": [], "call": self.handler.records, "teardown": []}


@contextlib.contextmanager
def logs_of(call: RankCall, item: ItemOnRank) -> Iterator[None]:
    """Set loggers to the levels of pytest's process and send records to the item's handler."""
    message, date = call.log_format
    if message:
        item.handler.setFormatter(logging.Formatter(message, date or None))
    former = {name: logging.getLogger(name or None).level for name in call.levels}
    disabled = logging.root.manager.disable
    _set_levels(call.levels)
    _disable(call.log_disabled)
    logging.root.addHandler(item.handler)
    try:
        yield
    finally:
        logging.root.removeHandler(item.handler)
        _disable(disabled)
        _set_levels(former)


# Both calls clear the caches of all loggers, so they are made only for a changed level.


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logger = logging.getLogger(name or None)
        if logger.level != level:
            logger.setLevel(level)


def _disable(level: int) -> None:
    if logging.root.manager.disable != level:
        logging.disable(level)


def portable(record: logging.LogRecord) -> dict[str, Any]:
    """Return *record* as plain values, with its arguments merged into the message."""
    found = dict(vars(record))
    found |= {"msg": record.getMessage(), "args": None, "exc_info": None}
    if record.exc_info and not record.exc_text:
        found["exc_text"] = logging.Formatter().formatException(record.exc_info)
    plain = (str, int, float, bool, type(None))
    return {name: value for name, value in found.items() if isinstance(value, plain)}
