"""
Sidecars of a program that is in many jobs: all are forked from one process, which has done the
imports.

Rules of this file: the process is started with the first sidecar, and ends with the last. A program
that changes its environment, search path or privileges in between gets another one.
"""

from __future__ import annotations

import os
import sys
import threading

from attrs import define, field

from elasticlib.errors import StartError
from elasticlib.processes import (
    BEGIN_CODE,
    CallerIdentity,
    Channel,
    Link,
    Process,
    search_path_argument,
    spawn,
    wait_readable,
)
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.sidecar._sidecar_client import SidecarClient, environment

_PROGRAM = BEGIN_CODE + "from elasticlib.rendezvous.sidecar._host import main; main()"
_SEND_LIMIT = 5
_END_LIMIT = 2.0


@define(eq=False)
class _Host:
    """A process from which sidecars are forked."""

    given: tuple[dict[str, str], str, CallerIdentity]
    """Its environment and search path, and the identity of the user who started it."""
    child: Process
    link: Link
    users: int = 0

    def is_alive(self) -> bool:
        # It never sends anything: a readable link means that it ended.
        return not wait_readable([self.link], 0)

    def fork(self, backend: str, channel: Channel) -> None:
        """
        Fork a sidecar on that *channel*, soon. Raises `StartError` when the process is stopped, or
        hangs.
        """
        try:
            self.link.send({"op": "fork", "backend": backend}, (channel.fileno(),))
        except BlockingIOError as error:
            raise StartError(
                "the process from which rendezvous sidecars are forked does not respond (was it suspended?)"
            ) from error

    def end(self) -> None:
        self.link.close()
        self.child.wait(_END_LIMIT)


@define(eq=False)
class _Hosts:
    """The hosts of this program."""

    _lock: threading.Lock = field(factory=threading.Lock)
    _kept: list[_Host] = field(factory=list)

    def take(self) -> _Host:
        """
        Return a host for a new sidecar; give it back when the sidecar has ended. Raises
        `StartError`.
        """
        # The parts that a fork inherits: from a host with other variables it would get a wrong
        # environment.
        given = environment(), search_path_argument(), CallerIdentity.now()
        with self._lock:
            found = next((host for host in self._kept if host.given == given and host.is_alive()), None)
            if found is None:
                found = _start(*given)
                self._kept.append(found)
            found.users += 1
            return found

    def give_back(self, host: _Host) -> None:
        """Note that a sidecar of *host* has ended; end an unused host."""
        with self._lock:
            host.users -= 1
            if host.users or host not in self._kept:
                return
            self._kept.remove(host)
        # Without the lock: its end may take a while, and other threads may need a host meanwhile.
        host.end()

    def drop(self) -> None:
        """Forget all hosts, in a process that was forked from their owner."""
        # Another thread of the parent may have had the lock; and the hosts are children of the parent, not of this one.
        self._lock, self._kept = threading.Lock(), []


def _start(variables: dict[str, str], path: str, identity: CallerIdentity) -> _Host:
    ours, theirs = Channel.pair()

    # A host that was stopped must not block the caller without end.
    ours.limit(_SEND_LIMIT)
    link = Link(ours)
    try:
        child = spawn([sys.executable, "-c", _PROGRAM, path], variables, theirs.fileno())
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()

    return _Host((variables, path, identity), child, link)


_hosts = _Hosts()
os.register_at_fork(after_in_child=_hosts.drop)


class SharedSidecar(SidecarClient):
    """A `SidecarClient` whose process is forked from the same host as this program's other ones."""

    _is_shared = True

    def __init__(self, job: NodeJob, *, stall: float | None = None) -> None:
        self._backend = job.backend
        self._host = _hosts.take()
        try:
            super().__init__(job, stall=stall)
        except BaseException:
            _hosts.give_back(self._host)
            raise

    def _begin(self, theirs: Channel) -> Process:
        self._host.fork(self._backend, theirs)
        # Its number is unknown yet: a handle comes with its first message.
        return Process(0)

    def close(self) -> None:
        """
        Close the client as `SidecarClient` does; the host ends with the last sidecar of this
        program.
        """
        # In a forked child the parent's sidecar must not be ended.
        if self._closed or os.getpid() != self._owner:
            return
        try:
            super().close()
        finally:
            _hosts.give_back(self._host)
