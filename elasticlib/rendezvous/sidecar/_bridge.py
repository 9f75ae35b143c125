"""
The sidecar: one node's share in a job, in a process beside its launcher (which holds a
`_client.SidecarClient`).

* It keeps the contact while the launcher may be busy.
* It lets the node count as lost when the launcher stands still.
* It kills the spawner, and with it all workers, when they outlive the contact.
* When the launcher dies, it reports that to the other nodes.

It ends with the launcher, seconds later at most.

Rules of this file: one thread talks to the launcher, and waits for everything at once. All messages
of the launcher are read before its silence is judged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import threading
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from attrs import define, field

from elasticlib import processes
from elasticlib._clock import Clock, monotonic
from elasticlib._times import soonest
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.processes import CHANNEL_FD, Channel, Lease, Message, Process, Waitable, wait_readable, wake_with_parent
from elasticlib.rendezvous._membership import PATIENCE, STAYS, MembershipEvent
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._messages import (
    Close,
    ContactLost,
    Notice,
    RankAssignment,
    Stopped,
    StoreGone,
    Succeeded,
    WorkerReport,
    from_plain,
    to_plain,
)
from elasticlib.rendezvous.sidecar._kept import Kept
from elasticlib.rendezvous.sidecar._launcher_watch import SILENCE, SidecarWatch
from elasticlib.rendezvous.sidecar._torch import import_stores

if TYPE_CHECKING:
    from elasticlib.rendezvous.node._runtime import NodeRuntime

_DEATH_LIMIT = 5
"""Seconds from the launcher's death until this process is gone, in any case."""
_OWN_END = 1.0
"""Seconds that a dead launcher's workers get to end on their own: their reaper stops them."""
_GOODBYE = 1.0


class LogLines(logging.Handler):
    """Log lines of this process, from any thread, until they are sent to the launcher."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Message] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of *record*."""
        line: Message = {"op": "log", "level": record.levelno, "text": self.format(record)}
        line.update({name: getattr(record, name) for name in (STAYS, PATIENCE) if hasattr(record, name)})
        self._lines.append(line)
        os.eventfd_write(self._ready, 1)

    def fileno(self) -> int:
        """Return a descriptor that is readable while lines wait."""
        return self._ready

    def drain(self) -> list[Message]:
        """Return the waiting lines, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        return [self._lines.popleft() for _ in range(len(self._lines))]


@define(eq=False)
class Bridge:
    """
    Carries messages between the launcher's *channel* and the node's *share* until one of them ends.
    """

    channel: Channel
    share: NodeRuntime
    heartbeat: float
    lines: LogLines
    launcher: int
    """Readable at its end; a child of the launcher's may hold a copy of the channel after its death."""
    lease: Lease
    """Time limit for the workers that other processes can read, in case this process is stopped."""
    clock: Clock = monotonic
    guarded: Process | None = None
    """The process whose death ends all workers of this node."""
    watch: SidecarWatch = field(init=False)
    stall: float = SILENCE
    stays_until_end: bool = False
    """True if the launcher, once it has said goodbye, may wait for the end of the whole job."""
    _broken: bool = False
    _reported_hosting: bool = False
    _waiting: int = 0
    """Nodes that wait for ranks, as last sent to the launcher."""

    def run(self) -> bool:
        """Work until the launcher says goodbye (True) or has died (False)."""
        self.begin()
        while (has_ended := self.step(self.poll_timeout())) is None:
            pass
        return has_ended

    def begin(self) -> None:
        """Send the launcher a sign of life."""
        self.watch = SidecarWatch(self.heartbeat, self.clock(), self.clock(), self.stall)
        self.channel.send({"op": "alive"})

    def step(self, timeout: float | None) -> bool | None:
        """
        Wait *timeout* seconds for the next event, and act.

        Return True if the launcher said goodbye, False if it died, None if it lives.
        """
        watched: list[int | Waitable] = [self.channel, self.lines, self.launcher]
        if not self._broken:
            watched.append(self.share.member)
        ready = wait_readable(watched, timeout)

        # All messages of the launcher come before the judgement by its silence. Where both stood
        # still (a laptop that slept, a stopped container), its signs of life are in the channel and
        # only this process is late.
        while wait_readable([self.channel], 0):
            received = self.channel.receive()
            if received is None:
                return False
            if received[0]["op"] == "close":
                self.stays_until_end = received[0]["stays"]
                return True
            self._handle(*received)

        # After its messages: a goodbye may be the last one.
        if self.launcher in ready:
            return False

        self._renew_lease()
        self._judge()
        self._pass_on()

        # Once more: the messages may report that contact is lost, and that workers have no time
        # left.
        self._judge()
        if self.watch.due:
            self.kill()
        return None

    def poll_timeout(self) -> float | None:
        """Return the seconds until `step` must be called even if nothing comes."""
        wake, now = self.watch.wake_at(self._kill_at()), self.clock()
        due = soonest(None if wake is None else wake - now, None if self._broken else self.share.member.poll_timeout())
        return None if due is None else max(0.0, due)

    def say_lines(self) -> None:
        """Send the waiting log lines to the launcher, which shows them."""
        for line in self.lines.drain():
            # A launcher that stands still reads nothing: lines must not fill the channel meanwhile.
            if not self.watch.paused:
                self.channel.send(line)

    def outlast(self, limit: float) -> bool:
        """Return whether no worker is left, after *limit* seconds at most."""
        return not self.watch.running or (self.guarded is not None and self.guarded.ends(limit))

    def kill(self) -> None:
        """Kill all workers now."""
        if self.guarded is not None:
            self.guarded.send(signal.SIGKILL)

    # From the launcher.

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        member, now = self.share.member, self.clock()
        self.watch = self.watch.after_message(now)
        match message["op"]:
            case "join":
                # Its number goes back with every notice: the launcher ignores those of an earlier request.
                self.watch = self.watch.joins(message["generation"])
                member.join(message["slots"], message["role"])
            case "guard":
                # A launch may get another spawner, after which the old handle is useless.
                if self.guarded is not None:
                    self.guarded.close()
                self.guarded = Process.sent(-1, descriptors)
            case "report":
                report = from_plain(message["report"])
                assert isinstance(report, WorkerReport | Close)
                # Workers that report their end need no time limit any more.
                if isinstance(report, Stopped | Succeeded):
                    self.watch = self.watch.gone()
                member.post(report)
            case "alive":
                self.watch, answers = self.watch.answer(now)
                if answers:
                    self.channel.send({"op": "alive"})

    # To the launcher.

    def _pass_on(self) -> None:
        self.say_lines()
        if self._broken:
            return

        try:
            notices = self.share.member.drain()
        except Exception as error:
            # Once: this node's part is over. From now on the process only waits for the launcher's
            # goodbye.
            self._broken = True
            self.channel.send(error_message(error))
            return

        for notice in notices:
            self._send_notice(notice)
        self._report_hosting()
        self._report_waiting()

    def _send_notice(self, notice: MembershipEvent) -> None:
        match notice:
            case ContactLost(why, grace):
                self.channel.send({"op": "lost", "why": why, "grace": grace})
            case StoreGone(why):
                self.channel.send({"op": "gone", "why": why})
            case RankAssignment():
                self._send_ranks(notice)
            case _:
                self.channel.send(self._notice_message(notice))

    def _send_ranks(self, ranks: RankAssignment) -> None:
        # Workers may run from now on: the lease must allow it before the launcher can start one.
        self.watch = self.watch.assigned()
        self._renew_lease()
        message = self._notice_message(ranks)
        listener = self.share.member.listener() if ranks.group_rank == 0 else None
        if listener is None:
            self.channel.send(message)
            return
        with listener:
            self.channel.send(message, (listener.fileno(),))

    def _notice_message(self, notice: Notice) -> Message:
        return {"op": "notice", "notice": to_plain(notice), "generation": self.watch.generation}

    def _report_hosting(self) -> None:
        """
        Report once that the job's store is here; send its listening socket if another process can
        use it.
        """
        if self._reported_hosting or not self.share.hosts_store:
            return
        self._reported_hosting = True
        endpoint = self.share.endpoint
        self.channel.send({"op": "hosts"}, () if endpoint is None else (endpoint.fileno(),))

    def _report_waiting(self) -> None:
        if self.watch.paused:
            return
        waiting = self.share.member.waiting()
        if waiting != self._waiting:
            self._waiting = waiting
            self.channel.send({"op": "waiting", "count": waiting})

    # Actions that no other process can do in time.

    def _judge(self) -> None:
        paused = self.watch.paused
        self.watch = self.watch.judge(self.clock(), self._kill_at())
        if self.watch.paused is not paused:
            self.share.member.hold(self.watch.paused)

    def _renew_lease(self) -> None:
        end = self.watch.lease_end(self._kill_at())
        if end is not None:
            self.lease.renew(end)

    def _kill_at(self) -> float | None:
        left = self.share.member.kill_in()
        return None if left is None else self.clock() + left


def error_message(error: Exception) -> Message:
    """Return the frame for an error that ends this node's part."""
    # The setting is sent separately: the launcher makes the same error again, and may use its
    # user's name for it.
    if isinstance(error, ConfigError) and error.setting:
        return {"op": "error", "kind": type(error).__name__, "setting": error.setting, "text": error.complaint}
    if isinstance(error, ElasticError):
        return {"op": "error", "kind": type(error).__name__, "text": str(error)}
    return {"op": "error", "kind": "", "text": f"the sidecar failed: {type(error).__name__}: {error}"}


def follow(parent: int) -> processes.Handle:
    """
    Make this process, one of elasticlib's own, end with its *parent*; return a handle of the
    parent.
    """
    # A scheduler's signals to all processes of the job are for the launcher, which then leaves the
    # job in order.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    # These two are inherited: the time limit of the end must kill, even if the launcher had ignored
    # or blocked it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(CHANNEL_FD, False)
    wake_with_parent()
    handle = processes.handle_of_parent(parent)

    # It may have died before the handle was made: then the handle is of a process that got its
    # number.
    if os.getppid() != parent:
        os._exit(1)
    return handle


def import_for(backend: str) -> None:
    """Import the modules that a sidecar needs for a job of the *backend*."""
    import elasticlib.rendezvous.node._runtime

    if backend.startswith("etcd"):
        import elasticlib.rendezvous.stores.etcd._backend  # noqa: F401
    else:
        import_stores()
        import torch.distributed  # noqa: F401


def main() -> NoReturn:
    """Run the sidecar of the parent, whose channel is descriptor `CHANNEL_FD`."""
    launcher = follow(os.getppid())
    serve(Channel.adopt(CHANNEL_FD), launcher)


def serve(channel: Channel, launcher: processes.Handle) -> NoReturn:
    """Run the sidecar of the *launcher*, which communicates through the *channel*."""
    try:
        first = channel.receive()
        if first is None or wait_readable([launcher], 0):
            os._exit(1)
        job = NodeJob(**first[0]["job"])
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

        # A store has a connection of each node's, which may be more than a user's soft limit allows.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        import_for(job.backend)
        from elasticlib.rendezvous.node._runtime import NodeRuntime

        lines = LogLines()
        logger = logging.getLogger("elasticlib")
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
        lease, *others = first[1]
        kept = Kept.received(dict(zip(first[0]["kept"], others, strict=True)))
        share = NodeRuntime(job, document=kept.document, endpoint=kept.endpoint)

        # Before the first message: loading a library keeps all threads here from running. The
        # launcher allows a process that has not begun more time than one that falls silent.
        share.prepare()
        share.start()
        bridge = Bridge(channel, share, job.heartbeat, lines, launcher.fileno(), Lease(lease))
        if (stall := first[0]["stillness"]) is not None:
            bridge.stall = stall
        if bridge.run():
            _leave(bridge, job.close_timeout)
        else:
            _report_death(bridge)
    except Exception as error:
        channel.send(error_message(error))
        os._exit(1)

    # Without the interpreter's end: a thread that hangs in the store's library would hold it up, or abort it.
    os._exit(0)


def _leave(bridge: Bridge, linger: float) -> None:
    """Wait for others to read the end, and to end, but not for longer than the launcher lives."""
    closed = os.eventfd(0, os.EFD_CLOEXEC)

    def close() -> None:
        try:
            bridge.share.close(linger)
            bridge.share.stay(linger, until_end=bridge.stays_until_end)
        finally:
            os.eventfd_write(closed, 1)

    # In a thread: this one continues with the log lines, which may name the jobs for which it
    # waits.
    threading.Thread(target=close, daemon=True).start()
    ready: set[int] = set()
    while not ready & {closed, bridge.launcher}:
        ready = wait_readable([closed, bridge.launcher, bridge.lines], None)
        bridge.say_lines()

    if closed not in ready:
        signal.alarm(_DEATH_LIMIT)
        wait_readable([closed], _GOODBYE)


def _report_death(bridge: Bridge) -> None:
    """Wait for the end of the dead launcher's workers, and report its death in its place."""
    # Its goodbye may hang in the store: the kernel ends this process all the same.
    signal.alarm(_DEATH_LIMIT)
    # Their reaper kills them at the launcher's end; where it does not (it may be stopped, too), this process does.
    gone = bridge.outlast(_OWN_END)
    if not gone:
        bridge.kill()
        gone = bridge.outlast(_OWN_END)
    bridge.share.witness("its agent died", gone)
    bridge.share.close(_GOODBYE)
