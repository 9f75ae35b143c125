"""What the program that holds a job asks of its agent, from other threads, beside the signals that come."""

from __future__ import annotations

import signal
from collections.abc import Callable

from elasticlib.agent._policy import StopRequested
from elasticlib.workers._signals import Inbox, StacksAsked, StopAsked


def drain(inbox: Inbox, dump_stacks: Callable[[], None]) -> list[StopRequested]:
    """The stops that are wanted by now, oldest first; stacks are asked for here."""
    stops = []
    for item in inbox.drain():
        match item:
            case int():
                stops.append(StopRequested(item))
            case StopAsked(why, grace):
                stops.append(StopRequested(signal.SIGTERM, why, grace))
            case StacksAsked():
                dump_stacks()
    return stops
