"""
Sidecars of a program that is in many jobs: all are forked from one process, which has done the imports.

Rules of this file: the process is started with the first of them, and ends with the last. Programs that change their
environment, search path or privileges in between get another one.
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
    """The process that sidecars are forked from."""

    given: tuple[dict[str, str], str, CallerIdentity]
    """Its environment and search path, and the identity of the user who started it."""
    child: Process
    link: Link
    users: int = 0

    def is_alive(self) -> bool:
        # It never says anything: what is readable is its end.
        return not wait_readable([self.link], 0)

    def fork(self, backend: str, channel: Channel) -> None:
        """A sidecar on that *channel*, soon. Raises `StartError` when the process is stopped, or hangs."""
        try:
            self.link.send({"op": "fork", "backend": backend}, (channel.fileno(),))
        except BlockingIOError as error:
            raise StartError("the process that sidecars are forked from does not respond: it is stopped") from error

    def end(self) -> None:
        self.link.close()
        self.child.wait(_END_LIMIT)


@define(eq=False)
class _Hosts:
    """The hosts of this program."""

    _lock: threading.Lock = field(factory=threading.Lock)
    _kept: list[_Host] = field(factory=list)

    def take(self) -> _Host:
        """One that a sidecar may be forked from; give it back when that has ended. Raises `StartError`."""
        # What a fork would inherit: from a host with other variables it would get a wrong environment.
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
        # Without the lock: its end may take a while, and others want one of theirs meanwhile.
        host.end()

    def drop(self) -> None:
        """Forget all, in a process that was forked from their owner."""
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
    """A `SidecarClient` whose process is forked from one that this program's others come from, too."""

    _is_shared = True

    def __init__(self, job: NodeJob, *, stall: float | None = None) -> None:
        self._backend = job.backend
        self._host = _hosts.take()
        try:
            super().__init__(job, stall=stall)
        except BaseException:
            _hosts.give_back(self._host)
            raise

    def _begin(self, program: str, theirs: Channel) -> Process:
        self._host.fork(self._backend, theirs)
        # Nobody knows its number yet: a handle comes with its first message.
        return Process(0)

    def close(self) -> None:
        """As that of `SidecarClient`; the process that it came from ends with the last one of this program."""
        # In a forked child the parent's sidecar is not the child's to end.
        if self._closed or os.getpid() != self._owner:
            return
        try:
            super().close()
        finally:
            _hosts.give_back(self._host)
