"""
The worker's side of every timer: `expires`, and what a client and a queue of requests must offer.

Rules of this file: a deadline is wall-clock time, since both ends run on one machine and torch's ends say it so;
a timer is released however its block ends.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elasticlib._untrusted import shown
from elasticlib.errors import ConfigError, TimerError
from elasticlib.timer._timer_table import TimerRequest, is_deadline

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

_log = logging.getLogger("elasticlib")


class TimerClient(abc.ABC):
    """Sets and releases the timers of this process. (torch: ``torch.distributed.elastic.timer.TimerClient``)"""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Begin the timer *scope_id*, which expires at *expiration_time* (seconds since the epoch)."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer *scope_id*."""


class RequestQueue(abc.ABC):
    """Where a server finds what clients asked for. (torch: ``torch.distributed.elastic.timer.api.RequestQueue``)"""

    @abc.abstractmethod
    def size(self) -> int:
        """How many requests wait; until the next `get` there may be more, never fewer."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to *size* requests, waiting for them for at most *timeout* seconds in all."""

    def interrupt(self) -> None:  # noqa: B027 - torch's subclasses have none
        """Have the `get` that waits return at once. A queue that cannot do so makes its server slow to stop."""


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Have `expires` use *timer_client* in this process, wherever it is not given another one."""
    global _client
    _client = timer_client
    _log.debug("timers of this process go through %s", type(timer_client).__name__)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """
    A context manager, and decorator, whose block this process must leave within *after* seconds, or be killed.

    Who kills it is the server that *client* speaks to; None takes what was given to `configure`. *scope* names the
    timer, by default by the place in the source that called this. Raises `TimerError` (a ``RuntimeError``) on entry
    when there is no client, `ConfigError` for an *after* that is no number. (torch:
    ``torch.distributed.elastic.timer.expires``; there, the default scope always names a line of ``contextlib``)
    """
    if not is_deadline(after):
        raise ConfigError(f"after={shown(after)} must be a number of seconds")
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _countdown(after, scope, client)


@contextlib.contextmanager
def _countdown(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client if client is not None else _client
    if client is None:
        raise TimerError("no timer client is configured: call timer.configure(...) first, or give expires a client")
    client.acquire(scope, time.time() + after)
    try:
        yield
    except BaseException:
        try:
            client.release(scope)
        except Exception as error:
            # What the block raised is what its caller must hear of.
            _log.warning("timer %r could not be released: %s: %s", scope, type(error).__name__, error)
        raise
    client.release(scope)
