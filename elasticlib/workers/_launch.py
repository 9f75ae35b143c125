"""
The launcher's side of one launch: a spawner with its workers, to be started, heard and stopped.

Rules of this file: a wait for fork server or spawner can be interrupted by a descriptor of the caller's; nothing is
thrown away that a worker left behind.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from elasticlib import records
from elasticlib._clock import monotonic
from elasticlib._times import Term
from elasticlib.errors import StartError
from elasticlib.helpers import Helper, Reported
from elasticlib.processes import (
    Channel,
    ChildProcess,
    HelperLostError,
    Link,
    Message,
    Process,
    debugger_follows,
    descriptors_of_memories,
    start_error,
    unseen_by_debugger,
    wait_readable,
)
from elasticlib.workers._fork_servers import ForkServer, fork_servers
from elasticlib.workers._launch_events import Event, RoundStoreEnded, SpawnerLost, event_of_workers
from elasticlib.workers.child._buffers import Memory
from elasticlib.workers.child._start_spec import StartSpec
from elasticlib.workers.child._worker_progress import Board, new_board

_EXIT_LIMIT = 1.0
"""Seconds between a spawner's last word, the end of its channel, and its end."""
_IMPORTS_LOOK = 1.0
"""Seconds between looks at a fork server that is at its imports."""
_FORKS = 1.0
"""Seconds that a request to stop leaves for the forks of the workers, so that these can be asked to save."""
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
        self._anchor: ChildProcess | None = None
        """The reaper that was forked from the caller."""
        self._early: list[Event] = []
        self._round = -1
        self._spawner: Process | None = None
        self._itself: Helper | None = None
        """The spawner, once it is there."""
        self._store: Helper | None = None
        """The process that hosts the workers' store of this round."""
        self._blame: dict[int, str] = {}
        """By process id, why this program has killed a helper."""
        self.while_waiting: Callable[[], float | None] = lambda: None
        """Called before each wait for the fork server or spawner; seconds after which that is to be again."""
        self.started = False
        """Whether workers were ever started, so that there is something to stop."""

    def fileno(self) -> int:
        """Readable when `drain` has something to tell; -1 when no spawner is there."""
        return -1 if self._channel is None else self._channel.fileno()

    def employ(self, fork_server: ForkServer) -> None:
        """Have *fork server* fork a spawner for this launch, which gives the fork server back when it closes."""
        self._fork_server = fork_server
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
                # The child would write once more whatever waits in a buffer.
                stream.flush()
        try:
            with warnings.catch_warnings(), nullcontext() if debugger_follows() else unseen_by_debugger():
                # Python 3.12 warns of forks in threaded programs: the caller asked for just that. In a kernel the
                # debugger would have the child wait for a client that never comes.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            link.close()
            theirs.close()
            raise start_error("a fork of this program", error) from error
        if pid == 0:
            from elasticlib.workers.spawner import _begin

            _begin.guard_spawner(theirs, me, call)
        self._anchor = ChildProcess(pid)
        self._itself = Helper("reaper", Reported(pid, self._anchor.send))
        theirs.close()
        self._start_spawner(link)

    def _start_spawner(self, channel: Channel) -> None:
        self._channel = channel
        memories = descriptors_of_memories(self._memories)
        try:
            handed = {**memories, **self._handed}
            self.board = new_board(self._count)
            if self.board is not None:
                handed["progress"] = self.board.fileno()
            message = {"op": "job", "common": self._common.plain(), "memories": list(handed)}
            channel.send(message, tuple(handed.values()))
        finally:
            # The spawner has copies of its own by now.
            for descriptor in memories.values():
                os.close(descriptor)
            if self.board is not None:
                self.board.close()

    def spawner(self, interrupt: int | None = None) -> Process | None:
        """
        Wait for the process with which all workers will die.

        None when *interrupt* becomes readable first. Raises `StartError` or `PreloadError` when it cannot come.
        """
        while self._spawner is None:
            if not self._await_answer(interrupt):
                return None
            self._early += self._event(*self._receive_answer())
        return self._spawner

    def _await_answer(self, interrupt: int | None = None) -> bool:
        """Wait until the spawner says something; False when *interrupt* is readable first."""
        assert self._channel is not None
        watched = [self._channel, *(() if interrupt is None else (interrupt,))]
        while not (ready := wait_readable(watched, self.while_waiting())):
            pass
        return self._channel.fileno() in ready

    def _receive_answer(self) -> tuple[Message, list[int]]:
        """The next message of the spawner, with its descriptors; raises what became of it instead."""
        assert self._channel is not None
        received = self._channel.receive(whole=False)
        if received is None:
            raise self._why_gone()
        if received[0]["op"] == "broken":
            raise StartError(received[0]["why"])
        return received

    def look_at_imports(self, sink: records.Sink) -> float | None:
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

        *listener* is the bound socket of the round's store; when the *lease* is over, all are killed. The result is {}
        where *interrupt* is readable and the workers are not started within a second: if `started` is true, some may
        run, and can be asked to save. It is {} too where the spawner is lost once the first worker runs, and in a
        restart where not all can be started: `drain` tells of that, and the round has failed, for a program runs once
        a round. Raises `StartError` or `PreloadError` when none can be started.
        """
        assert self._channel is not None
        self._wake()
        self._order_start(number, workers, listener, lease)
        is_restart = self.started
        if self._await_message("starting", number, interrupt) is None:
            return {}
        self.started = True
        try:
            started = self._await_message("started", number, interrupt)
        except HelperLostError:
            # `drain` finds the end of the channel too, and reports it.
            return {}
        except StartError as error:
            # In a first start nothing has run yet. A restart has failed: a program runs once a round.
            if not is_restart:
                raise
            self._early.append(SpawnerLost(str(error), error))
            return {}
        if started is None:
            return {}
        if self._fork_server is not None:
            self._fork_server.listen()
        return {int(rank): pid for rank, pid in started["pids"].items()}

    def _order_start(self, number: int, workers: list[StartSpec], listener: int | None, lease: Term | None) -> None:
        assert self._channel is not None
        self._round, self._store = number, None
        if self.board is not None:
            self.board.clear()
        streams = [_stream(number) for number in (0, 1, 2)]
        more = {}
        if listener is not None:
            more["store"] = listener
        if lease is not None:
            more["lease"] = lease.fileno()
        differences = [worker.differences(self._common) for worker in workers]
        message: Message = {
            "op": "start",
            "round": number,
            "workers": differences,
            "more": list(
                more,
            ),
        }
        self._channel.send(message, (*streams, *more.values()))
        for stream in streams:
            os.close(stream)

    def _await_message(self, op: str, number: int, interrupt: int | None) -> Message | None:
        """
        Return the spawner's message *op* of round *number*; what it says before that is kept for `drain`.

        None where *interrupt* is readable and nothing comes for `_FORKS` seconds.
        """
        assert self._channel is not None
        # After an interrupt, forks that are under way get a second: those workers can be stopped as others are.
        while self._await_answer(interrupt) or wait_readable([self._channel], _FORKS):
            answer, extra = self._receive_answer()
            if answer["op"] == op and answer["round"] == number:
                return answer
            self._early += self._event(answer, extra)
        return None

    def drain(self) -> list[Event]:
        """What has happened since the last call; never waits for more than one message under way."""
        events, self._early = self._early, []
        while self._channel is not None and wait_readable([self._channel], 0):
            received = self._channel.receive(whole=False)
            if received is None:
                self._channel.close()
                self._channel = None
                error = self._why_gone()
                events.append(SpawnerLost(str(error), error))
            else:
                events += self._event(*received)
        return events

    def _why_gone(self) -> Exception:
        """Return the error that names the process which was lost first, as far as that is known."""
        itself = 0 if self._itself is None else self._itself.process.pid
        # This program killed it, and knows the reason better than its exit status.
        if itself in self._blame:
            return HelperLostError(self._blame[itself])
        pid = 0 if self._spawner is None else self._spawner.pid
        if self._fork_server is not None:
            return self._fork_server.failure("spawner", pid)
        return self._why_gone_without_fork_server(pid)

    def _why_gone_without_fork_server(self, pid: int) -> HelperLostError:
        """Return the error where this program itself was forked: its reaper may have been killed first."""
        reaper = self._anchor
        status = 0 if reaper is None else reaper.exitcode() or 0
        if reaper is not None and status < 0:
            return HelperLostError.of("reaper", reaper.pid, -status)
        return HelperLostError.of("spawner", pid)

    def _event(self, message: Message, descriptors: list[int]) -> list[Event]:
        try:
            if message["op"] == "spawning":
                self._spawner = Process.sent(message["spawner"], descriptors)
                self._itself = Helper("spawner", self._spawner, lambda number: self._say("ping", number=number))
                descriptors = []
                return []
            if message["op"] == "forked":
                self._note_forked(message["pid"])
                return []
            if message["op"] == "broken":
                return [SpawnerLost(message["why"], StartError(message["why"]))]
            if message["op"] == "pong" and self._itself is not None:
                self._itself.answered = message["number"]
                return []
            # The message is about a round that is over.
            if message["round"] != self._round:
                return []
            match message["op"]:
                case "hosting":
                    store = Reported(message["pid"], lambda signum: self._say("signal store", signal=signum))
                    self._store = Helper("worker store", store)
                    return []
                case "starting" | "started":  # of a start that was interrupted
                    return []
                case "store":
                    why, self._store = self._blame.pop(message["pid"], message["why"]), None
                    return [RoundStoreEnded(why, message["pid"], message["exitcode"], message["needed"])]
            return [event_of_workers(message, descriptors)]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _note_forked(self, pid: int) -> None:
        """Note the spawner before it has begun: those that forked it pass signals on."""
        if self._spawner is not None:
            # Its own first message was faster.
            return
        fork_server, anchor = self._fork_server, self._anchor
        if fork_server is not None:
            send: Callable[[int], object] = functools.partial(fork_server.signal_child, pid)
        else:
            assert anchor is not None
            send = anchor.send
        self._itself = Helper("spawner", Reported(pid, send))

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
        self._say("signal", round=self._round, local_rank=local_rank, signal=signum)

    def pass_on(self, signum: int) -> None:
        """Send *signum* to every worker that handles it."""
        self._wake()
        if self._channel is not None:
            self._channel.send({"op": "pass on", "signal": signum})

    def ask_for_stacks(self) -> None:
        """Have the threads of all workers written down; `Stacks` follows."""
        if self._channel is not None and self._spawner is not None:
            self._wake()
            self._say("stacks")

    def ask_for_place(self) -> None:
        """Have it written down where the first worker is, if it can be without harm; `Place` follows."""
        self._say("place")

    def _wake(self) -> None:
        """A spawner that was stopped from outside hears nobody."""
        if self._spawner is not None:
            self._spawner.send(signal.SIGCONT)

    def helpers_of_others(self) -> list[Helper]:
        """The processes that workers of other nodes need; the spawner is woken to pass signals on, and not replaced."""
        return self._own_helpers(needs_spawner=False)

    def helpers(self) -> list[Helper]:
        """The processes that the workers need, or that this launch waits for."""
        own = self._own_helpers(needs_spawner=True)
        return own if self._fork_server is None else own + self._fork_server.helpers(self._spawner is None)

    def _own_helpers(self, *, needs_spawner: bool) -> list[Helper]:
        if self._itself is not None:
            self._itself.is_needed = needs_spawner
        return [helper for helper in (self._itself, self._store) if helper is not None]

    def _say(self, op: str, **facts: object) -> None:
        if self._channel is not None:
            self._channel.send({"op": op, **facts})

    def replace(self, helper: Helper, why: str) -> None:
        """Kill a *helper* that stands still; what is heard of it then is *why*."""
        if helper in (self._itself, self._store):
            self._blame[helper.process.pid] = why
            helper.process.send(signal.SIGKILL)
        elif self._fork_server is not None:
            self._fork_server.replace(why)

    def kill(self) -> None:
        """Kill a spawner that does not answer, and with it all workers."""
        if self._spawner is not None:
            self._spawner.kill()

    def close(self) -> None:
        """Kill what still runs and let the spawner go; call it in any state, more than once."""
        # A cycle would keep its owner, with all of a job, until the next garbage collection.
        self.while_waiting = lambda: None
        if self._channel is not None:
            if self._may_have_spawner():
                self._quit(self._channel)
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

    def _may_have_spawner(self) -> bool:
        """Return True unless the fork server is still at its imports, so that no spawner can answer."""
        return self.started or self._fork_server is None or self._fork_server.ready()

    def _quit(self, channel: Channel) -> None:
        """Tell the spawner to quit, and wait until it closes its end: nothing is left below it then."""
        self._wake()
        channel.send({"op": "quit"})
        deadline = monotonic() + _QUIT_LIMIT
        left = _QUIT_LIMIT
        while left > 0 and wait_readable([channel], left):
            received = channel.receive(whole=False)
            if received is None:
                break
            # Nobody reads these files any more.
            for descriptor in received[1]:
                os.close(descriptor)
            left = deadline - monotonic()


def _stream(number: int) -> int:
    """The caller's present stream for its workers, or nothing where there is none to share."""
    at_start = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    # Where Python had no stream at its start, the number may be any file's by now.
    if at_start is not None and not (number == 0 and _in_background()):
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
