"""
What the two lanes of a session's connection are busy with. Pure.

Rules of this file: one operation at a time on each lane; an answer finds the question by its number.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from attrs import Factory, evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.node._session_events import Lane

SLICE = 60.0
"""Seconds that one wait for a notice lasts."""
GREETING = 1.0
"""Seconds of one wait for the coordinator's greeting."""


class Task(enum.Enum):
    """What an operation is for."""

    FIND = "wait for the greeting"
    GREET = "read the greeting"
    WAKE = "wake the lane that watches for what comes no more"
    DESCRIBE = "learn what this node brings"
    POST = "post a letter"
    HEARTBEAT = "write a heartbeat"
    HEAR = "read the coordinator's heartbeat, after one of this node"
    LISTEN = "read it, while the beats rest"
    AWAIT = "wait for the next notice"
    NOTICE = "read it"
    CAUSE = "read the root cause whole"
    FORGET = "delete it"


@frozen
class Asked:
    """An operation that is under way."""

    number: int
    task: Task
    sent: float
    key: str = ""
    seq: int = 0


@frozen
class Lanes:
    """What was asked, and not answered yet."""

    count: int = 0
    """Number of the last operation."""
    _busy: Mapping[Lane, Asked] = Factory(dict)

    def is_free(self, lane: Lane) -> bool:
        """Whether something can be asked."""
        return lane not in self._busy

    def ask(self, lane: Lane, task: Task, sent: float, key: str = "", seq: int = 0) -> Self:
        """The lane is busy with that."""
        number = self.count + 1
        return evolve(self, count=number, busy={**self._busy, lane: Asked(number, task, sent, key, seq)})

    def answered(self, number: int) -> tuple[Self, Asked | None]:
        """The lane of that operation is free; None when nobody waits for its answer."""
        for lane, asked in self._busy.items():
            if asked.number == number:
                return evolve(self, busy={each: it for each, it in self._busy.items() if each is not lane}), asked
        return self, None

    def cleared(self) -> Self:
        """No answer is waited for."""
        return evolve(self, busy={})
