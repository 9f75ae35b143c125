"""
The channels between a pool's program and its workers: calls go out, answers come in, and ends are seen.

Rules of this file: every rank owes no answer or one. What is received is put where it belongs before an interrupt can
be raised.
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
"""Returns the answer to a rank that asks something in the midst of a call, with descriptors."""
OnTell = Callable[[int, Message], None]
"""Gets each message that a rank sends in the midst of a call."""


class Channels:
    """The channels to the workers of *launch*, which gets the workers' ends."""

    def __init__(self, launch: CheckedLaunch) -> None:
        self._channels: list[Channel] = []
        self._ended = -1
        """Readable once the job has ended."""
        self.owing: dict[int, int] = {}
        """By rank, the number of the call that has not been answered."""
        self._processes: dict[int, processes.Handle] = {}
        """By rank, the worker. Copies of its end of the channel live on: that tells no death."""
        self._silent: set[int] = set()
        """Ranks from which nothing can arrive any more."""
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
        # No descriptor is left.
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
        """Wake up whoever waits. Raises `OSError` after `close`."""
        os.eventfd_write(self._ended, 1)

    def wait_for_end(self, limit: float) -> None:
        """Wait until the job has ended, for *limit* seconds at most."""
        wait_readable([self._ended], limit)

    def has_lost_worker(self) -> bool:
        """Return whether a worker has ended."""
        return any(process.has_ended() for process in self._processes.values())

    def send_call(self, rank: int, number: int, message: Message, descriptors: tuple[int, ...]) -> None:
        """Send a call to that rank, which owes its answer from before it can have it."""
        self.owing[rank] = number
        self._channels[rank].send(message, descriptors)

    def send_end(self) -> None:
        """Let all workers end."""
        for channel in self._channels:
            channel.send({"op": "end"})

    def wait(self, limit: float | None) -> tuple[list[int], list[int] | None]:
        """
        Wait up to *limit* seconds for those that owe an answer.

        Return the ranks that have sent something; and, where none has, those that have ended without an answer (None:
        the time is over).
        """
        channels, workers = self._of_owing()
        ready = wait_readable([*channels, *workers, self._ended], limit)
        if not ready:
            return [], None
        # First the messages: an answer counts, though its worker has ended since.
        readable = [channels[each] for each in ready & channels.keys()]
        if readable:
            return readable, None
        if self._ended in ready:
            return [], [*self.owing]
        return [], [workers[each] for each in ready]

    def _of_owing(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the ranks that owe an answer by the descriptors of their channels, and of their processes."""
        channels = {self._channels[rank].fileno(): rank for rank in self.owing if rank not in self._silent}
        known = self.owing.keys() & self._processes.keys()
        return channels, {self._processes[rank].fileno(): rank for rank in known}

    def receive(self, rank: int, put_off: DeferredSignals) -> tuple[Message, Report | None] | None:
        """Handle one message of that rank, and return it with its report where it answers the rank's call."""
        received = self._channels[rank].receive()
        if received is None:
            self._silent.add(rank)
            return None
        message, descriptors = received
        try:
            match message["op"]:
                case "ready":
                    self._processes[rank] = processes.received_handle(descriptors)
                    # The handle owns them now.
                    descriptors = []
                case "ask":
                    # Interrupts are let through, since the answer may take its time.
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
        """Close them; it may be called again."""
        for channel in self._channels:
            channel.close()
        while self._processes:
            self._processes.popitem()[1].close()
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)
