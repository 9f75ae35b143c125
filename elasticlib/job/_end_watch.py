"""
Watch for announcements of this node's end: a file, a function of the user, and the end of the scheduler's time.

Rules of this file: each source has a thread of its own, since a function of the user may block. A source
that fails is reported once and read again, and never stops the job.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from attrs import define, field

from elasticlib._clock import wall_time
from elasticlib.agent import EndNotice
from elasticlib.errors import ConfigError
from elasticlib.processes import start_thread
from elasticlib.workers import Inbox, StopRequest

_log = logging.getLogger("elasticlib")

Source: TypeAlias = Callable[[float], StopRequest | None]
"""Function that gets the Unix time, and returns a request once the end is announced."""
_INTERVAL = 1.0
"""Seconds between two looks at a source."""
_ENDING = 0.1
"""Seconds that the end of a launch waits for each source."""
_LONGEST_REASON = 200


@define
class AnnouncedEnd:
    """The end of the scheduler's time, *lead* seconds before it."""

    notice: EndNotice
    """Has the end; it is written here as the scheduler says it."""
    lead: float
    present_end: Callable[[], float | None]
    """Asks the scheduler for the present end; None without an answer."""
    _has_requested: bool = field(init=False, default=False)

    def __call__(self, now: float) -> StopRequest | None:
        is_unknown = self.notice.end_time == math.inf and not self._has_requested
        if not is_unknown and now < self.notice.end_time - self.lead:
            return None

        # The owner may have changed it since the start.
        self._has_requested = True
        self.notice.end_time = self.present_end() or self.notice.end_time
        left = self.notice.end_time - now
        if left > self.lead:
            return None
        at = time.strftime("%H:%M:%S", time.localtime(self.notice.end_time))
        # A scheduler lets some jobs run beyond their end, and clocks differ: a past end is no reason to save nothing.
        grace = left if left > 0 else None
        return StopRequest(f"the job's time ends at {at}", grace, is_notice=True, needs_listener=True)


def source_of(notice: str | os.PathLike[str] | Callable[[], str | None]) -> Source:
    """
    Return the source of a file's path, or of a function.

    Raises `ConfigError` for a file that exists already, or at whose path no file can appear.
    """
    if callable(notice):
        return _of_function(notice)

    # The program may change its folder while the job runs.
    path = Path(notice).absolute()
    complaint = _complaint_about(path)
    if complaint:
        raise ConfigError.of_setting("preempt_notice", f"{str(notice)[:200]!r} {complaint}")
    return _of_file(path)


def _complaint_about(path: Path) -> str:
    """Return why the file at *path* cannot announce the end; empty if it can."""
    try:
        path.stat()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"cannot be read ({reason}): give the path of a file that can appear"
    return "exists already: remove it if it is left from an earlier notice"


def _of_function(function: Callable[[], str | None]) -> Source:
    def look(now: float) -> StopRequest | None:
        reason = function()
        return _request(str(reason)) if reason else None

    return look


def _of_file(path: Path) -> Source:
    def look(now: float) -> StopRequest | None:
        try:
            with path.open("rb") as file:
                first = file.readline(_LONGEST_REASON)
        except FileNotFoundError:
            return None
        return _request(first.decode(errors="replace").strip() or f"the file {path} has appeared")

    return look


def _request(reason: str) -> StopRequest:
    return StopRequest(reason[:_LONGEST_REASON], is_notice=True)


@contextmanager
def end_watch(sources: Sequence[Source], inbox: Inbox) -> Iterator[None]:
    """Put the request of each of the *sources* into *inbox*, once, within the block."""
    is_over = threading.Event()
    watches = [
        threading.Thread(target=_watch, args=(source, inbox, is_over), name="elasticlib-end", daemon=True)
        for source in sources
    ]
    started: list[threading.Thread] = []
    try:
        for watch in watches:
            started.append(start_thread(watch))
        yield
    finally:
        is_over.set()
        for watch in started:
            # A thread that is still within a function of the user ends with it, or with the program.
            watch.join(_ENDING)


def _watch(source: Source, inbox: Inbox, is_over: threading.Event) -> None:
    is_reported = False
    while not is_over.is_set():
        request = None
        try:
            request = source(wall_time())
        # SystemExit: a function of the user may call sys.exit.
        except (Exception, SystemExit) as error:
            if not is_reported:
                is_reported = True
                _report(error)
        if request is not None:
            inbox.put(request)
            return
        is_over.wait(_INTERVAL)


def _report(error: BaseException) -> None:
    _log.warning(
        "a source of preemption notices failed, and is read again every second: %s: %s", type(error).__name__, error
    )
