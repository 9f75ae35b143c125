"""
The destinations of events: named handlers of `logging`, each with a logger.

Rules of this file: the table belongs to the program. Any thread may change it at any time, and a
logger always has the current handler. An exception of a handler reaches the caller that recorded
the event.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback

from elasticlib.errors import ConfigError, UnknownNameError
from elasticlib.events._event import Event, NodeState, RdzvEvent
from elasticlib.utils import LOG_LEVEL_VARIABLE, level_of

_log = logging.getLogger("elasticlib")

RENDEZVOUS = "dynamic_rendezvous"
"""Name of the destination of rendezvous events."""


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10's takes no parameter
    """Handler that writes each event as a line to the current ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line at once; write nothing if the program has no stderr."""
        if sys.stderr is not None:
            self.stream = sys.stderr
            super().emit(record)


handlers: dict[str, logging.Handler] = {
    "console": ConsoleHandler(),
    RENDEZVOUS: logging.NullHandler(),
    "null": logging.NullHandler(),
}
"""Handlers by name; torch has ``torch.distributed.elastic.events.handlers._log_handlers``."""

_in_use: dict[str, logging.Handler] = {}
_turn = threading.RLock()


def _renew_turn() -> None:
    global _turn
    # Another thread may have held the lock when this process was forked.
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turn)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """
    Return the handler of *destination*: ``null``, ``console``, ``dynamic_rendezvous`` or an added one.

    Raises `UnknownNameError` (a ``KeyError``) for any other name. (torch:
    ``torch.distributed.elastic.events.get_logging_handler``)
    """
    try:
        return handlers[destination]
    # TypeError: the name is an object that cannot be a key.
    except (KeyError, TypeError):
        known = ", ".join(sorted(handlers))
        raise UnknownNameError.of_setting(
            "event_log_handler",
            f"{destination!r} is unknown: give one of {known}, or add it first by "
            "elasticlib.events.add_logging_handler(name, handler)",
        ) from None


def add_logging_handler(destination: str, handler: logging.Handler) -> None:
    """Send the events of *destination* to *handler* from now on; replace an earlier handler."""
    if not isinstance(destination, str) or not destination:
        raise ConfigError(f"destination={destination!r} must be a name")
    if not isinstance(handler, logging.Handler):
        raise ConfigError(f"handler={handler!r} must be a logging.Handler")
    handlers[destination] = handler


def drops(destination: str) -> bool:
    """Return whether the handler of *destination* discards everything."""
    return isinstance(get_logging_handler(destination), logging.NullHandler)


def logger_of(destination: str) -> logging.Logger:
    """
    Return the logger ``torchelastic-events-<destination>`` with the current handler.

    Its level is the value of ``LOGLEVEL`` at its first use; the default is INFO, also for an
    invalid value, after a warning. Nothing reaches the program's other loggers.
    """
    handler = get_logging_handler(destination)
    logger = logging.getLogger(f"torchelastic-events-{destination}")
    with _turn:
        former = _in_use.get(destination)
        if former is not handler:
            # The level is set only at the first use: one that the program sets later stays.
            if former is None:
                logger.propagate = False
                logger.setLevel(_level())
            else:
                logger.removeHandler(former)
            logger.addHandler(handler)
            _in_use[destination] = handler

    return logger


def _level() -> int:
    try:
        return level_of(os.environ.get(LOG_LEVEL_VARIABLE) or "INFO")
    except ConfigError as error:
        _log.warning("%s; events of level INFO and above are shown", error)
        return logging.INFO


def record(event: Event, destination: str = "null") -> None:
    """
    Send *event* to *destination*, as JSON at level INFO.

    Raises `UnknownNameError` like `get_logging_handler`. (torch:
    ``torch.distributed.elastic.events.record``)
    """
    logger_of(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send *event* to ``dynamic_rendezvous``. (torch: ``torch.distributed.elastic.events.record_rdzv_event``)"""
    logger_of(RENDEZVOUS).info(event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """
    Record an event of a rendezvous; do nothing while ``dynamic_rendezvous`` has a ``NullHandler``.

    Defaults: *name* is the calling function, *hostname* this machine's name (without a name
    server), *pid* this process. For FAILED, the event has the traceback of the exception that is
    being handled. (torch:
    ``torch.distributed.elastic.events.construct_and_record_rdzv_event``)
    """
    # The text of an event is made only for a handler that takes it.
    if drops(RENDEZVOUS):
        return

    caller = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or os.uname().nodename,
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
        )
    )
