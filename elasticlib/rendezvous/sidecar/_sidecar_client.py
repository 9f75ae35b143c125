"""
The launcher's client of its sidecar: a `Membership` that passes all calls to `_bridge`.

The store's library blocks when the store is silent, and a launcher may freeze or die. So a separate
process keeps the contact, ends workers that no other process can end in time, and reports the death
of its launcher.

Rules of this file: no call of the agent blocks. Without an answer from the process this node counts
as cut off, as with a silent store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from elasticlib import errors
from elasticlib._clock import Clock, monotonic
from elasticlib.errors import (
    ElasticError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from elasticlib.processes import (
    BEGIN_CODE,
    FROM_OUTSIDE,
    Channel,
    Lease,
    Message,
    Process,
    closed_in_forks,
    room_for_descriptors,
    search_path_argument,
    spawn,
)
from elasticlib.rendezvous._membership import MembershipEvent, Requests
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.protocol._messages import (
    Close,
    ContactLost,
    Final,
    Notice,
    StoreGone,
    WorkerReport,
    from_plain,
    to_plain,
)
from elasticlib.rendezvous.protocol._shortening import fitting
from elasticlib.rendezvous.protocol._timing import DEAF, GRACE
from elasticlib.rendezvous.sidecar._contact import ContactLimits
from elasticlib.rendezvous.sidecar._kept import Kept
from elasticlib.rendezvous.sidecar._sidecar_process import IMPORTING, SidecarProcess
from elasticlib.spec import TOKEN_VARIABLE

_log = logging.getLogger("elasticlib")

ALIVE = 0.075
"""Share of the heartbeat time between two signs of life to the sidecar; at most a second."""
_ENDING = 6.0
"""Seconds beyond the job's own time for leaving, after which the process is killed."""
_MOST_LOST = 3
"""Processes that one node may lose."""
_BIRTH = 600.0
"""Seconds for the first message of the process, if the job has no join time."""

_PROGRAM = BEGIN_CODE + "from elasticlib.rendezvous.sidecar._bridge import main; main()"


class SidecarClient:
    """
    This node's place in *job*, kept by a separate process that starts now; fulfils `Membership`.

    This program counts as standing still when no thread of it runs for 0.15 of the heartbeat time;
    then its node's heartbeats pause. *stall* replaces that share for a program without workers:
    whatever blocks its other threads does not make it dead.

    Raises `StartError` when the process cannot be started; `drain` raises its later errors.
    """

    requests: Requests | None = None
    """Source of requests to end; while `close` stays for other jobs, a request ends that wait."""
    stays = False
    """True if `close` may wait for the end of the whole job, where an engine would end the other nodes else."""
    _is_shared = False
    """True if the owner is a handler, whose caller decides what a loss means."""

    def __init__(
        self, job: NodeJob, *, stall: float | None = None, program: str = _PROGRAM, clock: Clock = monotonic
    ) -> None:
        self.node = job.node
        self._job = job
        self._program = program
        self._owner = os.getpid()
        self._notices = _Notices()
        self._error: ElasticError | None = None
        self._closed = False
        self._succession = SidecarSuccession(job, self._begin, stall, clock, replaces=not self._is_shared)
        self._process = self._succession.start()

    def _begin(self, theirs: Channel) -> Process:
        """Start a process with its end of the channel."""
        return spawn([sys.executable, "-c", self._program, search_path_argument()], environment(), theirs.fileno())

    # Reports.

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round, for *slots* workers. No worker of this node may run any more."""
        self._notices.generation += 1
        self._say({"op": "join", "slots": slots, "role": role, "generation": self._notices.generation})

    def post(self, report: WorkerReport | Close) -> None:
        """
        Report the state of the workers, that this node leaves, or the job's end; see
        `NodeClient.post`.
        """
        body = to_plain(fitting(report))
        # An invalid report is raised here, as this node's own error, and not as one of the process.
        from_plain(body)
        self._say({"op": "report", "report": body})

    def guard(self, handle: int) -> Lease | None:
        """
        Pass a handle of the process whose death ends all workers. The caller keeps the handle.

        The process is killed if contact is lost. Return the lease at whose end the caller must end
        the workers, or None if contact is never lost.
        """
        # A program whose files have used up its limit must still be able to have its workers killed.
        with room_for_descriptors(1):
            self._say({"op": "guard"}, os.dup(handle))
        # Without heartbeats contact is never lost, so that nothing limits the workers' time.
        return self._process.lease if self._job.heartbeat else None

    def _say(self, message: Message, *descriptors: int) -> None:
        if self._closed:
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous and cannot send {message['op']!r}")
        self._process.say(message, *descriptors)

    @property
    def descriptors(self) -> dict[str, int]:
        """Descriptors that each worker must hold, by name: the presence socket, if there is one."""
        kept = self._succession.kept.descriptors()
        return {"presence": kept["presence"]} if "presence" in kept else {}

    # Events.

    @property
    def final(self) -> Final | None:
        """The end of this node's part in the job, once `drain` has returned it."""
        return self._notices.final

    def listener(self) -> socket.socket | None:
        """Return the bound socket for the worker store of a round in which this node has group rank 0."""
        return self._notices.listener()

    def waiting(self) -> int:
        """
        Return the number of nodes that waited for ranks during a round, as of the last heartbeat.
        """
        return self._notices.waiting

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has something; -1 once closed."""
        return self._process.link.fileno()

    def poll_timeout(self) -> float | None:
        """Return the seconds until `drain` must be called even if nothing is readable."""
        return 0.0 if self._error is not None else self._process.poll_timeout()

    def drain(self) -> list[MembershipEvent]:
        """
        Return the new events, oldest first, without blocking.

        Raises the error that ended this node's part in the process; `RendezvousConnectionError`
        when the process ended.
        """
        if self._closed:
            return []

        # The events first: where this program stood still, the answers are in the channel, and the
        # process was not silent.
        notices = self._receive_all()
        if self._error is None and self._process.is_overdue():
            notices += self._note_silence()
        if self._error is None:
            report = self._process.report_of_birth(self._job.run_id)
            if report is not None:
                _log.warning("node %s %s", self.node, report)

        # Events before the error are returned first; the next call raises it.
        if self._error is not None and not notices:
            raise self._error

        return notices

    def _receive_all(self) -> list[MembershipEvent]:
        notices: list[MembershipEvent] = []
        while self._process.is_readable():
            try:
                received = self._process.receive()
            except OSError as error:  # of a worker store's socket, for which no descriptor is free
                # The frame is lost with its socket: this node can take no ranks.
                self._error = RendezvousError(f"node {self.node}: no ranks can be received: {error}")
                break

            if received is None:
                self._lose_process(notices)
                # The next process, if there is one, may have spoken by now.
                continue

            notices += self._handle(*received)

        return notices

    def _note_silence(self) -> list[MembershipEvent]:
        if self._process.contact.is_silent:
            why = f"its sidecar has not answered for {self._job.reconnect_timeout:g} s more"
            self._error = RendezvousConnectionError(f"node {self.node}: contact with the job was lost, and {why}")
            return []

        # The agent stops the workers now, and the job's reconnect time runs: as with a silent store.
        self._process.find_silent()

        # Before its first answer no worker runs, so that there is nothing to stop.
        if self._process.contact.begun:
            return [self._cut_off("the sidecar of this node does not answer")]
        why = f"its sidecar did not start within {self._process.contact.limits.birth:g} s: {IMPORTING}"
        self._error = RendezvousTimeoutError(f"node {self.node}: {why}")
        return []

    def _cut_off(self, why: str) -> ContactLost:
        return ContactLost(f"contact with the job is lost: {why}", GRACE * self._job.heartbeat)

    def _lose_process(self, notices: list[MembershipEvent]) -> None:
        self._process.lose()
        if self._error is not None:
            return  # the process has sent the reason

        why = f"the {self._process.label()} of this node ended unexpectedly{FROM_OUTSIDE}"
        notices.append(self._cut_off(why))

        # After the job's end there is nothing to ask for.
        if self.final is None and self._succession.may_continue():
            _log.warning("node %s: %s: a new process replaces it, and this node asks for ranks again", self.node, why)
            self._replace_process(why)
            return

        self._error = RendezvousConnectionError(f"node {self.node}: {why}")
        self._succession.kept.forget_endpoint()

        # Other nodes' coordinator may continue without this one, unless the store went with the
        # process.
        is_job_over = self._succession.hosts or self._job.max_nodes == 1
        if is_job_over:
            notices.append(StoreGone(why))  # no node coordinates the job any more

    def _replace_process(self, why: str) -> None:
        """
        Start another process for this node, under its name, as a node that asks for ranks again.
        """
        self._process.disconnect()
        self._notices.waiting = 0
        self._notices.drop_listener()
        try:
            self._process = self._succession.replace(why)
        except ElasticError as error:
            self._error = error

    def _handle(self, message: Message, descriptors: list[int]) -> list[MembershipEvent]:
        """Return the notices of one message for the agent; note its other contents here."""
        match message["op"]:
            case "notice":
                notice = self._notices.receive(message, descriptors)
                return [] if notice is None else [notice]
            case "hosts":
                self._succession.note_hosting(descriptors)
            case "waiting":
                self._notices.waiting = message["count"]
            case "lost":
                return [ContactLost(message["why"], message["grace"])]
            case "gone":
                return [StoreGone(message["why"])]
            case "error":
                self._error = rebuilt_error(message["kind"], message.get("setting", ""), message["text"])
            case "log":
                _log.log(message["level"], "%s", message["text"])

        return []

    def close(self) -> None:
        """
        Leave the job, and return when the process has ended.

        If the job's store lives on this node, the others must first have read how the job ended.
        That takes at most the job's `close_timeout`. Other jobs in that store must have ended, too,
        after at most the job's `store_linger`. A Ctrl-C, or a request to end, ends that last wait,
        and nothing else.
        """
        # In a forked child the sidecar belongs to the parent, and must not end.
        if self._closed or os.getpid() != self._owner:
            return

        self._notices.drop_listener()

        # A process that does not hear us, or has sent its error, sends no goodbye.
        says_goodbye = self._process.is_listening() and self._error is None

        # Only a process that reports to its job waits for others to read the end.
        limit = _ENDING + (self._job.close_timeout if says_goodbye else 0.0)

        # From here on no other thread may say anything: the goodbye is the last message.
        self._closed = True
        self._succession.kept.forget_endpoint()
        try:
            self._process.end(self._handle, self.requests, limit, _ENDING, stays=self.stays)
            self._notices.drop_listener()
        finally:
            self._succession.close()


@define(eq=False)
class SidecarSuccession:
    """
    The sidecars of one node, one after the other, with the parts that outlive each of them. All have
    the node's name.
    """

    job: NodeJob
    begin: Callable[[Channel], Process]
    """Start a process with its end of the channel."""
    stall: float | None
    clock: Clock
    replaces: bool
    """False if no process is replaced: the caller of a handler decides what a loss means."""
    kept: Kept = field(init=False)
    hosts: bool = False
    """True if the job's store lives in the process, and the job ends with it."""
    _leases: list[Lease] = field(factory=list)
    """
    Leases of all processes so far: the last one's is in use, earlier ones may still end workers.
    """

    def __attrs_post_init__(self) -> None:
        self.kept = Kept.of(self.job) if self.replaces else Kept()
        self.job = evolve(self.job, presence_port=self.kept.presence_port())

    def start(self) -> SidecarProcess:
        """Start the first process."""
        has_heartbeats = self.job.heartbeat > 0
        kept = self.kept.descriptors()
        process = SidecarProcess.start(
            self.begin,
            {"op": "job", "job": self.job.plain(), "stillness": self.stall, "kept": list(kept)},
            list(kept.values()),
            limits=_limits_of(self.job, self.stall or 0.0),
            interval=min(1.0, ALIVE * self.job.heartbeat) if has_heartbeats else None,
            clock=self.clock,
        )
        self._leases.append(process.lease)
        return process

    def replace(self, why: str) -> SidecarProcess:
        """Start the next process; *why* is how the last one ended."""
        # The number keeps its messages above those of its predecessor: the coordinator ignores lower ones.
        self.job = evolve(self.job, sidecars=self.job.sidecars + 1, after=why)
        return self.start()

    def may_continue(self) -> bool:
        """Return whether another process may take the place of the last one."""
        # The job's store went with it, unless another process can open it again: see `Kept.keep`.
        if self.hosts or not self.replaces:
            return False
        return self.job.sidecars != _MOST_LOST

    def note_hosting(self, descriptors: Sequence[int]) -> None:
        """Note that the process hosts the job's store; *descriptors*: its listening socket, if it sent that."""
        # With its socket kept, another process can open the store again: the job does not end with this one.
        self.hosts = not self.kept.keep(descriptors)

    def close(self) -> None:
        """Close the parts that outlived the processes."""
        for lease in self._leases:
            lease.close()
        self.kept.close()


@define(eq=False)
class _Notices:
    """
    The coordinator's notices through the process, for the latest request for ranks; earlier ones
    are void.
    """

    generation: int = 0
    """Number of requests for ranks so far."""
    waiting: int = 0
    """Number of nodes that waited for ranks, as last reported."""
    final: Final | None = None
    _listener: socket.socket | None = None
    """The listener of a round in which this node has group rank 0."""

    def receive(self, message: Message, descriptors: list[int]) -> Notice | None:
        """Return the notice of a message; None if it answers an earlier request."""
        notice = from_plain(message["notice"])
        assert isinstance(notice, Notice)
        if descriptors:
            self.drop_listener()
            self._listener = closed_in_forks(socket.socket(fileno=descriptors[0]))

        # The answer to an earlier request has ranks that are void, but the job's end always counts.
        if isinstance(notice, Final):
            self.final = notice
            return notice
        if message["generation"] == self.generation:
            return notice

        self.drop_listener()
        return None

    def listener(self) -> socket.socket | None:
        """Return the socket that came with the last notice, once."""
        found, self._listener = self._listener, None
        return found

    def drop_listener(self) -> None:
        """Close the socket if it was not taken."""
        listener = self.listener()
        if listener is not None:
            listener.close()


def _limits_of(job: NodeJob, stall: float) -> ContactLimits:
    """
    Return the limits of a sidecar for *job*; its program may stand still for *stall* of the
    heartbeat time.
    """
    answer = (DEAF + stall) * job.heartbeat if job.heartbeat else None
    return ContactLimits(job.join_timeout or _BIRTH, answer, job.reconnect_timeout)


def environment() -> dict[str, str]:
    """Return the variables that the process is started with."""
    inherited = dict(os.environ)
    # The job's token is sent through the channel, and never to programs that the process starts.
    inherited.pop(TOKEN_VARIABLE, None)
    # A store's server looks up the name of every peer, for its log only: that must cost no time.
    return {**inherited, "RES_OPTIONS": QUIET_LOOKUPS, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rebuilt_error(kind: str, setting: str, text: str) -> ElasticError:
    """Return the error that a program of elasticlib has sent by `_bridge.error_message`."""
    # The name comes from our own process, but a class that is not such an error is refused all the
    # same.
    found = getattr(errors, kind, None)
    if setting and isinstance(found, type) and issubclass(found, errors.ConfigError):
        return found.of_setting(setting, text)
    if isinstance(found, type) and issubclass(found, (RendezvousError, errors.ConfigError, errors.StartError)):
        # A class whose constructor takes other arguments than a text.
        with contextlib.suppress(TypeError):
            return found(text)
    return RendezvousError(text)
