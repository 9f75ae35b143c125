"""
A server of jobs for a program: in a child process, which ends with it.

Rules of this file: values are checked before anything starts. The server has a process of its own, as a program that
is busy for the length of a heartbeat would stop the workers of all its jobs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from elasticlib.errors import StartError
from elasticlib.processes import BEGIN_CODE, Channel, ChildProcess, Link, search_path_argument, spawn, wait_readable
from elasticlib.rendezvous._own_token import tokens_of_server
from elasticlib.rendezvous.serving._settings import MOST_JOBS, ServerSettings
from elasticlib.rendezvous.sidecar._sidecar_client import environment, rebuilt_error
from elasticlib.spec import DEFAULT_PORT

_PROGRAM = BEGIN_CODE + "from elasticlib.rendezvous.serving._program import main; main()"
_START = 60.0
"""Seconds for the start of the process; a slow file system may take some."""
_END = 20.0
"""Seconds for its end, in which nodes read why their jobs end."""


@contextmanager
def serve(
    port: int = DEFAULT_PORT, host: str = "", *, max_jobs: int = MOST_JOBS, token: str | None = None
) -> Iterator[str]:
    """
    Host the stores and coordinators of jobs beside this program; the block gets the endpoint for their nodes.

    The nodes use ``rdzv_backend="c10d"`` and this endpoint; each of them may die. At the end of the block, jobs that
    run end with an error that names the server. *port* 0 takes a free one; *host* is by default every address of this
    machine. Jobs need the *token*, by default that of ``ELASTICLIB_TOKEN``. Raises `ConfigError` for a wrong value.
    """
    tokens = (token,) if token else tokens_of_server(os.environ)
    settings = ServerSettings(port=port, host=host, max_jobs=max_jobs, tokens=tokens)
    child, link = _start()
    why = "its program died"
    try:
        yield _endpoint(child, link, settings)
        why = "its program ended it"
    except BaseException as error:
        why = f"its program ended it ({type(error).__name__})"
        raise
    finally:
        link.send({"op": "end", "why": why})
        link.close()
        child.wait(_END)


def _start() -> tuple[ChildProcess, Link]:
    ours, theirs = Channel.pair()
    link = Link(ours)
    try:
        command = [sys.executable, "-c", _PROGRAM, search_path_argument()]
        return spawn(command, environment(), theirs.fileno(), stderr=2), link
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()


def _endpoint(child: ChildProcess, link: Link, settings: ServerSettings) -> str:
    link.send(settings.plain())
    received = link.receive() if wait_readable([link], _START) else None
    if received is None:
        raise StartError(f"the server (pid {child.pid}) did not start: see its output")

    message, _ = received
    if message["op"] == "error":
        raise rebuilt_error(message["kind"], message.get("setting", ""), message["text"])
    return str(message["endpoint"])
