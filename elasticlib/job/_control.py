"""
The control socket of a launch: other programs of the same user see it there, and can stop it.

Rules of this file: the socket is an abstract one, which needs no folder and is gone with its process. Only
programs of this user, or of root, get an answer, and a client trusts no socket of another user. A message is
one line of JSON; any other bytes are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from typing import Any

from attrs import define, field, frozen

from elasticlib._clock import wall_time
from elasticlib._untrusted import exactly, line, parse, seconds, whole
from elasticlib.errors import StartError
from elasticlib.processes import start_thread
from elasticlib.workers import Inbox, StopRequest

_log = logging.getLogger("elasticlib")

_PREFIX = "elasticlib-control"
_LIMIT = 2.0
"""Seconds for a message."""
_LONGEST = 4096
_PEER = struct.Struct("iII")
"""Process, user and group of the other end, as SO_PEERCRED gives them."""


@frozen
class RunningLaunch:
    """One launch that runs on this machine, as it describes itself."""

    run_id: str
    title: str
    """Name of its script or function."""
    pid: int
    """Process of the launcher."""
    began: float
    """Unix time of its start."""
    address: str
    """Its control socket."""


# The launch.


@define
class _Control:
    """The control socket of one launch."""

    _listener: socket.socket
    _launch: RunningLaunch
    _inbox: Inbox
    _waiting: list[socket.socket] = field(init=False, factory=list)
    """Connections whose clients wait for the end."""
    _thread: threading.Thread | None = field(init=False, default=None)

    def start(self) -> None:
        """Answer in a thread. Raises `StartError`."""
        thread = threading.Thread(target=self.serve, name="elasticlib-control", daemon=True)
        self._thread = start_thread(thread)

    def serve(self) -> None:
        """Answer until the socket is shut down."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                keeps = self._answer(connection)
            except (OSError, ValueError) as error:
                # Other programs may send anything, or go away.
                _log.debug("a request at the control socket was dropped: %s", error)
                keeps = False
            if not keeps:
                connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; return whether its client waits for the end of the launch."""
        if not _is_trusted(connection):
            return False
        connection.settimeout(_LIMIT)
        request = _received(connection)
        match request.get("do"):
            case "describe":
                _send(connection, _described(self._launch))
                return False
            case "stop":
                self._stop(request)
                self._waiting.append(connection)
                _send(connection, {})
                return True
            case _:
                return False

    def _stop(self, request: Mapping[str, Any]) -> None:
        given = request.get("grace")
        grace = None if given is None else seconds(given, 0.0)
        only_node = request.get("only_node") is True
        why = f"job {self._launch.run_id!r} was stopped by elasticrun stop"
        self._inbox.put(StopRequest(why, grace, ends_job=not only_node))

    def close(self) -> None:
        """End `serve`, and let the clients that wait know of the end."""
        # Closing alone would not wake a thread that accepts, nor the clients of a socket that a forked child has too.
        for each in (self._listener, *self._waiting):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        if self._thread is not None:
            self._thread.join(_LIMIT)


@contextmanager
def controlled(run_id: str, title: str, inbox: Inbox) -> Iterator[None]:
    """Open the control socket of a launch within the block; without one the launch runs all the same."""
    with contextlib.ExitStack() as until_end:
        try:
            until_end.callback(_open(run_id, title, inbox).close)
        except (OSError, StartError) as error:
            _log.debug("the launch has no control socket: %s", error)
        yield


def _open(run_id: str, title: str, inbox: Inbox) -> _Control:
    address = f"{_PREFIX}/{os.geteuid()}/{os.getpid()}-{secrets.token_hex(4)}"
    launch = RunningLaunch(run_id, title, os.getpid(), wall_time(), address)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
        listener.listen()
        control = _Control(listener, launch, inbox)
        control.start()
    except BaseException:
        listener.close()
        raise
    return control


# Other programs.


def running_launches() -> list[RunningLaunch]:
    """Return the launches of this user that run on this machine, oldest first."""
    found = []
    for address in _addresses():
        with contextlib.suppress(OSError, ValueError):
            found.append(_description(address))
    return sorted(found, key=lambda launch: launch.began)


def _description(address: str) -> RunningLaunch:
    with contextlib.closing(_connect(address)) as connection:
        _send(connection, {"do": "describe"})
        answer = _received(connection)
    run_id, title, pid, began = (answer.get(name) for name in ("run_id", "title", "pid", "began"))
    return RunningLaunch(line(run_id), line(title), whole(pid, 1), seconds(began), address)


def ask_to_stop(launch: RunningLaunch, grace: float | None, *, only_node: bool) -> socket.socket | None:
    """
    Ask *launch* to stop; return a connection that ends with the launch, None if it has ended already.

    *grace*: seconds until SIGKILL, None for the launch's own. *only_node*: the job's other nodes go on.
    """
    try:
        connection = _connect(launch.address)
    except OSError:
        return None
    try:
        _send(connection, {"do": "stop", "grace": grace, "only_node": only_node})
        _received(connection)
    except (OSError, ValueError):
        connection.close()
        return None
    return connection


def wait_for_end(connection: socket.socket) -> None:
    """Return once the launch at the other end of a *connection* of `ask_to_stop` has ended."""
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        connection.recv(1)
    connection.close()


def _addresses() -> list[str]:
    """Return the control sockets of this user's launches."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
            names = {line.rpartition(" ")[2].strip() for line in table}
    except OSError:
        return []
    start = f"@{_PREFIX}/{os.geteuid()}/"
    return sorted(name[1:] for name in names if name.startswith(start))


def _connect(address: str) -> socket.socket:
    """Connect to a control socket of this user. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_LIMIT)
        connection.connect(f"\0{address}")
        if not _is_trusted(connection):
            raise PermissionError(f"the socket {address} belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


# Messages.


def _is_trusted(connection: socket.socket) -> bool:
    """Return True if the other end is a program of this user, or of root."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user in (os.geteuid(), 0)


def _described(launch: RunningLaunch) -> dict[str, object]:
    return {"run_id": launch.run_id, "title": launch.title, "pid": launch.pid, "began": launch.began}


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    connection.sendall(dumps(message).encode() + b"\n")


def _received(connection: socket.socket) -> dict[str, Any]:
    """Return the one message that the other end sends. Raises OSError, and ValueError for other bytes."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(_LONGEST)
        data += part
        if not part or len(data) > _LONGEST:
            raise ValueError("the message is not one line")
    message: dict[str, Any] = exactly(parse(data), dict)
    return message
