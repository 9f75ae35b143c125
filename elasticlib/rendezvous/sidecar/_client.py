"""
The launcher's client of its sidecar: what `_bridge` does over there, as a `Membership` here.

The store's library blocks when the store is silent, and a launcher may freeze or die; so a process of its own
keeps the contact, ends workers that nobody else can end in time, and says goodbye for a launcher that died.

Rules of this file: no call of the agent's blocks: what does not go at once is sent by a thread, which also says
from time to time that this launcher lives. Without an answer from the process this node counts as cut off, as
with a silent store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys

from attrs import evolve

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
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._membership import STAYS, Requests, Word
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
from elasticlib.rendezvous.sidecar._kept import Kept
from elasticlib.rendezvous.sidecar._sender import Sender, channel
from elasticlib.spec import TOKEN_VARIABLE

_log = logging.getLogger("elasticlib")

ALIVE = 0.075
"""Share of the heartbeat time between two signs of life to the sidecar; at most a second."""
_ENDING = 6.0
"""Seconds beyond the job's own time for parting, after which the process is killed."""
_MOST_LOST = 3
"""Processes that one node may lose."""
_BIRTH = 600.0
"""Seconds for the first word of the process, where the job names no join time."""
_TELL_EVERY = 5.0
"""Seconds after which a process that has not begun is spoken of for the first time; then twice as long, and so on."""

_IMPORTING = "`import torch` takes so long here (a cold disk?), or the machine is busy; no other node was asked yet"

_PROGRAM = BEGIN_CODE + "from elasticlib.rendezvous.sidecar._bridge import main; main()"


class SidecarClient:
    """
    This node's place in *job*, kept by a process of its own that starts now; fulfils `Membership`.

    This program counts as standing still, and its node's heartbeats rest, when no thread of it runs for 0.15 of the
    heartbeat time, or *stall* times the heartbeat time where that is given: for a program that supervises
    no workers, whatever keeps its other threads from running does not make it dead.

    Raises `StartError` when the process cannot be started; what it finds wrong later comes from `drain`.
    """

    requests: Requests | None = None
    """Where requests to end come in; one that comes while `close` stays for other jobs ends that wait."""
    _is_shared = False
    """Whether the owner is a handler, whose caller decides what a loss means."""

    def __init__(
        self, job: Job, *, stall: float | None = None, program: str = _PROGRAM, clock: Clock = monotonic
    ) -> None:
        self.node = job.node
        self._job = job
        self._stall, self._program = stall, program
        self.final: Final | None = None
        """How this node's part in the job ended, once `drain` has told it."""
        self._clock = clock
        self._owner = os.getpid()
        self._birth_limit = job.join_timeout or _BIRTH
        self._answer_limit = (DEAF + (stall or 0.0)) * job.heartbeat
        """Seconds within which the process answers, though this program stood still meanwhile."""
        self._waiting = 0
        self._generation = 0
        """How often ranks were asked for: an answer to an earlier request is none any more."""
        self._listener: socket.socket | None = None
        self._error: ElasticError | None = None
        self._mute = False
        """Whether the process was found to be silent, and the agent was told."""
        self._mute_since = 0.0
        self._gone = False
        self._closed = False
        self._stays = False
        """Whether the process stays for other jobs, though this one has ended."""
        self._hosts = False
        """Whether the job's store lives in the process, and the job ends with it."""
        self._kept = Kept() if self._is_shared else Kept.of(job)
        self._leases: list[Lease] = []
        """Of each process that there was: the last one's is in use, earlier ones may still end workers."""
        self._start()

    def _start(self) -> None:
        ours, theirs = channel()
        self._tell_after = _TELL_EVERY
        self._begun = self._gone = False
        with contextlib.ExitStack() as undo:
            link = Link(ours)
            undo.callback(link.close)
            with contextlib.closing(theirs):
                child = self._begin(self._program, theirs)
            undo.callback(child.wait, 0.0)
            self._heard = self._born = self._clock()
            lease = Lease()
            undo.callback(lease.close)
            first = encoded_message({"op": "job", "job": self._job.plain(), "stillness": self._stall})
            interval = min(1.0, ALIVE * self._job.heartbeat) if self._job.heartbeat else None
            given = (lease.fileno(), *self._kept.descriptors())
            self._sender = Sender(link, interval, (first, tuple(map(os.dup, given))))
            undo.pop_all()
        self._link, self._child = link, child
        self._leases.append(lease)

    def _begin(self, program: str, theirs: Channel) -> Process:
        return spawn([sys.executable, "-c", program, search_path_argument()], environment(), theirs.fileno())

    # Reports.

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round, for *slots* workers. No worker of this node may run any more."""
        self._generation += 1
        self._say({"op": "join", "slots": slots, "role": role, "generation": self._generation})

    def post(self, report: WorkerReport | Close) -> None:
        """Say how the workers are, that this node goes, or that the job ends for everybody; see `NodeClient.post`."""
        body = to_plain(fitting(report))
        from_plain(body)  # what this node may not say is its own error, here and now
        self._say({"op": "report", "report": body})

    def guard(self, handle: int) -> Lease | None:
        """Give a handle, still the caller's, of the process whose death ends all workers: killed if contact is lost."""
        with room_for_descriptors(1):
            self._say({"op": "guard"}, os.dup(handle))
        return self._leases[-1] if self._job.heartbeat else None

    def _say(self, message: Message, *descriptors: int) -> None:
        if self._closed:
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous: {message['op']!r} comes too late")
        self._sender.say(encoded_message(message), descriptors)

    # What comes.

    def listener(self) -> socket.socket | None:
        """The bound socket for the worker store of a round in which this node has group rank 0."""
        found, self._listener = self._listener, None
        return found

    def waiting(self) -> int:
        """How many nodes wait for ranks while a round runs, as of the last heartbeat."""
        return self._waiting

    def fileno(self) -> int:
        """A descriptor that is readable when `drain` has something; -1 once closed."""
        return self._link.fileno()

    def poll_timeout(self) -> float | None:
        """Seconds until `drain` wants to be called though nothing is readable."""
        if self._error is not None:
            return 0.0
        deadline = self._deadline()
        if deadline is not None and not self._begun and not self._mute:
            deadline = min(deadline, self._born + self._tell_after)
        return None if deadline is None else max(0.0, deadline - self._clock())

    def drain(self) -> list[Word]:
        """
        What came, oldest first; never blocks.

        Raises what ended this node's part over there; `RendezvousConnectionError` when the process ended.
        """
        if self._closed:
            return []
        words: list[Word] = []
        while not self._gone and wait_readable([self._link], 0):
            try:
                received = self._link.receive()
            except OSError as error:  # of a worker store's socket, for which no descriptor is free
                self._error = RendezvousError(f"node {self.node}: no ranks can be received: {error}")
                break
            if received is None:
                self._lose_process(words)
            else:
                self._heard, self._mute = self._clock(), False
                self._begun = self._begun or received[0]["op"] != "born"
                words += self._hear(*received)
        if (deadline := self._deadline()) is not None and self._clock() >= deadline:
            words += self._note_silence()
        self._tell_of_birth()
        if self._error is not None and not words:
            raise self._error
        return words

    def _deadline(self) -> float | None:
        """When the process should have said something."""
        if self._gone or self._error is not None:
            return None
        if self._mute:
            return self._mute_since + self._job.reconnect_timeout
        if not self._begun:
            return self._heard + self._birth_limit
        return self._heard + self._answer_limit if self._job.heartbeat else None

    def _note_silence(self) -> list[Word]:
        if self._mute:
            why = f"its sidecar has not answered for {self._job.reconnect_timeout:g} s more"
            self._error = RendezvousConnectionError(f"node {self.node}: contact with the job was lost, and {why}")
            return []
        self._mute, self._mute_since = True, self._clock()
        self._child.send(signal.SIGCONT)  # it may have been stopped, alone
        if self._begun:
            return [self._cut_off("the sidecar of this node does not answer")]
        why = f"its sidecar did not start within {self._birth_limit:g} s: {_IMPORTING}"
        self._error = RendezvousTimeoutError(f"node {self.node}: {why}")
        return []

    def _tell_of_birth(self) -> None:
        waited = self._clock() - self._born
        if self._begun or self._gone or self._error is not None or waited < self._tell_after:
            return
        self._tell_after = 2 * waited
        self._child.send(signal.SIGCONT)  # it may have been stopped, alone
        what = f"node {self.node} has waited {waited:.0f} s for job {self._job.run_id!r}"
        _log.warning("%s: %s; %.0f s left", what, _IMPORTING, self._birth_limit - waited)

    def _cut_off(self, why: str) -> ContactLost:
        return ContactLost(f"contact with the job is lost: {why}", GRACE * self._job.heartbeat)

    def _lose_process(self, words: list[Word]) -> None:
        self._gone = True
        self._child.wait(1.0)
        if self._error is not None:
            return
        why = f"the sidecar{self._named()} of this node ended unexpectedly{FROM_OUTSIDE}"
        words.append(self._cut_off(why))
        if self._hosts or self._is_shared or self.final is not None or self._job.sidecars == _MOST_LOST:
            self._error = RendezvousConnectionError(f"node {self.node}: {why}")
            self._kept.forget_endpoint()
            if self._hosts or self._job.max_nodes == 1:
                words.append(StoreGone(why))  # nobody coordinates the job any more
        else:
            _log.warning("node %s: %s: another one takes its place, and this node asks for ranks again", self.node, why)
            self._replace_process(why)

    def _named(self) -> str:
        return f" (pid {self._child.pid})" if self._child.pid > 0 else ""

    def _replace_process(self, why: str) -> None:
        """Have another process take part for this node, under its name: that of a node which asks for ranks again."""
        self._sender.close()
        self._link.close()
        self._mute, self._waiting = False, 0
        self._drop_listener()
        self._job = evolve(self._job, sidecars=self._job.sidecars + 1, after=why)
        try:
            self._start()
        except ElasticError as error:
            self._error = error

    def _hear(self, message: Message, descriptors: list[int]) -> list[Word]:
        match message["op"]:
            case "notice":
                notice = from_plain(message["notice"])
                assert isinstance(notice, (RankAssignment, RoundEnd, Final))
                if descriptors:
                    self._drop_listener()
                    self._listener = closed_in_forks(socket.socket(fileno=descriptors[0]))
                if message["generation"] != self._generation and not isinstance(notice, Final):
                    self._drop_listener()
                    return []
                if isinstance(notice, Final):
                    self.final = notice
                return [notice]
            case "hosts":
                self._hosts = not self._kept.keep(descriptors)
            case "waiting":
                self._waiting = message["count"]
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

    def _drop_listener(self) -> None:
        if (listener := self.listener()) is not None:
            listener.close()

    def close(self) -> None:
        """
        Part from the job, and return when the process has ended.

        Where the job's store lives on this node, that is when the others have read how the job ended, or after
        the job's `close_timeout`; and when other jobs in that store have ended, too, or after the job's
        `store_linger`. A Ctrl-C, or a request to end, ends that last wait, and nothing else.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._drop_listener()
        # A process that does not hear us, or has given its error, has nothing to part from.
        parts = self._sender.is_alive() and not self._mute and self._error is None
        self._closed = True
        self._kept.forget_endpoint()
        self._sender.close(encoded_message({"op": "close"}))
        try:
            if not self._gone:
                self._see_it_end(self._job.close_timeout + _ENDING if parts else _ENDING)
        except BaseException as error:  # the operator does not want to wait
            self._child.wait(0.0)
            if not (self._stays and isinstance(error, KeyboardInterrupt)):
                raise
        finally:
            self._gone = True
            self._sender.join()
            self._link.close()
            for lease in self._leases:
                lease.close()
            self._kept.close()

    def _see_it_end(self, limit: float) -> None:
        """Reap the process, killed if it has not ended after *limit* s, or when the time is over that it stays."""
        self._child.send(signal.SIGCONT)
        deadline, hears = monotonic() + limit, True
        while hears or not self._child.ends(0.0):
            sources: list[int | Waitable] = [self._link] if hears else []
            sources += [self._child] if self._child.fileno() >= 0 else []
            requests = self.requests if self._stays else None
            sources += [requests.hurry()] if requests is not None else []
            ready = wait_readable(sources, max(0.0, deadline - monotonic()))
            if not ready:
                break
            if requests is not None and requests.hurry() in ready:
                requests.drain()  # heeded: the program has nothing to do for them afterwards
                break
            if hears and self._link.fileno() in ready:
                received = self._link.receive()
                hears = received is not None
                if received is not None:
                    if stays := received[0].get(STAYS):  # before people read of it, and press Ctrl-C
                        self._stays, deadline = True, monotonic() + stays + _ENDING
                    self._hear(*received)
            elif self._child.fileno() in ready:
                break
        self._drop_listener()
        self._child.wait(0.0)


def environment() -> dict[str, str]:
    """What the process is started with."""
    # A store's server looks up the name of every peer, for its log only: that must cost no time.
    # The job's token goes through the channel, and to no program that is started from there.
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return {**inherited, "RES_OPTIONS": QUIET_LOOKUPS, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _rebuilt(kind: str, setting: str, text: str) -> ElasticError:
    found = getattr(errors, kind, None)
    if setting and isinstance(found, type) and issubclass(found, errors.ConfigError):
        return found.of_setting(setting, text)
    if isinstance(found, type) and issubclass(found, (RendezvousError, errors.ConfigError, errors.StartError)):
        with contextlib.suppress(TypeError):
            return found(text)
    return RendezvousError(text)
