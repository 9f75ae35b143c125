"""
The control socket of a launch: other programs of the same user see it there, and can stop it.

Rules of this file: the socket is an abstract one, which needs no folder and is gone with its process. Only
programs of this user, or of root, get an answer, and a client trusts no socket of another user. A message is
one line of JSON; any other bytes are dropped. No client waits for another one, or for a launch that is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from typing import Any

from attrs import define, field, frozen

from elasticlib._clock import monotonic, wall_time
from elasticlib._untrusted import exactly, line, parse, seconds, whole
from elasticlib.errors import StartError
from elasticlib.processes import start_thread
from elasticlib.workers import Inbox, StopRequest

_log = logging.getLogger("elasticlib")

_PREFIX = "elasticlib-control"
_LIMIT = 2.0
"""Seconds for a message."""
_PAUSE = 0.1
"""Seconds until the next attempt to accept a program, where one has failed."""
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
class _Asker:
    """A program that is connected to the control socket."""

    connection: socket.socket
    until: float
    """Time at which it is disconnected, if its request is not whole by then; inf once it waits for the end."""
    data: bytes = b""

    @property
    def waits(self) -> bool:
        """True if it waits for the end of the launch."""
        return self.until == math.inf


@define
class _Control:
    """The control socket of one launch."""

    _listener: socket.socket
    _launch: RunningLaunch
    _inbox: Inbox
    # It has no descriptor of its own, of which there may be none left.
    _selector: selectors.PollSelector = field(init=False, factory=selectors.PollSelector)
    """The listener, and the clients with their `_Asker`."""
    _is_over: threading.Event = field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = field(init=False, default=None)

    def start(self) -> None:
        """Answer in a thread. Raises `StartError`."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        thread = threading.Thread(target=self.serve, name="elasticlib-control", daemon=True)
        self._thread = start_thread(thread)

    def serve(self) -> None:
        """Answer until `close`; no client waits for another."""
        while not self._is_over.is_set():
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)

            now = monotonic()
            for client in self._clients():
                if client.until <= now:
                    self._disconnect(client)

    def _clients(self) -> list[_Asker]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _seconds_left(self) -> float | None:
        """Return the time until the next client is disconnected; None if there is none."""
        soonest = min((client.until for client in self._clients()), default=math.inf)
        return None if soonest == math.inf else max(soonest - monotonic(), 0.0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Too many files may be open now, and fewer later. At the end of the launch the socket is shut down.
            _log.debug("a program could not connect to the control socket: %s", error)
            self._is_over.wait(_PAUSE)
            return

        if not _is_trusted(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Asker(connection, monotonic() + _LIMIT))

    def _read(self, client: _Asker) -> None:
        try:
            is_kept = self._advance(client)
        except (OSError, ValueError) as error:
            # Other programs may send anything, or exit.
            _log.debug("a request at the control socket was dropped: %s", error)
            is_kept = False
        if not is_kept:
            self._disconnect(client)

    def _advance(self, client: _Asker) -> bool:
        """Read from *client*, and answer its request once that is whole; return False if it has no further one."""
        part = client.connection.recv(_LONGEST)
        if client.waits:
            # It has exited, or sends a second request.
            return False

        client.data += part
        _check(part, client.data)
        return self._answer(client) if client.data.endswith(b"\n") else True

    def _answer(self, client: _Asker) -> bool:
        """Answer a request; return True if *client* waits for the end of the launch now."""
        request = _message_of(client.data)
        match request.get("do"):
            case "describe":
                _send(client.connection, _described(self._launch))
                return False
            case "stop":
                self._stop(request)
                # The connection stays open: its end shows the client that the launch has ended.
                client.until = math.inf
                _send(client.connection, {})
                return True
            case _:
                return False

    def _stop(self, request: Mapping[str, Any]) -> None:
        given = request.get("grace")
        grace = None if given is None else seconds(given, 0.0)
        only_node = request.get("only_node") is True
        why = f"job {self._launch.run_id!r} was stopped by elasticrun stop"
        self._inbox.put(StopRequest(why, grace, ends_job=not only_node))

    def _disconnect(self, client: _Asker) -> None:
        self._selector.unregister(client.connection)
        _shut(client.connection)

    def close(self) -> None:
        """End `serve`, and let the clients that wait know of the end."""
        self._is_over.set()
        # It wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_LIMIT)

        for each in (self._listener, *(client.connection for client in self._clients())):
            _shut(each)


def _shut(connection: socket.socket) -> None:
    """Close *connection* for its other end as well if a forked child has it too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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
    # A program may have several launches at a time, each with a socket of its own.
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


def running_launches() -> tuple[list[RunningLaunch], list[int]]:
    """
    Return the launches of this user that run on this machine, oldest first, and the processes of those without answer.

    A launch does not answer while its process is stopped.
    """
    found, silent = list[RunningLaunch](), list[int]()
    for address in _addresses():
        try:
            found.append(_description(address))
        except TimeoutError:
            silent.append(_process_of(address))
        except (OSError, ValueError) as error:
            # It has ended meanwhile, or is not a launch.
            _log.debug("the socket %s gives no description: %s", address, error)
    return sorted(found, key=lambda launch: launch.began), sorted(silent)


def _process_of(address: str) -> int:
    """Return the process whose launch has this *address*, by its own account."""
    return int(address.rpartition("/")[2].partition("-")[0])


def _description(address: str) -> RunningLaunch:
    with contextlib.closing(_connect(address)) as connection:
        _send(connection, {"do": "describe"})
        answer = _received(connection)
    run_id, title, pid, began = (answer.get(name) for name in ("run_id", "title", "pid", "began"))
    return RunningLaunch(line(run_id), line(title), whole(pid, 1), seconds(began), address)


def ask_to_stop(launch: RunningLaunch, grace: float | None, *, only_node: bool) -> socket.socket | None:
    """
    Ask *launch* to stop; return a connection that ends with the launch, None if it has ended already.

    *grace*: seconds until SIGKILL, None for the launch's own. *only_node*: the job's other nodes go on. Raises
    TimeoutError if the launch does not answer.
    """
    with contextlib.ExitStack() as unless_sent:
        try:
            connection = unless_sent.enter_context(contextlib.closing(_connect(launch.address)))
            _send(connection, {"do": "stop", "grace": grace, "only_node": only_node})
            _received(connection)
        # It is an OSError, too: a launch that does not answer has not ended.
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        unless_sent.pop_all()
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
    # The kernel shows the NUL at the beginning of an abstract address as "@".
    ours = re.compile(rf"@{_PREFIX}/{os.geteuid()}/\d{{1,10}}-[0-9a-f]+")
    return sorted(name[1:] for name in names if ours.fullmatch(name))


def _connect(address: str) -> socket.socket:
    """Connect to a control socket of this user. Raises OSError; TimeoutError without an answer."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_LIMIT)
        _reach(connection, address)
        if not _is_trusted(connection):
            raise PermissionError(f"the socket {address} belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(connection: socket.socket, address: str) -> None:
    try:
        connection.connect(f"\0{address}")
    except BlockingIOError as error:
        # More programs wait there than the kernel keeps.
        raise TimeoutError(f"the socket {address} accepts no programs") from error


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
        _check(part, data)
    return _message_of(data)


def _check(part: bytes, data: bytes) -> None:
    """Raise ValueError if no message can begin with *data*, whose last *part* was read now."""
    if not part or len(data) > _LONGEST:
        raise ValueError("the message is not one line")


def _message_of(data: bytes) -> dict[str, Any]:
    """Return the message in *data*. Raises ValueError for other bytes."""
    message: dict[str, Any] = exactly(parse(data), dict)
    return message
