"""
Channels between a pool's program and its workers: they send calls, receive answers and detect ends.

Rules of this file: every rank owes at most one answer. A received message is stored before an
interrupt can be raised.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticlib import processes
from elasticlib.launch import CheckedLaunch
from elasticlib.processes import Channel, Message, wait_readable
from elasticlib.workers import DeferredSignals
from elasticlib.workers.child import CALLS_MEMORY, Report, read_report

OnAsk = Callable[[int, Message], tuple[Message, tuple[int, ...]]]
"""Return the answer, with descriptors, to a question that a rank sends during a call."""
OnTell = Callable[[int, Message], None]
"""Receive each message that a rank sends during a call without expecting an answer."""


class Channels:
    """Channels to the workers of *launch*, which gets the workers' ends."""

    def __init__(self, launch: CheckedLaunch) -> None:
        self._channels: list[Channel] = []
        self._ended = -1
        """Readable once the job has ended."""
        self.owing: dict[int, int] = {}
        """By rank, the number of the call that has not been answered."""
        self._processes: dict[int, processes.Handle] = {}
        """By rank, the worker's process. Its channel does not show its death, since copies of its end may stay open."""
        self._silent: set[int] = set()
        """Ranks whose channel is closed."""
        self.on_ask: OnAsk = lambda *_: ({}, ())
        self.on_tell: OnTell = lambda *_: None
        self._open(launch)

    def _open(self, launch: CheckedLaunch) -> None:
        theirs: list[Channel] = []
        try:
            for _ in range(launch.workers):
                ours, end = Channel.pair()
                self._channels.append(ours)
                theirs.append(end)
            self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # No file descriptor is left.
        except OSError:
            launch.abandon()
            for channel in (*self._channels, *theirs):
                channel.close()
            raise

        launch.hand({f"{CALLS_MEMORY}{rank}": end.fileno() for rank, end in enumerate(theirs)})
        for end in theirs:
            end.close()

    def __len__(self) -> int:
        return len(self._channels)

    def job_has_ended(self) -> None:
        """Wake up the threads that wait. Raises `OSError` after `close`."""
        os.eventfd_write(self._ended, 1)

    def wait_for_end(self, limit: float) -> None:
        """Wait until the job has ended, for *limit* seconds at most."""
        wait_readable([self._ended], limit)

    def has_lost_worker(self) -> bool:
        """Return True if a worker has ended."""
        return any(process.has_ended() for process in self._processes.values())

    def send_call(self, rank: int, number: int, message: Message, descriptors: tuple[int, ...]) -> None:
        """Send a call to *rank*. The call is noted as unanswered before it is sent."""
        self.owing[rank] = number
        self._channels[rank].send(message, descriptors)

    def send_end(self) -> None:
        """Ask all workers to end."""
        for channel in self._channels:
            channel.send({"op": "end"})

    def wait(self, limit: float | None) -> tuple[list[int], list[int] | None]:
        """
        Wait up to *limit* seconds (None: without limit) for the ranks that owe an answer.

        Return the ranks that have sent a message, and None. If none has sent one, return [] and the ranks
        that have ended without an answer; ([], None) after the limit.
        """
        channels, workers = self._of_owing()
        ready = wait_readable([*channels, *workers, self._ended], limit)
        if not ready:
            return [], None

        # Messages come first: an answer is valid even if its worker has ended since.
        readable = [channels[each] for each in ready & channels.keys()]
        if readable:
            return readable, None
        if self._ended in ready:
            return [], [*self.owing]

        return [], [workers[each] for each in ready]

    def _of_owing(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the ranks that owe an answer, by the descriptors of their channels and of their processes."""
        channels = {self._channels[rank].fileno(): rank for rank in self.owing if rank not in self._silent}
        known = self.owing.keys() & self._processes.keys()
        return channels, {self._processes[rank].fileno(): rank for rank in known}

    def receive(self, rank: int, put_off: DeferredSignals) -> tuple[Message, Report | None] | None:
        """Handle one message of *rank*. Return the message and its report if it answers the rank's call, else None."""
        received = self._channels[rank].receive()
        if received is None:
            self._silent.add(rank)
            return None

        message, descriptors = received
        try:
            match message["op"]:
                case "ready":
                    self._processes[rank] = processes.received_handle(descriptors)
                    # The handle owns the descriptors now.
                    descriptors = []
                case "ask":
                    # Interrupts are allowed here, since the answer may take long.
                    with put_off.lifted:
                        self._channels[rank].send(*self.on_ask(rank, message))
                case "tell":
                    self.on_tell(rank, message)
                case "answer" if message["call"] == self.owing[rank]:
                    report = read_report(*descriptors)
                    del self.owing[rank]
                    return message, report

            return None
        finally:
            for each in descriptors:
                os.close(each)

    def close(self) -> None:
        """Close the channels; may be called again."""
        for channel in self._channels:
            channel.close()
        while self._processes:
            self._processes.popitem()[1].close()
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)
