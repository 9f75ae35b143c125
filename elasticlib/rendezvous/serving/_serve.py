"""
The server of jobs for programs, and for the command ``elasticrun serve``.

Rules of this file: values are checked before anything is bound.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from elasticlib.errors import ConfigError, RendezvousError
from elasticlib.rendezvous._own_token import tokens_of_server
from elasticlib.rendezvous.net._endpoint import DEFAULT_PORT, is_host
from elasticlib.rendezvous.serving._job_server import JobServer

MOST_JOBS = 64
_MOST = 10_000
"""Jobs at once, at most: each has a thread and three connections."""


@contextmanager
def serve(
    port: int = DEFAULT_PORT, host: str = "", *, max_jobs: int = MOST_JOBS, token: str | None = None
) -> Iterator[str]:
    """
    Host the stores and coordinators of jobs in this program; the block gets the endpoint for their nodes.

    The nodes use ``rdzv_backend="c10d"`` and this endpoint; each of them may die. At the end of the block, jobs that
    run end with an error that names the server. *port* 0 takes a free one, *host* is by default every address of this
    machine. Jobs need the *token*, by default that of ``ELASTICLIB_TOKEN``. Raises `ConfigError` for a wrong value.
    """
    server = _start(port, host, max_jobs, token)
    why = "its program ended it"
    try:
        yield server.endpoint
    except BaseException as error:
        why = f"its program ended it ({type(error).__name__})"
        raise
    finally:
        server.close(_reason(server, why))


def serve_until_signal(port: int, host: str, max_jobs: int, say: Callable[[str], object]) -> None:
    """
    Do the same as `serve` in the main thread, until SIGTERM, Ctrl-C or SIGHUP; *say* gets a line once it serves.

    Raises `RendezvousError` if the server fails.
    """
    ends = SimpleQueue[signal.Signals | str]()

    def note(signum: int, frame: FrameType | None) -> None:
        ends.put(signal.Signals(signum))

    # Before the start: a signal that comes early ends the server, too.
    for signum in _signals():
        signal.signal(signum, note)

    server = _start(port, host, max_jobs, None, failed=ends.put)
    say(f"serving jobs at {server.endpoint}, {max_jobs} at once")
    end = ends.get()
    if isinstance(end, str):
        server.close(_reason(server, end))
        raise RendezvousError(end)

    server.close(_reason(server, f"it got {end.name}"))


def _signals() -> list[signal.Signals]:
    """Return the signals that end the server; after nohup, SIGHUP does not."""
    found = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def _start(
    port: int, host: str, max_jobs: int, token: str | None, failed: Callable[[str], None] = lambda why: None
) -> JobServer:
    if not 0 <= port <= 65535:
        raise ConfigError.of_setting("port", f"{port}: give a number from 0 to 65535 (0: any free port)")
    if not 1 <= max_jobs <= _MOST:
        raise ConfigError.of_setting("max_jobs", f"{max_jobs}: give a number from 1 to {_MOST}")
    if host and not is_host(host):
        raise ConfigError.of_setting("host", f"{host!r:.80}: give a name or an address of this machine")

    tokens = (token,) if token else tokens_of_server(os.environ)
    return JobServer.start(host, port, most_jobs=max_jobs, tokens=tokens, failed=failed)


def _reason(server: JobServer, why: str) -> str:
    return f"the server {server.name} at {server.endpoint}, which coordinated the job, ended: {why}"
