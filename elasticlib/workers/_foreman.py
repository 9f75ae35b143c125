"""
The foreman: one process per launch that forks the workers, sees their ends and stops them.

It is forked from the template (or, with start method ``fork``, from the caller) and takes orders over a
channel from the launcher. It is the workers' parent and adopts their orphans, so it alone signals and
reaps, and no pid can be mistaken for another's. When the launcher or the foreman's own parent is gone
it kills every descendant and ends.

Rules of this file: never wait for one thing only; one stop ladder for every case: the signal to the
groups, one deadline, SIGKILL, then report who survives (uninterruptible sleep) and go on.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import process as multiprocessing_process
from typing import Any, NoReturn

from elasticlib._wire import Channel, Message
from elasticlib.workers import _child, _guardian, _report, _stuck

_MENDS = {
    errno.EMFILE: "; each worker needs three descriptors: raise the hard limit of open files (ulimit -Hn)",
    errno.EAGAIN: "; raise the limit of processes (ulimit -u, or the cgroup's pids.max)",
    errno.ENOMEM: "; start fewer workers",
}
_LONGEST_WAIT = 86400.0
_KILL_LIMIT = 5.0
"""Seconds that a SIGKILLed process gets until it counts as a survivor."""


@dataclass
class _Live:
    round: int
    local_rank: int
    pid: int
    handle: int
    """pidfd"""
    left: tuple[int, int, int]
    """What it leaves behind, as descriptors: report, fault handler's stacks, last lines of stderr."""
    told: bool = False
    """Whether it was sent the stop signal while it lived."""


@dataclass(eq=False)
class Foreman:
    """The workers of one launch, round after round."""

    _launcher: Channel
    _parent: int
    _keep: frozenset[int]
    """Descriptors that modules of the template opened at import: workers keep them."""
    _changed: dict[str, str | None] = field(default_factory=dict)
    """Variables that the template's interpreter or imports set or (None) removed, as in a plain program."""
    _call: Callable[[], Any] | None = None
    """The entry point itself where the caller was forked; else it comes pickled."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _live: dict[int, _Live] = field(default_factory=dict)
    _job: Message = field(default_factory=dict)
    _memories: dict[str, int] = field(default_factory=dict)
    """Pickled function and ``__main__`` definitions, as descriptors."""
    _round: int = -1
    _deadline: float | None = None
    _killed: bool = False
    _stopping: _stuck.Stop | None = None
    """What is known of workers that take their time to end."""
    _listener: int | None = None
    _store: int | None = None

    def serve(self) -> NoReturn:
        """Follow orders until the launcher or the parent is gone."""
        self._selector.register(self._launcher, selectors.EVENT_READ, self._obey)
        self._selector.register(_guardian.watch(self._parent), selectors.EVENT_READ, self._leave)
        while True:
            for key, _ in self._selector.select(self._left()):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._out_of_time()
            elif self._stopping is not None and time.monotonic() >= self._stopping.next_look:
                self._look_for_stuck(self._stopping)

    def _left(self) -> float | None:
        """Seconds until something is due, or until it is looked at again: the kernel does not count any number."""
        if self._deadline is None:
            return None
        due = self._deadline if self._stopping is None else min(self._deadline, self._stopping.next_look)
        return min(max(0.0, due - time.monotonic()), _LONGEST_WAIT)

    def _leave(self) -> NoReturn:
        _guardian.sweep()
        os._exit(0)

    def _obey(self) -> None:
        received = self._launcher.receive()
        if received is None:
            self._leave()
        message, descriptors = received
        match message["op"]:
            case "job":
                self._job = message
                self._memories = dict(zip(message["memories"], descriptors, strict=True))
                self._launcher.send({"op": "hired", "foreman": os.getpid()})
            case "start":
                self._start(message, descriptors)
            case "stop":
                self._stop(message["signal"], message["grace"])
            case "quit":
                self._leave()

    def _start(self, message: Message, descriptors: list[int]) -> None:
        self._round = message["round"]
        self._killed = False
        self._end_store()
        streams = descriptors[:3]
        if message["store"]:
            self._listener = descriptors[3]
            self._selector.register(self._listener, selectors.EVENT_READ, self._open_store)
        try:
            for order in message["workers"]:
                self._start_worker(order, streams)
        except OSError as error:
            # No process, memory or descriptor left: the launcher lets go of this foreman, which ends what runs.
            mend = _MENDS.get(error.errno or 0, "")
            self._launcher.send({"op": "broken", "why": f"a worker could not be started: {error}{mend}"})
            return
        finally:
            for stream in streams:
                os.close(stream)
        self._launcher.send({"op": "started", "round": self._round, "pids": {n: w.pid for n, w in self._live.items()}})

    def _start_worker(self, order: Message, streams: list[int]) -> None:
        order = {**self._job["common"], **order}
        given = {**self._job["common"]["env"], **self._changed, **order["env"]}
        order["env"] = {name: value for name, value in given.items() if value is not None}
        report, faults, tail = [os.memfd_create(name) for name in ("report", "faults", "tail")]
        opened = []
        order |= {"stdin": streams[0], "report": report, "faults": faults, "tail": tail}
        order |= {"identity": _report.identity(report), "foreman": os.getpid()}
        order |= {name: self._memories.get(name) for name in ("function", "definitions")}
        for name, inherited in (("stdout", streams[1]), ("stderr", streams[2])):
            path = order[name]
            order[name] = inherited
            if path is not None:
                order[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                opened.append(order[name])
        try:
            pid = self._fork(order)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        live = _Live(self._round, order["local_rank"], pid, os.pidfd_open(pid), (report, faults, tail))
        self._live[live.local_rank] = live
        self._selector.register(live.handle, selectors.EVENT_READ, lambda: self._ended(live))

    def _fork(self, order: Message) -> int:
        left = [order["report"], order["faults"], order["tail"]]
        keep = {*left, *self._keep, *self._memories.values()}
        order["inherit"] = []
        if order["fresh"]:  # a new interpreter finds its order in memory that it inherits
            letter = os.memfd_create("order")
            order["inherit"] = [*left, *self._memories.values(), letter]
            _report.write_exactly(letter, json.dumps(order).encode())
            keep.add(letter)
            order = {**order, "kind": "program", "argv": [*order["python"], str(letter)]}
        elif order["kind"] == "program":
            keep -= self._keep
        drop = None if self._call is None else self._own_descriptors()
        worker = _context().Process(target=_child.run_forked, args=(order, os.getpid(), keep, drop, self._call))
        sys.stdout.flush()
        worker.start()
        # The foreman reaps by itself, after the group was killed: multiprocessing must not be first.
        multiprocessing_process._children.discard(worker)  # type: ignore[attr-defined]
        if order["inherit"]:
            os.close(order["inherit"][-1])
        return int(worker.pid)

    def _own_descriptors(self) -> list[int]:
        """What a worker forked with all of the caller's descriptors must not hold."""
        own = [key.fd for key in self._selector.get_map().values()]
        own += [number for worker in self._live.values() for number in worker.left]
        return [*own, self._selector.fileno()]  # type: ignore[attr-defined]

    def _ended(self, worker: _Live) -> None:
        self._selector.unregister(worker.handle)
        os.close(worker.handle)
        # Kill the group while the leader is a zombie: its pid, hence the group's, is not free yet.
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        del self._live[worker.local_rank]
        code = os.waitstatus_to_exitcode(status)
        message = {"op": "exited", "round": worker.round, "local_rank": worker.local_rank}
        message |= {"pid": worker.pid, "exitcode": code, "told": worker.told}
        self._launcher.send(message, worker.left)
        for descriptor in worker.left:
            os.close(descriptor)
        if not self._live:
            self._all_ended()

    def _all_ended(self) -> None:
        self._deadline = self._stopping = None
        self._end_store()
        survivors = _guardian.sweep(limit=_KILL_LIMIT)
        self._launcher.send({"op": "stopped", "round": self._round, "survivors": survivors})

    def _stop(self, signum: int, grace: float) -> None:
        if not self._live:
            self._all_ended()
            return
        if self._killed:
            return  # nothing is stronger; the deadline is that of the kill
        self._deadline = time.monotonic() + grace
        if self._stopping is None or self._stopping.signum != signum:
            self._stopping = _stuck.Stop(signum, time.monotonic())
        for worker in self._live.values():
            # A peer may tell of a closed connection before the one that died is a zombie.
            worker.told = worker.told or not _guardian.ends(worker.pid)
            _signal_group(worker.pid, signum)
            _signal_group(worker.pid, signal.SIGCONT)  # a stopped process does not see the signal

    def _look_for_stuck(self, stop: _stuck.Stop) -> None:
        """End one that sits in native code, in case that frees the others for what they do at their end."""
        looks = {rank: _stuck.look(worker.pid, stop.signum) for rank, worker in self._live.items()}
        rank = stop.stuck(looks, time.monotonic())
        if rank is None:
            return
        pid, waited = self._live[rank].pid, time.monotonic() - stop.began
        self._launcher.send({"op": "stuck", "round": self._round, "local_rank": rank, "pid": pid, "waited": waited})
        _signal_group(pid, signal.SIGKILL)

    def _out_of_time(self) -> None:
        if self._killed:
            survivors = [worker.pid for worker in self._live.values()]
            for worker in self._live.values():
                self._give_up(worker)
            self._live.clear()
            self._deadline = None
            self._launcher.send({"op": "stopped", "round": self._round, "survivors": survivors})
            return
        self._killed, self._stopping = True, None
        self._deadline = time.monotonic() + _KILL_LIMIT
        for worker in self._live.values():
            _signal_group(worker.pid, signal.SIGKILL)
            _guardian.send(worker.pid, signal.SIGKILL)  # it may not lead its group yet

    def _give_up(self, worker: _Live) -> None:
        """Forget a worker that sits in uninterruptible sleep: a later sweep reaps it, if it ever ends."""
        self._selector.unregister(worker.handle)
        for descriptor in (worker.handle, *worker.left):
            os.close(descriptor)

    def _open_store(self) -> None:
        """Someone knocks: fork the process that hosts the workers' store on the socket of this round."""
        listener = self._listener
        if listener is None:
            return  # the round ended in the very moment
        self._selector.unregister(listener)
        me = os.getpid()
        self._store = os.fork()
        if self._store == 0:
            _host_store(listener, me)
        os.close(listener)
        self._listener = None

    def _end_store(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            os.close(self._listener)
            self._listener = None
        if self._store is not None:
            _guardian.send(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
            self._store = None


def _context() -> Any:
    """torch's multiprocessing where torch is loaded; it is the standard one with tensors taught to it."""
    library = sys.modules.get("torch.multiprocessing", multiprocessing)
    return library.get_context("fork")


def _signal_group(leader: int, signum: int) -> None:
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        _guardian.send(leader, signum)  # forked just now: it has not made its session yet
    except PermissionError:
        pass  # a program that changed its user: its end is still seen, and it dies with this process


def _host_store(listener: int, parent: int) -> NoReturn:
    """Host torch's TCPStore on *listener* until the foreman ends this process."""
    try:
        _guardian.die_with_parent(parent)
        os.setsid()
        import socket

        with socket.socket(fileno=os.dup(listener)) as bound:
            host, port = bound.getsockname()[:2]
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        signal.pause()
        del store
    except BaseException:
        traceback.print_exc()  # workers that cannot reach their store say so; this is for the log of the template
    finally:
        os._exit(1)


def be_foreman(
    descriptor: int,
    parent: int,
    keep: frozenset[int] = frozenset(),
    changed: dict[str, str | None] | None = None,
    call: Callable[[], Any] | None = None,
) -> NoReturn:
    """Turn this just-forked process into the foreman whose orders come over *descriptor*."""
    channel = Channel.adopt(descriptor)
    try:
        os.setsid()
        _guardian.settle_signals()
        # Blocked as well: what reaches a worker before it has its own handlers waits, and is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _guardian.STOP_SIGNALS)
        _guardian.adopt_orphans()
        # Three descriptors a worker; the workers themselves get the caller's limit back.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        Foreman(channel, parent, keep, changed or {}, call).serve()
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"the process that starts the workers failed: {type(error).__name__}: {error}"
        channel.send({"op": "broken", "why": f"{why} ({os.path.basename(last.filename)}, line {last.lineno})"})
        _guardian.sweep()
    finally:
        os._exit(1)
