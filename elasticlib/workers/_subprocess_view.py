"""
Handles of processes that belong to a set, in the shape of a `SubprocessHandler`.

Rules of this file: a view starts and reaps nothing; what it knows it reads from its set.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from attrs import frozen

from elasticlib.workers._launch_events import Exit


@frozen
class ProcessOfSet:
    """What of a ``subprocess.Popen`` holds for a process of a set: its `pid`, and how it ended."""

    pid: int
    _rank: int
    _exits: Callable[[], Mapping[int, Exit]]
    _signal: Callable[[int, int], None]

    def poll(self) -> int | None:
        """The exit status, ``-n`` for signal ``n``; None while the process runs."""
        end = self._exits().get(self._rank)
        return None if end is None else end.exitcode

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()


@frozen
class ProcessView:
    """One process of a `SubprocessContext`: `proc` tells of it, `close` signals its whole group."""

    local_rank_id: int
    proc: ProcessOfSet

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send *death_sig* (SIGTERM) to the process and all that it started; nothing once it has ended."""
        if self.proc.poll() is None:
            self.proc._signal(self.local_rank_id, signal.SIGTERM if death_sig is None else death_sig)
