"""
The spawner: one process per launch that forks the workers, sees their ends and stops them.

It is forked from the fork server (or, with start method ``fork``, from the caller) and gets
orders over a channel from the launcher. It is the workers' parent and adopts their orphans. So it
alone signals and reaps, and cannot mistake one pid for another. It kills every descendant and
ends when the launcher is gone, or when no process above it would end it with the launcher. It also
forks the process that hosts the workers' store of a round, at the first connection.

Rules of this file: it never waits for one thing only. Every stop has the same steps: the signal
to the workers, then to their groups, one deadline, SIGKILL. Then it reports the survivors
(uninterruptible sleep) and continues.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import selectors
import signal
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib._clock import monotonic
from elasticlib.errors import name_of_signal
from elasticlib.processes import (
    CUT_OFF,
    FEW_PROCESSES,
    STOP_SIGNALS,
    Channel,
    Handle,
    Lease,
    Message,
    above_standard_streams,
    adopt_orphans,
    close_all_but,
    close_each,
    die_with_parent,
    guard_child,
    kill_descendants,
    living_parent,
    new_parent,
    outlive_parent,
    settle_signals,
    signal_process,
    start_error,
    write_exactly,
)
from elasticlib.workers.child import _exiting, _report, _threads
from elasticlib.workers.child._start_spec import Handed, StartSpec
from elasticlib.workers.spawner._detached import Detached
from elasticlib.workers.spawner._fork_worker import fork_worker
from elasticlib.workers.spawner._stack_dump import StackDump, shared_text
from elasticlib.workers.spawner._worker_process import Left, LiveWorkers, WorkerProcess

_FIXES = {
    errno.EMFILE: "; each worker needs three descriptors: raise the hard limit of open files (ulimit -Hn)",
    errno.EAGAIN: FEW_PROCESSES,
    errno.ENOMEM: "; start fewer workers",
}
_LONGEST_WAIT = 86400.0
_SHORTEST_WAIT = 0.01


# The store of a round. Workers cannot distinguish a dead store from a dead peer, so its end is
# reported under its name at once.

OnStoreEnd = Callable[[str, int, int], None]
"""
Gets the reason why the store is gone, the id of its process (0: none was started), and its exit
status.
"""
_STORE_HOST = "the process that hosts the workers' store"


class StoreHost:
    """
    Host of torch's store on a socket that workers know; it calls *on_end* when the process is
    gone.
    """

    def __init__(
        self, selector: selectors.BaseSelector, keep: Collection[int], began: Callable[[int], None], on_end: OnStoreEnd
    ) -> None:
        self._selector = selector
        self._keep = keep
        self._began = began
        """Gets the id of the process."""
        self._on_end = on_end
        self._listener: int | None = None
        self._pid = 0
        self._handle: processes.Handle | None = None
        self._words = -1
        """Memory for the process's message about its end."""

    def await_knock(self, listener: int) -> None:
        """
        Fork the process at the first connection to *listener*, which this object owns from now
        on.
        """
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self.open)

    def open(self) -> None:
        """Fork the process: a worker connects."""
        listener = self._listener
        if listener is None:
            # The round has ended in the meantime.
            return

        self._selector.unregister(listener)
        self._listener = None
        me, pid, words = os.getpid(), 0, -1
        try:
            words = processes.anonymous_file("store")
            pid = os.fork()
            if pid == 0:
                _host_store(listener, me, words, self._keep)
            self._handle = processes.handle_of(pid)
        except OSError as error:
            if pid:
                # A child that was not reaped: no other process has its number.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if words >= 0:
                os.close(words)
            fix = FEW_PROCESSES if error.errno == errno.EAGAIN else ""
            self._on_end(f"{_STORE_HOST} cannot be started: {error}{fix}", 0, 1)
        else:
            self._pid, self._words = pid, words
            self._selector.register(self._handle, selectors.EVENT_READ, self._ended)
            self._began(pid)
        finally:
            os.close(listener)

    def _ended(self) -> None:
        words = self._words
        if self._handle is None:
            # The round has ended in the meantime.
            return
        text = _report.read_text(words)
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        pid, code = self._pid, self._let_go()
        how = f"was ended by {name_of_signal(-code)}" if code < 0 else f"ended with status {code}"
        self._on_end(f"{_STORE_HOST} (pid {pid}) {how}{': ' if text else ''}{text}", pid, code)

    def pids(self) -> list[int]:
        """Return the process that hosts the store, if it exists."""
        return [] if self._handle is None else [self._pid]

    def signal(self, signum: int) -> None:
        """Signal the process, if it exists."""
        if self._handle is not None:
            signal_process(self._handle, signum)

    def end(self) -> None:
        """End the process: the store is not needed any more."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            os.close(self._listener)
            self._listener = None
        if self._handle is not None:
            signal_process(self._handle, signal.SIGKILL)
            self._let_go()

    def _let_go(self) -> int:
        """Reap the process, which ends now, and return its exit status."""
        assert self._handle is not None
        _, status = os.waitpid(self._pid, 0)
        self._selector.unregister(self._handle)
        self._handle.close()
        os.close(self._words)
        self._handle = None
        return os.waitstatus_to_exitcode(status)


def _host_store(listener: int, parent: int, words: int, keep: Collection[int]) -> NoReturn:
    """Host torch's TCPStore on *listener* until the spawner ends this process."""
    try:
        die_with_parent(parent)
        os.setsid()
        close_all_but({0, 1, 2, listener, words, *keep})
        import socket

        # Of a copy: the end of this socket must not close the listener.
        with socket.socket(fileno=os.dup(listener)) as bound:
            host, port = bound.getsockname()[:2]
        # Torch's libraries cannot be loaded in a folder that was removed since the first launch.
        os.chdir("/")
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        # torch's server thread answers until the object is deleted.
        signal.pause()
        del store
    except BaseException as error:
        write_exactly(words, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(1)


# The spawner itself.


class ParentWatch:
    """
    The process with which this one ends: its parent, and then the *guardian*.

    The parent may be a fork server, which a launch that has begun does not need any more.
    """

    def __init__(self, selector: selectors.BaseSelector, guardian: int, leave: Callable[[], NoReturn]) -> None:
        self._selector = selector
        self._guardian = guardian
        self._leave = leave

    def begin(self, parent: int) -> None:
        """Watch *parent*."""
        handle = living_parent(parent)
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._lose(handle))

    def _lose(self, parent: Handle) -> None:
        """Continue under the guardian, if that replaces *parent*; otherwise end."""
        self._selector.unregister(parent)
        parent.close()
        guardian = new_parent(self._guardian)
        if guardian is None:
            self._leave()
        self._selector.register(guardian, selectors.EVENT_READ, self._leave)


@dataclass(eq=False)
class Spawner:
    """The process above the workers of one launch: it starts them at the launcher's orders, round after round."""

    _launcher: Channel
    _parent: int
    _keep: frozenset[int]
    """Descriptors that modules of the fork server opened at import: workers keep them."""
    _detached: Detached
    _changed: dict[str, str | None] = field(default_factory=dict)
    """
    Variables that the fork server's interpreter or imports set or (None) removed, as in a plain
    program.
    """
    _call: Callable[[], Any] | None = None
    """The entry point itself if the caller was forked; otherwise None, and it is sent pickled."""
    _guardian: int = 0
    """
    The process that becomes the parent when the present one ends, and guards this launch too; 0
    for none.
    """
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _common: StartSpec = field(default_factory=StartSpec)
    """The part of the `StartSpec` that all workers of the launch share."""
    _memories: dict[str, int] = field(default_factory=dict)
    """Pickled function and ``__main__`` definitions, as descriptors."""
    _lease: Lease | None = None
    """The lease of the workers, in a job of many nodes."""
    _stacks: StackDump = field(default_factory=StackDump)
    _workers: LiveWorkers = field(init=False)
    _store: StoreHost = field(init=False)

    def __post_init__(self) -> None:
        self._workers = LiveWorkers(self._launcher, self._selector, self._detached, self._all_ended, self._stacks)
        self._store = StoreHost(self._selector, self._keep, self._store_began, self._store_ended)

    def serve(self) -> NoReturn:
        """Follow orders until the launcher or the parent is gone."""
        self._selector.register(self._launcher, selectors.EVENT_READ, self._handle_order)
        ParentWatch(self._selector, self._guardian, self._leave).begin(self._parent)
        self._workers.listen()
        while True:
            for key, _ in self._selector.select(self._left()):
                key.data()
            self._workers.look()
            if self._stacks.next_look is not None and monotonic() >= self._stacks.next_look:
                self._answer_with_stacks(self._stacks.look(monotonic()))
            if monotonic() >= self._lease_end():
                # Other nodes may have the ranks of these workers from now on, and no other
                # process here has ended them.
                kill_descendants()
                self._launcher.send({"op": "broken", "why": CUT_OFF})
                self._leave()

    def _left(self) -> float | None:
        """Return the seconds until something is due; None for no limit."""
        now = monotonic()
        due = self._workers.due()
        if self._stacks.next_look is not None:
            due.append(self._stacks.next_look)
        end = self._lease_end()
        if end < math.inf:
            # It may be renewed before, or shortened: it is checked again after half of the time.
            due.append(min(end, now + max(_SHORTEST_WAIT, (end - now) / 2)))

        if not due:
            return None

        # The kernel limits the length of a wait.
        return min(max(0.0, min(due) - now), _LONGEST_WAIT)

    def _leave(self) -> NoReturn:
        kill_descendants()
        os._exit(0)

    def _lease_end(self) -> float:
        return self._lease.ends_at() if self._lease is not None and self._workers.any_left() else math.inf

    def _handle_order(self) -> None:
        received = self._launcher.receive()
        if received is None:
            self._leave()
        message, descriptors = received
        match message["op"]:
            case "job":
                self._take_job(message, descriptors)
            case "start":
                self._start(message, descriptors)
            case "signal":
                self._workers.signal(message["round"], message["local_rank"], message["signal"])
            case "pass on":
                self._workers.pass_on(message["signal"], message["local_ranks"])
            case "stacks":
                self._look_at_stacks("stacks", self._workers.living())
            case "place":
                self._look_at_stacks("place", self._workers_to_sample())
            case "stop":
                self._stop(message["signal"], message["grace"], message["spare"])
            case "ping":
                self._launcher.send({**message, "op": "pong"})
            case "signal store":
                self._store.signal(message["signal"])
            case "quit":
                self._quit()

    def _take_job(self, message: Message, descriptors: list[int]) -> None:
        self._common = StartSpec.of(message["common"])
        self._workers.are_functions = self._common.kind == "function"
        self._memories = dict(zip(message["memories"], descriptors, strict=True))
        with processes.own_descriptors() as itself:
            self._launcher.send({"op": "spawning", "spawner": os.getpid()}, itself)

    def _workers_to_sample(self) -> list[WorkerProcess]:
        return [each for each in self._workers.living() if each.may_be_sampled()]

    def _look_at_stacks(self, asker: str, workers: Sequence[WorkerProcess]) -> None:
        seen = [each.seen() for each in workers]
        self._stacks.begin(seen, monotonic(), asker)

    def _answer_with_stacks(self, found: dict[int, str] | None) -> None:
        if found is None:
            return
        with shared_text(dumps(found)) as memories:
            for asker in self._stacks.askers:
                self._launcher.send({"op": asker, "round": self._workers.round}, memories)

    def _quit(self) -> NoReturn:
        self._store.end()
        # Processes that were kept may have detached others.
        self._detached.sweep((), keeps=self._keeps_detached())
        os._exit(0)

    def _start(self, message: Message, descriptors: list[int]) -> None:
        number = message["round"]
        self._workers.begin_round(number)
        self._detached.begin_round()
        self._store.end()
        streams, given = descriptors[:3], dict(zip(message["more"], descriptors[3:], strict=True))
        if "store" in given:
            self._store.await_knock(given["store"])
        if self._lease is not None:
            self._lease.close()
        self._lease = Lease(given["lease"]) if "lease" in given else None

        # Before any program runs: the launcher must not think that the round has not begun.
        self._launcher.send({"op": "starting", "round": number})
        _threads.set_torch_threads(self._common.threads)
        try:
            self._workers.release.begin_round()
            for differences in message["workers"]:
                self._start_worker(self._common.with_differences(differences), streams)
        except OSError as error:
            # No process, memory or descriptor left: the launcher drops this spawner, which ends
            # the running workers.
            fix = _FIXES.get(error.errno or 0, "")
            self._launcher.send({"op": "broken", "why": f"a worker could not be started: {error}{fix}"})
            return
        finally:
            close_each(streams)

        self._launcher.send({"op": "started", "round": number, "pids": self._workers.pids()})

    def _start_worker(self, spec: StartSpec, streams: list[int]) -> None:
        left = Left()
        notices, notices_identity = self._workers.notices.for_workers()
        release, release_identity = self._workers.release.for_workers()
        opened = {
            name: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            for name, path in (("stdout", spec.stdout), ("stderr", spec.stderr))
            if path is not None
        }
        handed = Handed(
            environment=spec.environment(self._changed),
            streams=[streams[0], opened.get("stdout", streams[1]), opened.get("stderr", streams[2])],
            report=left.report,
            identity=_report.identity(left.report),
            faults=left.faults,
            tail=left.tail,
            notices=notices,
            notices_identity=notices_identity,
            release=release,
            release_identity=release_identity,
            spawner=os.getpid(),
            memories=self._memories,
        )
        try:
            pid = self._fork(spec, handed)
        finally:
            close_each(opened.values())

        course = _exiting.ExitCourse(*spec.exit_timeout, for_group=spec.signals_group)
        handle = processes.handle_of(pid)
        self._detached.add_worker(pid)
        self._workers.add(WorkerProcess(self._workers.round, spec.local_rank, pid, handle, left, course))

    def _fork(self, spec: StartSpec, handed: Handed) -> int:
        drop = None if self._call is None else self._own_descriptors()
        return fork_worker(spec, handed, self._keep, drop, self._call)

    def _own_descriptors(self) -> list[int]:
        """Return the descriptors that a worker, forked with all of the caller's, must not hold."""
        own = [key.fd for key in self._selector.get_map().values()]
        own += [self._detached.fileno(), *self._workers.own()]
        if self._lease is not None:
            own.append(self._lease.fileno())
        return [*own, self._selector.fileno()]  # type: ignore[attr-defined]

    def _all_ended(self) -> None:
        if not self._detached.succeeded:
            self._store.end()
        # Otherwise it stays as long as this process: workers of other nodes may still use it.
        stays = [*self._workers.survivors, *self._store.pids()]
        left, ended = self._detached.sweep(stays, keeps=self._keeps_detached())
        survivors = [*self._workers.survivors, *left]
        self._launcher.send({"op": "stopped", "round": self._workers.round, "survivors": survivors, "ended": ended})

    def _keeps_detached(self) -> bool:
        return not self._common.serves_caller

    def _stop(self, signum: int, grace: float, spare: bool) -> None:
        # A program that saves at a signal and exits with 0 has succeeded, and may leave its
        # upload behind. That does not apply if the stop follows a failure, or others wait for a
        # restart. The restart may be another node's, after all workers here ended.
        self._detached.succeeded = self._detached.succeeded and not spare
        if self._workers.any_left():
            self._workers.stop(signum, grace, spare)
        else:
            self._all_ended()

    def _store_began(self, pid: int) -> None:
        self._launcher.send({"op": "hosting", "round": self._workers.round, "pid": pid})

    def _store_ended(self, why: str, pid: int, exitcode: int) -> None:
        needed = not self._workers.all_ended_well()
        facts = {"round": self._workers.round, "why": why, "pid": pid, "exitcode": exitcode, "needed": needed}
        self._launcher.send({"op": "store", **facts})


# The first steps of a process that was just forked, up to the spawner.


def be_spawner(
    descriptor: int,
    parent: int,
    outliving: processes.SharedSessions,
    keep: frozenset[int] = frozenset(),
    changed: dict[str, str | None] | None = None,
    call: Callable[[], Any] | None = None,
    guardian: int = 0,
) -> NoReturn:
    """
    Turn this just-forked process into the spawner that gets its orders over *descriptor*.

    It ends when *parent* does, unless *guardian* adopts it then.
    """
    channel = Channel.adopt(descriptor)
    try:
        os.setsid()
        settle_signals()

        # Blocked as well: a signal that reaches a worker before it has its own handlers waits,
        # and is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        adopt_orphans()
        outlive_parent()

        # Three descriptors a worker; the workers themselves get the caller's limit back.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        Spawner(channel, parent, keep, Detached(outliving), changed or {}, call, guardian).serve()
    # The launcher must learn of every failure, and no worker may stay.
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"the spawner process failed: {type(error).__name__}: {error}"
        channel.send({"op": "broken", "why": f"{why} ({os.path.basename(last.filename)}, line {last.lineno})"})
        kill_descendants()
    finally:
        os._exit(1)


def report_forked(descriptor: int, child: int) -> None:
    """
    Report *child* to the launch at the other end of *descriptor*, and close that.

    The child itself could be stopped before it can report.
    """
    launch = Channel.adopt(descriptor)
    launch.send({"op": "forked", "pid": child})
    launch.close()


def guard_spawner(channel: Channel, launcher: int, call: Callable[[], Any]) -> NoReturn:
    """
    Fork the spawner, with its orders over the *channel*, from a fork of the *launcher*; then be
    its reaper.
    """
    try:
        os.setsid()
        settle_signals()
        adopt_orphans()
        outlive_parent()
        me = os.getpid()
        descriptor = above_standard_streams(channel.fileno())
        channel.close()
        while (filler := os.open(os.devnull, os.O_RDWR)) < 3:
            # The caller may have closed its streams: no other descriptor may get their numbers.
            pass

        os.close(filler)
        outliving = processes.SharedSessions.new()
        try:
            child = os.fork()
        except OSError as error:
            why = str(start_error("the spawner process", error))
            Channel.adopt(descriptor).send({"op": "broken", "why": why})
            os._exit(1)

        if child == 0:
            be_spawner(descriptor, me, outliving, call=call)
        report_forked(descriptor, child)

        # A program that waits for the last copy of the caller's file to close must not wait for
        # this process.
        close_all_but({0, 1, 2, outliving.fileno()})
        guard_child(launcher, child, outliving)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
