"""
The base class of records, and their sinks.

Rules of this file: a sink is a function of one record. Its exceptions never reach the agent's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, TypeAlias

_log = logging.getLogger("elasticlib")


class Record:
    """Base of records: frozen classes with facts, a text for users, and a level for the log."""

    __slots__ = ()
    _level: ClassVar[int]

    def __init_subclass__(cls, *, level: int | None = None) -> None:
        # attrs makes each class once more, without the argument.
        if level is not None:
            cls._level = level

    @property
    def level(self) -> int:
        """Level of `logging`, or `FINE`."""
        return self._level


Sink: TypeAlias = Callable[[Record], None]


def log(record: Record) -> None:
    """Write *record* to the ``elasticlib`` logger at its own level."""
    _log.log(record.level, "%s", record)


def fan_out(*sinks: Sink) -> Sink:
    """
    Return a sink that passes each record to all *sinks*, in order.

    The first exception of each sink is logged; none is raised.
    """
    failed: set[int] = set()

    def all_of_them(record: Record) -> None:
        for index, sink in enumerate(sinks):
            try:
                sink(record)
            except Exception:
                if index not in failed:
                    failed.add(index)
                    _log.exception(
                        "a record sink (events, metrics or your own) failed at a record of class %s; the job "
                        "continues, and further failures of this sink are not logged",
                        type(record).__name__,
                    )

    return all_of_them
