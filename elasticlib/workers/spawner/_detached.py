"""
Processes that the workers of a round have detached, in sessions of their own.

They are kept if the workers succeeded, and killed with the workers otherwise.

Rules of this file: kept processes are known by their sessions, so a shell that ends can leave its
commands behind.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from elasticlib import processes
from elasticlib.processes import KILL_SECONDS, kill_descendants
from elasticlib.workers.spawner import _kernel_facts


class Detached:
    """
    The detached processes of one launch, round after round.

    *outliving* lists the sessions that the processes above this one must spare.
    """

    def __init__(self, outliving: processes.SharedSessions) -> None:
        self._outliving = outliving
        self._kept = processes.Sessions()
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the round before."""
        self.succeeded = True
        """True if no worker of this round failed, and no other failure or restart stopped them."""
        self._workers: set[int] = set()

    def add_worker(self, pid: int) -> None:
        """Add the session of a worker of this round."""
        self._workers.add(pid)

    def fileno(self) -> int:
        """Return the descriptor that the processes above this one share."""
        return self._outliving.fileno()

    def sweep(self, spare: Collection[int], *, keeps: bool) -> tuple[list[int], dict[int, str]]:
        """
        Kill all processes below this one except *spare*.

        Detached ones are kept too, if the workers have succeeded and *keeps*. Return the
        processes that even SIGKILL did not end, and the commands of the detached ones that were
        killed.
        """
        found = [pid for pid in _kernel_facts.detached(os.getpid(), self._workers) if pid not in spare]
        kept, ended = (found, []) if self.succeeded and keeps else ([], found)
        self._keep(processes.Sessions(kept))
        commands = {pid: _kernel_facts.command(pid) for pid in ended}
        return kill_descendants(spare, limit=KILL_SECONDS, kept=self._kept), commands

    def _keep(self, sessions: processes.Sessions) -> None:
        """Keep only these *sessions*, also if a process above this one kills the rest."""
        self._outliving.replace(self._kept, sessions)
        self._kept = sessions
