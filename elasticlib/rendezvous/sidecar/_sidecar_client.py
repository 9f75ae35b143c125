"""
The launcher's client of its sidecar: a `Membership` that passes all calls to `_bridge`.

The store's library blocks when the store is silent, and a launcher may freeze or die. So a separate
process keeps the contact, ends workers that no other process can end in time, and reports the death
of its launcher.

Rules of this file: no call of the agent blocks. A thread sends the messages that cannot go at once,
and regular signs of life of this launcher. Without an answer from the process this node counts as
cut off, as with a silent store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

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
    Link,
    Message,
    Process,
    Waitable,
    closed_in_forks,
    encoded_message,
    room_for_descriptors,
    search_path_argument,
    spawn,
    wait_readable,
)
from elasticlib.rendezvous._membership import STAYS, Requests, Word
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.protocol._messages import (
    Close,
    ContactLost,
    Final,
    RankAssignment,
    RoundEnd,
    StoreGone,
    WorkerReport,
    from_plain,
    to_plain,
)
from elasticlib.rendezvous.protocol._shortening import fitting
from elasticlib.rendezvous.protocol._timing import DEAF, GRACE
from elasticlib.rendezvous.sidecar._contact import ContactLimits, SidecarContact
from elasticlib.rendezvous.sidecar._kept import Kept
from elasticlib.rendezvous.sidecar._sender import Sender, channel
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
_IMPORTING = "`import torch` takes so long here (a cold disk?), or the machine is busy; no other node was contacted yet"

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
    _is_shared = False
    """True if the owner is a handler, whose caller decides what a loss means."""

    def __init__(
        self, job: NodeJob, *, stall: float | None = None, program: str = _PROGRAM, clock: Clock = monotonic
    ) -> None:
        self.node = job.node
        self._job = job
        self._stall, self._program = stall, program
        self.final: Final | None = None
        """The end of this node's part in the job, once `drain` has returned it."""
        self._clock = clock
        self._owner = os.getpid()
        self._limits = _limits_of(job, stall or 0.0)
        self._waiting = 0
        self._notices = _Notices()
        self._error: ElasticError | None = None
        self._gone = False
        self._closed = False
        self._hosts = False
        """True if the job's store lives in the process, and the job ends with it."""
        self._kept = Kept() if self._is_shared else Kept.of(job)
        self._leases: list[Lease] = []
        """
        Leases of all processes so far: the last one's is in use, earlier ones may still end
        workers.
        """
        self._start()

    def _start(self) -> None:
        ours, theirs = channel()
        self._gone = False
        with contextlib.ExitStack() as undo:
            link = Link(ours)
            undo.callback(link.close)
            with contextlib.closing(theirs):
                child = self._begin(self._program, theirs)
            # If a later step fails, no process must stay behind that waits for its job.
            undo.callback(child.wait, 0.0)
            now = self._clock()
            contact = SidecarContact(self._limits, born=now, heard=now)
            lease = Lease()
            undo.callback(lease.close)
            first = encoded_message({"op": "job", "job": self._job.plain(), "stillness": self._stall})
            has_heartbeats = self._job.heartbeat > 0
            interval = min(1.0, ALIVE * self._job.heartbeat) if has_heartbeats else None

            # Copies: the sender closes what it sent, and the next process gets the same objects again.
            given = (lease.fileno(), *self._kept.descriptors())
            self._sender = Sender(link, interval, (first, tuple(map(os.dup, given))))
            undo.pop_all()

        self._link, self._child, self._contact = link, child, contact
        self._leases.append(lease)

    def _begin(self, program: str, theirs: Channel) -> Process:
        return spawn([sys.executable, "-c", program, search_path_argument()], environment(), theirs.fileno())

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
        return self._leases[-1] if self._job.heartbeat else None

    def _say(self, message: Message, *descriptors: int) -> None:
        if self._closed:
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous: {message['op']!r} comes too late")
        self._sender.say(encoded_message(message), descriptors)

    # Events.

    def listener(self) -> socket.socket | None:
        """Return the bound socket for the worker store of a round in which this node has group rank 0."""
        return self._notices.listener()

    def waiting(self) -> int:
        """
        Return the number of nodes that waited for ranks during a round, as of the last heartbeat.
        """
        return self._waiting

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has something; -1 once closed."""
        return self._link.fileno()

    def poll_timeout(self) -> float | None:
        """Return the seconds until `drain` must be called even if nothing is readable."""
        if self._error is not None:
            return 0.0
        # A process that is gone is not expected to answer.
        wake_at = None if self._gone else self._contact.wake_at()
        if wake_at is None:
            return None
        return max(0.0, wake_at - self._clock())

    def drain(self) -> list[Word]:
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
        if self._is_overdue():
            notices += self._note_silence()
        self._report_birth()

        # Events before the error are returned first; the next call raises it.
        if self._error is not None and not notices:
            raise self._error

        return notices

    def _receive_all(self) -> list[Word]:
        notices: list[Word] = []
        while not self._gone and wait_readable([self._link], 0):
            try:
                received = self._link.receive()
            except OSError as error:  # of a worker store's socket, for which no descriptor is free
                # The frame is lost with its socket: this node can take no ranks.
                self._error = RendezvousError(f"node {self.node}: no ranks can be received: {error}")
                break

            if received is None:
                self._lose_process(notices)
                continue

            message, descriptors = received

            # A forked process sends its number before it knows its job.
            self._contact.hear(self._clock(), begins=message["op"] != "born")
            notices += self._hear(message, descriptors)

        return notices

    def _is_overdue(self) -> bool:
        """Return whether the process should have answered by now."""
        if self._gone or self._error is not None:
            return False
        deadline = self._contact.deadline()
        return deadline is not None and self._clock() >= deadline

    def _note_silence(self) -> list[Word]:
        if self._contact.is_silent:
            why = f"its sidecar has not answered for {self._job.reconnect_timeout:g} s more"
            self._error = RendezvousConnectionError(f"node {self.node}: contact with the job was lost, and {why}")
            return []

        # The agent stops the workers now, and the job's reconnect time runs: as with a silent store.
        self._contact.find_silent(self._clock())
        self._child.send(signal.SIGCONT)  # it may have been stopped, alone

        # Before its first answer no worker runs, so that there is nothing to stop.
        if self._contact.begun:
            return [self._cut_off("the sidecar of this node does not answer")]

        why = f"its sidecar did not start within {self._limits.birth:g} s: {_IMPORTING}"
        self._error = RendezvousTimeoutError(f"node {self.node}: {why}")
        return []

    def _report_birth(self) -> None:
        if self._gone or self._error is not None:
            return
        waited = self._contact.report_of_birth(self._clock())
        if waited is None:
            return
        self._child.send(signal.SIGCONT)  # it may have been stopped, alone
        what = f"node {self.node} has waited {waited:.0f} s for job {self._job.run_id!r}"
        _log.warning("%s: %s; %.0f s left", what, _IMPORTING, self._limits.birth - waited)

    def _cut_off(self, why: str) -> ContactLost:
        return ContactLost(f"contact with the job is lost: {why}", GRACE * self._job.heartbeat)

    def _lose_process(self, notices: list[Word]) -> None:
        self._gone = True
        self._child.wait(1.0)
        if self._error is not None:
            return  # the process has sent the reason

        pid = f" (pid {self._child.pid})" if self._child.pid > 0 else ""
        why = f"the sidecar{pid} of this node ended unexpectedly{FROM_OUTSIDE}"
        notices.append(self._cut_off(why))
        if self._may_be_replaced():
            _log.warning("node %s: %s: another one takes its place, and this node asks for ranks again", self.node, why)
            self._replace_process(why)
            return

        self._error = RendezvousConnectionError(f"node {self.node}: {why}")
        self._kept.forget_endpoint()

        # Other nodes' coordinator may continue without this one, unless the store went with the
        # process.
        is_job_over = self._hosts or self._job.max_nodes == 1
        if is_job_over:
            notices.append(StoreGone(why))  # no node coordinates the job any more

    def _may_be_replaced(self) -> bool:
        # The job's store went with it, unless another process can open it again: see `Kept.keep`.
        if self._hosts:
            return False
        # A handler's caller decides what a loss means, and after the job's end there is nothing to
        # ask for.
        if self._is_shared or self.final is not None:
            return False
        return self._job.sidecars != _MOST_LOST

    def _replace_process(self, why: str) -> None:
        """
        Start another process for this node, under its name, as a node that asks for ranks again.
        """
        self._sender.close()
        self._link.close()
        self._waiting = 0
        self._notices.drop_listener()

        # The number keeps its messages above those of its predecessor: the coordinator ignores lower ones.
        self._job = evolve(self._job, sidecars=self._job.sidecars + 1, after=why)
        try:
            self._start()
        except ElasticError as error:
            self._error = error

    def _hear(self, message: Message, descriptors: list[int]) -> list[Word]:
        """Return the notices of one message for the agent; note its other contents here."""
        match message["op"]:
            case "notice":
                return self._hear_notice(message, descriptors)
            # With its socket kept, another process can open the store again: the job does not end with this one.
            case "hosts":
                self._hosts = not self._kept.keep(descriptors)
            case "waiting":
                self._waiting = message["count"]
            # The host of this program's sidecars forked it: its first message is the first sign of
            # it.
            case "born":
                self._child = Process.sent(message["pid"], descriptors)
            case "lost":
                return [ContactLost(message["why"], message["grace"])]
            case "gone":
                return [StoreGone(message["why"])]
            case "error":
                self._error = _rebuilt(message["kind"], message.get("setting", ""), message["text"])
            case "log":
                _log.log(message["level"], "%s", message["text"])

        return []

    def _hear_notice(self, message: Message, descriptors: list[int]) -> list[Word]:
        notice = self._notices.receive(message, descriptors)
        if notice is None:
            return []
        if isinstance(notice, Final):
            self.final = notice
        return [notice]

    def close(self) -> None:
        """
        Leave the job, and return when the process has ended.

        If the job's store lives on this node, the others must first have read how the job ended.
        That takes at most the job's `close_timeout`. Other jobs in that store must have ended, too,
        after at most the job's `store_linger`. A Ctrl-C, or a request to end, ends that last wait,
        and nothing else.
        """
        if self._closed or os.getpid() != self._owner:
            return

        self._notices.drop_listener()

        # A process that does not hear us, or has sent its error, sends no goodbye.
        says_goodbye = self._sender.is_alive() and not self._contact.is_silent and self._error is None

        # Only a process that reports to its job waits for others to read the end.
        limit = _ENDING + (self._job.close_timeout if says_goodbye else 0.0)

        # From here on no other thread may say anything: the goodbye is the last message.
        self._closed = True
        self._kept.forget_endpoint()
        self._sender.close(encoded_message({"op": "close"}))

        # The function returns the process anew each time: that of a forked sidecar may not be known
        # yet.
        end = _End(self._link, lambda: self._child, self._hear, self.requests, limit, _ENDING)
        try:
            if not self._gone:
                end.wait()
                self._notices.drop_listener()
                self._child.wait(0.0)
        except BaseException as error:  # the operator does not want to wait
            self._child.wait(0.0)
            ends_last_wait = end.stays and isinstance(error, KeyboardInterrupt)
            if not ends_last_wait:
                raise
        finally:
            self._gone = True
            self._sender.join()
            self._link.close()
            for lease in self._leases:
                lease.close()
            self._kept.close()


@define(eq=False)
class _Notices:
    """
    The coordinator's notices through the process, for the latest request for ranks; earlier ones
    are void.
    """

    generation: int = 0
    """Number of requests for ranks so far."""
    _listener: socket.socket | None = None
    """The listener of a round in which this node has group rank 0."""

    def receive(self, message: Message, descriptors: list[int]) -> RankAssignment | RoundEnd | Final | None:
        """Return the notice of a message; None if it answers an earlier request."""
        notice = from_plain(message["notice"])
        assert isinstance(notice, (RankAssignment, RoundEnd, Final))
        if descriptors:
            self.drop_listener()
            self._listener = closed_in_forks(socket.socket(fileno=descriptors[0]))

        # The answer to an earlier request has ranks that are void, but the job's end always counts.
        is_current = message["generation"] == self.generation
        if is_current or isinstance(notice, Final):
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


@define(eq=False)
class _End:
    """
    The wait for the end of a sidecar that was asked to end.

    It sends messages until it closes its channel, and then it exits. While it stays for other jobs
    in its store, a request to end ends the wait.
    """

    link: Link
    child: Callable[[], Process]
    """Return the process as far as it is known; a forked one may not have sent its number yet."""
    hear: Callable[[Message, list[int]], object]
    """Called with each message."""
    requests: Requests | None
    limit: float
    """Seconds that it may take."""
    grace: float
    """Seconds that it may take beyond the time that it announced."""
    stays: bool = field(init=False, default=False)
    """True if it stays for other jobs, though this one has ended."""
    _deadline: float = field(init=False, default=0.0)

    def wait(self) -> None:
        """
        Return when the process has ended, or the time for that is over; in the second case the
        caller must kill it.
        """
        # It may have been stopped, alone: then it could not end.
        self.child().send(signal.SIGCONT)
        self._deadline = monotonic() + self.limit
        is_speaking = True

        # It may close its channel a moment before it exits, and exit while its last lines lie in the channel.
        while is_speaking or not self.child().ends(0.0):
            left = max(0.0, self._deadline - monotonic())
            ready = wait_readable(self._sources(is_speaking), left)
            if not ready:
                return
            if self._takes_request(ready):
                return
            has_spoken = is_speaking and self.link.fileno() in ready
            if has_spoken:
                is_speaking = self._receive()
            elif self.child().fileno() in ready:
                return

    def _sources(self, is_speaking: bool) -> list[int | Waitable]:
        sources: list[int | Waitable] = []
        if is_speaking:
            sources.append(self.link)
        if self.child().fileno() >= 0:
            sources.append(self.child())
        if self.stays and self.requests is not None:
            sources.append(self.requests.hurry())
        return sources

    def _takes_request(self, ready: set[int]) -> bool:
        """Return whether a request to end has come while the process stays for other jobs."""
        if self.requests is None or not self.stays:
            return False
        if self.requests.hurry() not in ready:
            return False
        # Taken, so that the program does not end a second time for it.
        self.requests.drain()
        return True

    def _receive(self) -> bool:
        """Handle one message; return False if no other will follow."""
        received = self.link.receive()
        if received is None:
            return False

        message, descriptors = received
        stays = message.get(STAYS)

        # Before the line is shown: people who read it may press Ctrl-C at once.
        if stays:
            self.stays = True
            self._deadline = monotonic() + stays + self.grace

        self.hear(message, descriptors)
        return True


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


def _rebuilt(kind: str, setting: str, text: str) -> ElasticError:
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
