"""
The launcher's side of one launch: a spawner with its workers, to be started, heard and stopped.

Rules of this file: no call waits for one thing only: a caller may pass a descriptor whose readiness
interrupts; nothing is thrown away that a worker left behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from elasticlib import processes, records
from elasticlib._programs import Child, Link, Process, above_standard, close_all_but, not_started
from elasticlib._times import Term
from elasticlib._wire import Channel, Message, wait_readable
from elasticlib.errors import StartError
from elasticlib.workers import _reaper
from elasticlib.workers._fork_servers import ForkServer, fork_servers
from elasticlib.workers._launch_events import (
    Event,
    Exit,
    Failed,
    Lingers,
    Lost,
    Stacks,
    Stopped,
    StoreGone,
    Stuck,
)
from elasticlib.workers.child import _report
from elasticlib.workers.child._buffers import Memory
from elasticlib.workers.child._progress import Board
from elasticlib.workers.child._start_spec import StartSpec

_EXIT_LIMIT = 1.0
"""Seconds between a spawner's last word, the end of its channel, and its end."""
_IMPORTS_LOOK = 1.0
"""Seconds between looks at a fork server that is at its imports."""
_LEFT = 3
"""Descriptors of what a worker leaves behind."""
_QUIT_LIMIT = 6.0
"""Seconds for a spawner that is let go of: as long as it waits for what even SIGKILL does not end, and one more."""


class SpawnerClient:
    """The workers of one launch, started and stopped by a spawner of their own."""

    def __init__(
        self,
        common: StartSpec,
        memories: Mapping[str, bytes | Memory],
        count: int = 1,
        handed: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._common = common
        self._memories = dict(memories)
        self._handed = dict(handed)
        self._count = count
        self.board: Board | None = None
        """What the workers tell of their progress."""
        self._fork_server: ForkServer | None = None
        self._channel: Channel | None = None
        self._anchor: Child | None = None
        """The reaper that was forked from the caller."""
        self._early: list[Event] = []
        self._round = -1
        self._spawner: Process | None = None
        self.started = False
        """Whether workers were ever started, so that there is something to stop."""
        self.was_warm = False
        """Whether the fork server had done its imports when it was employed, so that its end was no fault of theirs."""

    def fileno(self) -> int:
        """Readable when `drain` has something to tell; -1 when no spawner is there."""
        return -1 if self._channel is None else self._channel.fileno()

    def employ(self, fork_server: ForkServer) -> None:
        """Have *fork server* fork a spawner for this launch, which gives the fork server back when it closes."""
        self._fork_server = fork_server
        self.was_warm = fork_server.ready()
        try:
            self._start_spawner(fork_server.request("job"))
        except BaseException:
            self.close()
            raise

    def is_outdated(self) -> bool:
        """Whether what the fork server imported has changed since, so that new workers need another one."""
        return self._fork_server is not None and self._fork_server.outdated()

    def fork_caller(self, call: Callable[[], Any]) -> None:
        """Have a spawner that is forked from this very process (start method ``fork``)."""
        ours, theirs = Channel.pair()
        link = Link(ours)
        me = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what waits in a buffer would be written once more by the child
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks in threaded programs: the caller asked for just that.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            link.close()
            theirs.close()
            raise not_started("a fork of this program", error) from error
        if pid == 0:
            _guard_forked(theirs, me, call)
        self._anchor = Child(pid)
        theirs.close()
        self._start_spawner(link)

    def _start_spawner(self, channel: Channel) -> None:
        self._channel = channel
        self.board = Board(self._count)
        descriptors = handed_over(self._memories.values())
        message = {
            "op": "job",
            "common": self._common.plain(),
            "memories": [*self._memories, *self._handed, "progress"],
        }
        try:
            channel.send(message, (*descriptors, *self._handed.values(), self.board.fileno()))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self.board.close()

    def spawner(self, interrupt: int | None = None, sink: records.Sink = records.log) -> Process | None:
        """
        Wait for the process with which all workers will die; *sink* gets what it waits for, where that takes long.

        None when *interrupt* becomes readable first. Raises `StartError` or `PreloadError` when it cannot come.
        """
        while self._spawner is None:
            answer = self._answer(interrupt, sink)
            if answer is None:
                return None
            self._early += self._event(*answer)
        return self._spawner

    def _answer(self, interrupt: int | None, sink: records.Sink = records.log) -> tuple[Message, list[int]] | None:
        """What the spawner says next; None when *interrupt* is readable first."""
        assert self._channel is not None
        watched = [self._channel, *(() if interrupt is None else (interrupt,))]
        while not (readable := wait_readable(watched, self._look_at_imports(sink))):
            pass
        if self._channel.fileno() not in readable:
            return None
        received = self._channel.receive(whole=False)
        if received is None:
            raise self._why_gone()
        if received[0]["op"] == "broken":
            raise StartError(received[0]["why"])
        return received

    def _look_at_imports(self, sink: records.Sink) -> float | None:
        """Tell *sink* of an import of the fork server that takes long; seconds until the next look, None for none."""
        if self._fork_server is None or self._fork_server.ready():
            return None
        if (slow := self._fork_server.slow_import()) is not None:
            sink(slow)
        return _IMPORTS_LOOK

    def start(
        self, number: int, workers: list[StartSpec], listener: int | None,
        interrupt: int | None = None, lease: Term | None = None,
    ) -> dict[int, int]:  # fmt: skip
        """
        Start *workers* for a round, with the caller's present streams; return {local rank: pid}.

        *listener* is the bound socket of the round's store; when the *lease* is over, all are killed. Returns an empty
        dict when *interrupt* becomes readable first. Raises `StartError` or `PreloadError` when none can be started.
        """
        assert self._channel is not None
        self._wake()
        self._round = number
        if self.board is not None:
            self.board.clear()
        streams = [_stream(number) for number in (0, 1, 2)]
        more = {"store": listener, "lease": None if lease is None else lease.fileno()}
        given = {name: descriptor for name, descriptor in more.items() if descriptor is not None}
        apart = [worker.differences(self._common) for worker in workers]
        message: Message = {"op": "start", "round": number, "workers": apart, "more": list(given)}
        self._channel.send(message, (*streams, *given.values()))
        for stream in streams:
            os.close(stream)
        while (received := self._answer(interrupt)) is not None:
            answer, extra = received
            if answer["op"] == "started" and answer["round"] == number:
                self.started = True
                if self._fork_server is not None:
                    self._fork_server.listen()
                return {int(rank): pid for rank, pid in answer["pids"].items()}
            self._early += self._event(answer, extra)
        return {}

    def drain(self) -> list[Event]:
        """What has happened since the last call; never waits for more than one message under way."""
        events, self._early = self._early, []
        while self._channel is not None and wait_readable([self._channel], 0):
            received = self._channel.receive(whole=False)
            if received is None:
                self._channel.close()
                self._channel = None
                error = self._why_gone()
                events.append(Lost(str(error), error))
            else:
                events += self._event(*received)
        return events

    def _why_gone(self) -> Exception:
        if self._fork_server is None:
            return StartError("the process that starts the workers was ended from outside")
        return self._fork_server.failure()

    def _event(self, message: Message, descriptors: list[int]) -> list[Event]:
        try:
            if message["op"] == "spawning":
                self._spawner = Process.sent(message["spawner"], descriptors)
                descriptors = []
                return []
            if message["op"] == "broken":
                return [Lost(message["why"], StartError(message["why"]))]
            if message["round"] != self._round:
                return []
            match message["op"]:
                case "exited":
                    rank, pid, code, told = (message[name] for name in ("local_rank", "pid", "exitcode", "told"))
                    overdue = message["overdue"]
                    if len(descriptors) < _LEFT:  # the end itself is told all the same
                        return [Exit(rank, pid, code, told, None, "", overdue=overdue, unread=True)]
                    report, *texts = descriptors
                    faults, tail = (_report.read_text(descriptor) for descriptor in texts)
                    return [Exit(rank, pid, code, told, _report.read(report), faults, tail, overdue)]
                case "failed":
                    left = _report.read(descriptors[0]) if descriptors else None
                    return [Failed(Exit(message["local_rank"], message["pid"], message["exitcode"], False, left, ""))]
                case "lingers":
                    stacks = _report.read_text(descriptors[0]) if descriptors else ""
                    rank, pid, seconds, ends = (message[name] for name in ("local_rank", "pid", "seconds", "ends"))
                    return [Lingers(rank, pid, seconds, ends, stacks)]
                case "store":
                    return [StoreGone(message["why"], message["pid"], message["exitcode"])]
                case "stuck":
                    return [Stuck(message["local_rank"], message["pid"], message["waited"])]
                case "stacks":
                    found = json.loads(_report.read_text(descriptors[0])) if descriptors else {}
                    return [Stacks({int(rank): text for rank, text in found.items()})]
                case "stopped":
                    return [Stopped(message["survivors"])]
            return []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def stop(self, signum: int, grace: float, spare_failed: bool = False) -> bool:
        """
        Send *signum* to every worker's group and SIGKILL after *grace* s; `Stopped` follows. False if lost.

        With *spare_failed* workers whose programs failed keep the time that they have for their exit handlers.
        """
        self._wake()
        message = {"op": "stop", "signal": signum, "grace": grace, "spare": spare_failed}
        return self._channel is not None and self._channel.send(message)

    def signal(self, local_rank: int, signum: int) -> None:
        """Signal the group of one worker, if it runs: the spawner alone knows whom its number means."""
        self._wake()
        if self._channel is not None:
            self._channel.send({"op": "signal", "round": self._round, "local_rank": local_rank, "signal": signum})

    def pass_on(self, signum: int) -> None:
        """Send *signum* to every worker that handles it."""
        self._wake()
        if self._channel is not None:
            self._channel.send({"op": "pass on", "signal": signum})

    def ask_for_stacks(self) -> None:
        """Have the threads of all workers written down; `Stacks` follows."""
        if self._channel is not None and self._spawner is not None:
            self._wake()
            self._channel.send({"op": "stacks"})

    def _wake(self) -> None:
        """A spawner that was stopped from outside hears nobody."""
        if self._spawner is not None:
            self._spawner.send(signal.SIGCONT)

    def kill(self) -> None:
        """Kill a spawner that does not answer, and with it all workers."""
        if self._spawner is not None:
            self._spawner.kill()

    def close(self) -> None:
        """Kill what still runs and let the spawner go; call it in any state, more than once."""
        if self._channel is not None and (self.started or self._fork_server is None or self._fork_server.ready()):
            self._wake()
            self._channel.send({"op": "quit"})
            # The spawner closes its end when nothing is left below it.
            deadline = time.monotonic() + _QUIT_LIMIT
            while (left := deadline - time.monotonic()) > 0 and wait_readable([self._channel], left):
                received = self._channel.receive(whole=False)
                if received is None:
                    break
                for descriptor in received[1]:
                    os.close(descriptor)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._spawner is not None:
            if not self._spawner.ends(_EXIT_LIMIT):
                self._spawner.kill()
            self._spawner.close()
            self._spawner = None
        if self._anchor is not None:
            self._anchor.wait(_QUIT_LIMIT)
            self._anchor = None
        if self._fork_server is not None:
            fork_servers.give_back(self._fork_server, unused=not self.started)
            self._fork_server = None


def handed_over(memories: Iterable[bytes | Memory]) -> list[int]:
    """A descriptor of each, for a message; the caller closes them."""
    descriptors: list[int] = []
    try:
        for content in memories:
            if isinstance(content, Memory):
                descriptors.extend(map(os.dup, (content.fileno(),)))  # in one step: no interrupt falls between
            else:
                descriptors.extend(map(processes.anonymous_file, ("function",)))
                _report.write_exactly(descriptors[-1], content)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _stream(number: int) -> int:
    """The caller's present stream for its workers, or nothing where there is none to share."""
    at_start = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    if at_start is not None and not (number == 0 and _in_background()):  # else the number may be any file's by now
        try:
            return os.dup(number)
        except OSError:
            pass  # closed since
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _in_background() -> bool:
    """Whether stdin is our terminal while another job has it: workers, in their sessions, would not be stopped."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False  # somebody else's terminal


def _guard_forked(channel: Channel, launcher: int, call: Callable[[], Any]) -> None:
    """In a fork of the caller: fork the spawner, then be its reaper."""
    from elasticlib.workers.spawner import _begin

    try:
        os.setsid()
        _reaper.settle_signals()
        _reaper.adopt_orphans()
        _reaper.outlive_parent()
        me = os.getpid()
        descriptor = above_standard(channel.fileno())
        channel.close()
        while (filler := os.open(os.devnull, os.O_RDWR)) < 3:
            pass  # the caller may have closed its streams: no other descriptor may take their numbers
        os.close(filler)
        try:
            child = os.fork()
        except OSError as error:
            why = str(not_started("the process that starts the workers", error))
            Channel.adopt(descriptor).send({"op": "broken", "why": why})
            os._exit(1)
        if child == 0:
            _begin.be_spawner(descriptor, me, call=call)
        # Whoever waits for the last copy of one of the caller's files to close does not wait for this process.
        close_all_but({0, 1, 2})
        _reaper.guard(launcher, child)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
