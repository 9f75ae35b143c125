"""
The process of a server of jobs: the command ``elasticrun serve``, or a child of a program that serves.

Rules of this file: wiring only. The main thread waits for the end; the server's own threads do all else.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType

from elasticlib.errors import RendezvousError
from elasticlib.processes import CHANNEL_FD, Channel
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.serving._job_server import JobServer
from elasticlib.rendezvous.serving._settings import ServerSettings
from elasticlib.rendezvous.sidecar._bridge import error_message
from elasticlib.rendezvous.sidecar._torch import import_stores


def serve_until_signal(settings: ServerSettings, say: Callable[[str], object]) -> None:
    """
    Serve jobs until SIGTERM, Ctrl-C or SIGHUP; *say* gets the endpoint. Call it in the main thread.

    Only torch's stores are imported, so no user code may run in this process. Raises `RendezvousError` if the server
    fails, and `ConfigError` for an address that it cannot listen at.
    """
    ends = SimpleQueue[signal.Signals | str]()

    def note(signum: int, frame: FrameType | None) -> None:
        ends.put(signal.Signals(signum))

    # Before the start: a signal that comes early ends the server, too.
    for signum in _signals():
        signal.signal(signum, note)

    # A store looks up the name of every peer, for its log only. Where no name server answers, one connection in thirty
    # takes 5 s, and its job is refused.
    os.environ["RES_OPTIONS"] = QUIET_LOOKUPS
    import_stores()
    server = JobServer.start(settings, failed=ends.put)
    say(server.endpoint)
    end = ends.get()
    if isinstance(end, str):
        server.close(end)
        raise RendezvousError(end)

    server.close(f"it got {end.name}")


def _signals() -> list[signal.Signals]:
    """Return the signals that end the server; after nohup, SIGHUP does not."""
    found = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def main() -> None:
    """Serve jobs for the parent, until it closes its end of the channel or has died."""
    # They are for the parent, which ends this process when it needs it no more.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)

    logging.basicConfig(format="%(levelname).1s %(asctime)s elasticlib serve[%(process)d] %(message)s")
    channel = Channel.adopt(CHANNEL_FD)
    received = channel.receive()
    if received is None:
        return

    message, _ = received
    import_stores()
    try:
        server = JobServer.start(ServerSettings(**message))
    except Exception as error:
        channel.send(error_message(error))
        return

    channel.send({"op": "serves", "endpoint": server.endpoint, "name": server.name})
    last = channel.receive()
    server.close("its program died" if last is None else last[0]["why"])
