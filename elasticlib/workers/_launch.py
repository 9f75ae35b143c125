"""
The launcher's side of one launch: a client that starts, hears and stops a spawner with its
workers.

`SpawnerClient` gives the orders. `SpawnerMessages` turns the answers into events, and
`LaunchHelpers` knows the processes between launcher and workers.

Rules of this file: a wait for fork server or spawner can be interrupted by a descriptor of the
caller's. Everything that a worker left behind is kept.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
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
"""Seconds from the end of a spawner's channel to its own end."""
_IMPORTS_LOOK = 1.0
"""Seconds between looks at a fork server that is at its imports."""
_FORKS = 1.0
"""
Seconds that a stop request leaves for the forks of the workers, so that these can still save
their state.
"""
_QUIT_LIMIT = 6.0
"""
Seconds for a spawner to quit: its own wait for processes that even SIGKILL does not end, and one
more.
"""


class LaunchHelpers:
    """
    The helper processes of one launch: the spawner, the process that forked it, and the host of
    the workers' store.

    It also knows whose fault a loss is, which the end of the spawner alone does not show.
    """

    def __init__(self) -> None:
        self.fork_server: ForkServer | None = None
        """The parent of the spawner, unless this program itself was forked."""
        self.spawner: Process | None = None
        """The spawner, once it has begun."""
        self._reaper: ChildProcess | None = None
        """The parent of the spawner if this program itself was forked."""
        self._nearest: Helper | None = None
        """The spawner; before it is forked, the reaper."""
        self._store: Helper | None = None
        """The process that hosts the workers' store of this round."""
        self._blame: dict[int, str] = {}
        """Reasons for which this program has killed helpers, by process id."""

    def note_reaper(self, reaper: ChildProcess) -> None:
        """Note the *reaper*, which this program has forked and which forks the spawner."""
        self._reaper = reaper
        self._nearest = Helper("reaper", Reported(reaper.pid, reaper.send))

    def note_forked(self, pid: int) -> None:
        """Note the spawner before it has begun: the process that forked it forwards signals."""
        if self.spawner is not None:
            # Its own first message was faster.
            return

        if self.fork_server is not None:
            send: Callable[[int], object] = functools.partial(self.fork_server.signal_child, pid)
        else:
            assert self._reaper is not None
            send = self._reaper.send

        self._nearest = Helper("spawner", Reported(pid, send))

    def note_spawner(self, spawner: Process, ping: Callable[[int], object]) -> None:
        """Note the *spawner*, which has begun; *ping* sends it a number, for `note_answer`."""
        self.spawner = spawner
        self._nearest = Helper("spawner", spawner, ping)

    def note_answer(self, number: int) -> None:
        """Note that the spawner has answered a ping with this *number*."""
        if self._nearest is not None:
            self._nearest.answered = number

    def note_store(self, pid: int, send: Callable[[int], object]) -> None:
        """Note the process that hosts the store of this round; *send* has the spawner signal it."""
        self._store = Helper("worker store", Reported(pid, send))

    def forget_store(self) -> None:
        """Forget the process that hosted the store of the round before, or that has ended."""
        self._store = None

    def reason_of_end(self, pid: int, why: str) -> str:
        """Return why the helper *pid* ended: *why*, unless this program has killed it."""
        return self._blame.pop(pid, why)

    def all(self) -> list[Helper]:
        """Return the processes that the workers need, or that this launch waits for."""
        own = self._own(needs_spawner=True)
        return own if self.fork_server is None else own + self.fork_server.helpers(self.spawner is None)

    def serving_other_nodes(self) -> list[Helper]:
        """
        Return the processes that workers of other nodes need.

        The spawner is woken to forward signals, and not replaced.
        """
        return self._own(needs_spawner=False)

    def _own(self, *, needs_spawner: bool) -> list[Helper]:
        if self._nearest is not None:
            self._nearest.is_needed = needs_spawner
        return [helper for helper in (self._nearest, self._store) if helper is not None]

    def replace(self, helper: Helper, why: str) -> None:
        """Kill a *helper* that stands still; *why* is reported as the reason of its end."""
        if helper in (self._nearest, self._store):
            self._blame[helper.process.pid] = why
            helper.process.send(signal.SIGKILL)
        elif self.fork_server is not None:
            self.fork_server.replace(why)

    def why_gone(self) -> Exception:
        """Return the error that names the process which was lost first, as far as that is known."""
        nearest = 0 if self._nearest is None else self._nearest.process.pid
        # This program killed it, and knows the reason better than its exit status.
        if nearest in self._blame:
            return HelperLostError(self._blame[nearest])
        pid = 0 if self.spawner is None else self.spawner.pid
        if self.fork_server is not None:
            return self.fork_server.failure("spawner", pid)
        return self._why_gone_without_fork_server(pid)

    def _why_gone_without_fork_server(self, pid: int) -> HelperLostError:
        """
        Return the error if this program itself was forked: its reaper may have been killed first.
        """
        reaper = self._reaper
        status = 0 if reaper is None else reaper.exitcode() or 0
        if reaper is not None and status < 0:
            return HelperLostError.of("reaper", reaper.pid, -status)
        return HelperLostError.of("spawner", pid)

    def wake_spawner(self) -> None:
        """Continue the spawner: one that was stopped from outside reads no messages."""
        if self.spawner is not None:
            self.spawner.send(signal.SIGCONT)

    def kill_spawner(self) -> None:
        """Kill the spawner, and with it all workers."""
        if self.spawner is not None:
            self.spawner.kill()

    def may_have_spawner(self) -> bool:
        """
        Return False if the fork server is still at its imports, so that no spawner can answer.
        """
        return self.fork_server is None or self.fork_server.ready()

    def release(self, *, unused: bool) -> None:
        """
        Wait for the ends of spawner and reaper, and give the fork server back; *unused*: no worker
        was started.
        """
        if self.spawner is not None:
            # It ends once its channel is closed, unless it is stopped or hangs.
            if not self.spawner.ends(_EXIT_LIMIT):
                self.spawner.kill()
            self.spawner.close()
            self.spawner = None

        if self._reaper is not None:
            self._reaper.wait(_QUIT_LIMIT)
            self._reaper = None

        if self.fork_server is not None:
            # Last, because a surplus one is ended now, with everything that it has forked.
            fork_servers.give_back(self.fork_server, unused=unused)
            self.fork_server = None


class SpawnerMessages:
    """
    The messages to and from one spawner. Those that arrive while another one is awaited are kept
    as events for `drain`.
    """

    def __init__(self, helpers: LaunchHelpers) -> None:
        self._helpers = helpers
        """They learn what the messages say about them."""
        self._channel: Channel | None = None
        self._early: list[Event] = []
        self.round = -1
        """Number of the present round; messages about earlier ones are left out."""
        self.while_waiting: Callable[[], float | None] = lambda: None
        """Called before each wait; returns the seconds until the next call."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has events; -1 without a spawner."""
        return -1 if self._channel is None else self._channel.fileno()

    def open(self, channel: Channel) -> None:
        """Use *channel*, which belongs to this object from now on."""
        self._channel = channel

    def send(self, op: str, descriptors: tuple[int, ...] = (), **facts: object) -> bool:
        """Send the order *op*; return False if the spawner is gone."""
        return self._channel is not None and self._channel.send({"op": op, **facts}, descriptors)

    def await_any(self, interrupt: int | None) -> bool:
        """Wait until the spawner sends a message; return False if *interrupt* is readable first."""
        assert self._channel is not None
        watched = [self._channel, *(() if interrupt is None else (interrupt,))]
        # When nothing is readable, it is time for the next look at the helpers.
        while not (ready := wait_readable(watched, self.while_waiting())):
            pass
        return self._channel.fileno() in ready

    def await_one(self, op: str, interrupt: int | None) -> Message | None:
        """
        Return the spawner's message *op* of the present round; earlier messages are kept.

        None if *interrupt* is readable and no message arrives for `_FORKS` seconds. Raises the
        reason if the spawner is gone.
        """
        assert self._channel is not None
        # After an interrupt, forks in progress get a second: those workers can then be stopped
        # like others.
        while self.await_any(interrupt) or wait_readable([self._channel], _FORKS):
            answer, extra = self._receive()
            # The answer to an earlier start, which was interrupted, may arrive only now.
            is_awaited = answer["op"] == op and answer["round"] == self.round
            if is_awaited:
                return answer
            self._early += self._event(answer, extra)
        return None

    def take_one(self) -> None:
        """Receive one message, and keep its event. Raises the reason if the spawner is gone."""
        self._early += self._event(*self._receive())

    def _receive(self) -> tuple[Message, list[int]]:
        assert self._channel is not None
        # The end of a worker counts even if no descriptor is free for its files.
        received = self._channel.receive(whole=False)
        if received is None:
            raise self._helpers.why_gone()
        if received[0]["op"] == "broken":
            raise StartError(received[0]["why"])
        return received

    def keep(self, event: Event) -> None:
        """Keep *event* for `drain`."""
        self._early.append(event)

    def drain(self) -> list[Event]:
        """Return the events since the last call; wait for at most one message in progress."""
        events, self._early = self._early, []
        while self._channel is not None and wait_readable([self._channel], 0):
            received = self._channel.receive(whole=False)
            if received is None:
                self._channel.close()
                self._channel = None
                error = self._helpers.why_gone()
                events.append(SpawnerLost(str(error), error))
            else:
                events += self._event(*received)

        return events

    def _event(self, message: Message, descriptors: list[int]) -> list[Event]:
        """Return the event of *message*, if it has one and belongs to the present round."""
        try:
            match message["op"]:
                case "spawning":
                    spawner, descriptors = Process.sent(message["spawner"], descriptors), []
                    self._helpers.note_spawner(spawner, lambda number: self.send("ping", number=number))
                    return []
                case "forked":
                    self._helpers.note_forked(message["pid"])
                    return []
                case "pong":
                    self._helpers.note_answer(message["number"])
                    return []
                case "broken":
                    return [SpawnerLost(message["why"], StartError(message["why"]))]

            # The message may be about an earlier round.
            return self._event_of_round(message, descriptors) if message["round"] == self.round else []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _event_of_round(self, message: Message, descriptors: list[int]) -> list[Event]:
        match message["op"]:
            case "hosting":
                self._helpers.note_store(message["pid"], lambda signum: self.send("signal store", signal=signum))
                return []
            case "starting" | "started":  # of a start that was interrupted
                return []
            case "store":
                why = self._helpers.reason_of_end(message["pid"], message["why"])
                self._helpers.forget_store()
                return [RoundStoreEnded(why, message["pid"], message["exitcode"], message["needed"])]

        return [event_of_workers(message, descriptors)]

    def quit(self) -> None:
        """
        Send the spawner the order to quit, and wait until it closes its end: then nothing is left
        below it.
        """
        channel = self._channel
        assert channel is not None
        self._helpers.wake_spawner()
        channel.send({"op": "quit"})
        deadline = monotonic() + _QUIT_LIMIT
        left = _QUIT_LIMIT
        while left > 0 and wait_readable([channel], left):
            received = channel.receive(whole=False)
            if received is None:
                break
            # No one reads these files any more.
            for descriptor in received[1]:
                os.close(descriptor)
            left = deadline - monotonic()

    def close(self) -> None:
        """Close the channel."""
        # A cycle would keep its owner, with all of a job, until the next garbage collection.
        self.while_waiting = lambda: None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


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
        """The workers' reports of their progress."""
        self._helpers = LaunchHelpers()
        self._messages = SpawnerMessages(self._helpers)
        self.started = False
        """True if workers were ever started, so that there is something to stop."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has events; -1 without a spawner."""
        return self._messages.fileno()

    def wait_with(self, while_waiting: Callable[[], float | None]) -> None:
        """
        Call *while_waiting* before each wait for the fork server or spawner; it returns the
        seconds until the next call.
        """
        self._messages.while_waiting = while_waiting

    def employ(self, fork_server: ForkServer) -> None:
        """
        Request a spawner for this launch from *fork server*, which is given back when this client
        closes.
        """
        self._helpers.fork_server = fork_server
        try:
            self._start_spawner(fork_server.request("job"))
        except BaseException:
            self.close()
            raise

    def is_outdated(self) -> bool:
        """
        Return True if the fork server's imports have changed since, so that new workers need
        another one.
        """
        fork_server = self._helpers.fork_server
        return fork_server is not None and fork_server.outdated()

    def fork_caller(self, call: Callable[[], Any]) -> None:
        """Fork a spawner from this process itself (start method ``fork``)."""
        link, reaper = _fork_reaper(call)
        self._helpers.note_reaper(reaper)
        self._start_spawner(link)

    def _start_spawner(self, channel: Channel) -> None:
        self._messages.open(channel)
        memories = descriptors_of_memories(self._memories)
        try:
            handed = {**memories, **self._handed}
            self.board = new_board(self._count)
            if self.board is not None:
                handed["progress"] = self.board.fileno()
            descriptors = tuple(handed.values())
            self._messages.send("job", descriptors, common=self._common.plain(), memories=list(handed))
        finally:
            # The spawner has copies of its own by now.
            for descriptor in memories.values():
                os.close(descriptor)
            if self.board is not None:
                self.board.close()

    def spawner(self, interrupt: int | None = None) -> Process | None:
        """
        Return the spawner's process, with which all workers will die, once it has started.

        None if *interrupt* becomes readable first. Raises `StartError` or `PreloadError` if it
        cannot start.
        """
        while self._helpers.spawner is None:
            if not self._messages.await_any(interrupt):
                return None
            self._messages.take_one()
        return self._helpers.spawner

    def look_at_imports(self, sink: records.Sink) -> float | None:
        """
        Report a slow import of the fork server to *sink*.

        Return the seconds until the next look; None if no more is needed.
        """
        fork_server = self._helpers.fork_server
        if fork_server is None or fork_server.ready():
            return None
        if (slow := fork_server.slow_import()) is not None:
            sink(slow)
        return _IMPORTS_LOOK

    def start(
        self, number: int, workers: list[StartSpec], listener: int | None,
        interrupt: int | None = None, lease: Term | None = None,
    ) -> dict[int, int]:  # fmt: skip
        """
        Start *workers* for a round, with the caller's present streams; return {local rank: pid}.

        *listener* is the bound socket of the round's store. When the *lease* is over, all are
        killed.

        The result is {} in these cases:

        * *interrupt* is readable, and the workers are not started within a second. If `started`
          is true, some may run, and can still save their state.
        * The spawner is lost after the first worker began. `drain` reports it, and the round has
          failed.
        * A restart cannot start all workers. `drain` reports it, and the round has failed,
          because a program runs once a round.

        Raises `StartError` or `PreloadError` if no worker can be started.
        """
        self._helpers.wake_spawner()
        self._order_start(number, workers, listener, lease)

        message = self._await_start(interrupt)
        if message is None:
            return {}

        if self._helpers.fork_server is not None:
            self._helpers.fork_server.listen()
        return {int(rank): pid for rank, pid in message["pids"].items()}

    def _await_start(self, interrupt: int | None) -> Message | None:
        """Return the message that all workers are started; None where `start` returns {}."""
        # The spawner sends this before any program of the round runs.
        is_restart = self.started
        if self._messages.await_one("starting", interrupt) is None:
            return None

        self.started = True
        try:
            return self._messages.await_one("started", interrupt)
        except HelperLostError:
            # `drain` finds the end of the channel too, and reports it.
            return None
        except StartError as error:
            # In a first start nothing has run yet. A restart has failed, because a program runs
            # once a round.
            if not is_restart:
                raise
            self._messages.keep(SpawnerLost(str(error), error))
            return None

    def _order_start(self, number: int, workers: list[StartSpec], listener: int | None, lease: Term | None) -> None:
        self._messages.round = number
        self._helpers.forget_store()
        if self.board is not None:
            self.board.clear()
        streams = [_stream(number) for number in (0, 1, 2)]
        more = {}
        if listener is not None:
            more["store"] = listener
        if lease is not None:
            more["lease"] = lease.fileno()
        differences = [worker.differences(self._common) for worker in workers]
        descriptors = (*streams, *more.values())
        self._messages.send("start", descriptors, round=number, workers=differences, more=list(more))
        # The spawner has its own copies.
        for stream in streams:
            os.close(stream)

    def drain(self) -> list[Event]:
        """Return the events since the last call; wait for at most one message in progress."""
        return self._messages.drain()

    def stop(self, signum: int, grace: float, spare_failed: bool = False) -> bool:
        """
        Send *signum* to every worker's group and SIGKILL after *grace* seconds; `AllStopped`
        follows. False if lost.

        With *spare_failed* workers whose programs failed keep the time for their exit handlers.
        """
        self._helpers.wake_spawner()
        return self._messages.send("stop", signal=signum, grace=grace, spare=spare_failed)

    def signal(self, local_rank: int, signum: int) -> None:
        """
        Signal the group of one worker, if it runs: only the spawner holds the worker's number.
        """
        self._helpers.wake_spawner()
        self._messages.send("signal", round=self._messages.round, local_rank=local_rank, signal=signum)

    def pass_on(self, signum: int, local_ranks: Sequence[int]) -> None:
        """Send *signum* to those workers of *local_ranks* that handle it."""
        self._helpers.wake_spawner()
        self._messages.send("pass on", signal=signum, local_ranks=list(local_ranks))

    def ask_for_stacks(self) -> None:
        """Request the stacks of all workers' threads; a `StacksRead` event follows."""
        if self._helpers.spawner is not None:
            self._helpers.wake_spawner()
            self._messages.send("stacks")

    def ask_for_place(self) -> None:
        """
        Request the place of the first worker, if that can be read without harm; a `CurrentLine`
        event follows.
        """
        self._messages.send("place")

    def helpers_of_others(self) -> list[Helper]:
        """
        Return the processes that workers of other nodes need.

        The spawner is woken to forward signals, and not replaced.
        """
        return self._helpers.serving_other_nodes()

    def helpers(self) -> list[Helper]:
        """Return the processes that the workers need, or that this launch waits for."""
        return self._helpers.all()

    def replace(self, helper: Helper, why: str) -> None:
        """Kill a *helper* that stands still; *why* is reported as the reason of its end."""
        self._helpers.replace(helper, why)

    def kill(self) -> None:
        """Kill a spawner that does not answer, and with it all workers."""
        self._helpers.kill_spawner()

    def close(self) -> None:
        """
        Kill the running workers and release the spawner; may be called in any state, more than
        once.
        """
        is_open = self.fileno() >= 0
        if is_open and (self.started or self._helpers.may_have_spawner()):
            self._messages.quit()
        self._messages.close()
        self._helpers.release(unused=not self.started)


def _fork_reaper(call: Callable[[], Any]) -> tuple[Link, ChildProcess]:
    """
    Fork the reaper of a spawner from this process, with the link to the spawner; workers run
    *call*.
    """
    ours, theirs = Channel.pair()
    link = Link(ours)
    me = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Otherwise the child would write the buffered text a second time.
            stream.flush()

    try:
        with warnings.catch_warnings(), nullcontext() if debugger_follows() else unseen_by_debugger():
            # Python 3.12 warns of forks in threaded programs, but the caller asked for one.
            # In a kernel the debugger would make the child wait for a client that never
            # connects.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        link.close()
        theirs.close()
        raise start_error("a fork of this program", error) from error

    if pid == 0:
        from elasticlib.workers.spawner import _spawner

        _spawner.guard_spawner(theirs, me, call)

    theirs.close()
    return link, ChildProcess(pid)


def _stream(number: int) -> int:
    """
    Return a copy of the caller's present stream for its workers, or ``/dev/null`` if it has none
    to share.
    """
    at_start = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    # If Python had no stream at its start, any file may have the number by now.
    if at_start is not None and not (number == 0 and _in_background()):
        try:
            return os.dup(number)
        except OSError:
            pass  # closed since
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _in_background() -> bool:
    """
    Return True if stdin is the terminal while another job has it.

    Workers have sessions of their own, so the terminal would not stop them.
    """
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False  # the terminal of another session
