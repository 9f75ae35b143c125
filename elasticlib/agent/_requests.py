"""What the program that holds a job asks of its agent, from other threads, beside the signals that come."""

from __future__ import annotations

import signal
from collections.abc import Callable

from elasticlib import records
from elasticlib.agent._policy import StopRequested
from elasticlib.workers import Inbox, NoticeReceived, StacksRequest, StopRequest


def drain(
    inbox: Inbox,
    dump_stacks: Callable[[], None],
    pass_on: Callable[[signal.Signals], None],
    sink: records.Sink,
) -> list[StopRequested]:
    """The stops that are wanted by now, oldest first; *dump_stacks* and *pass_on* are called for the rest."""
    stops = []
    for item in inbox.drain():
        match item:
            case int():
                stops.append(StopRequested(item))
            case StopRequest(why, grace):
                stops.append(StopRequested(signal.SIGTERM, why, grace))
            case StacksRequest(why):
                if why:
                    sink(records.StacksShown(why))
                dump_stacks()
            case NoticeReceived(signum):
                pass_on(signal.Signals(signum))
    return stops


def hastens(stop: StopRequested) -> bool:
    """True if *stop* means SIGKILL now where one is under way: a person repeats SIGINT, a scheduler other signals."""
    return not stop.asked and stop.signum == signal.SIGINT
