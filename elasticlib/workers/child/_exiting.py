"""
A worker between its program's outcome and its process' end: how long that may take, what follows.

A program that raised, returned or ended is known by then; its process may live on: other threads work, exit handlers
run, finalizers or native calls do not come back. From the outcome on, which the worker announces, it has its *exit
timeout*; then the stacks of its threads are asked for, and then it is stopped by the same ladder as every other. A
function that returned waits for those of the other local ranks first.

    RUNS --outcome--> EXITS --exit timeout--> DUMPS --stacks written--> ASKED --grace--> KILLED --limit--> given up
      |                                         |                        ^  |
      |                                         |                        |  +-- it ends, its group does not --> GROUP
      |                                         +-- a program that ended well, no timeout set --> LINGERS
      +------------------------------ the round is being stopped --------+
      |
      +-- a function returned --> WAITS --all others returned or ended--> EXITS
      |
      +-- all others ended well --> LAST_RUNS --some time--> DUMPS --stacks written--> LAST_RUNS
                                                               +-- its function had returned --exit timeout--> ASKED

In ASKED the signal goes to the worker alone, and to its group when half of the grace is over. The last worker that runs
may be at work, such as on a checkpoint: people are told where it is, and no more. But a function may hang where nothing
is announced yet: in the destructor of a process group that was a local variable. Only where its stacks show that twice
does a timeout that the user set end it.

Rules of this file: time is an argument; PURE: nothing is sent or read here.
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass

from elasticlib.processes import KILL_SECONDS
from elasticlib.workers.child._announcing import Outcome

DEFAULT_EXIT_TIMEOUT = 30.0
"""Seconds"""
_TELL_LAST_RUNS_AFTER = 30.0
"""Seconds for which the last worker runs on before people are told where it is."""
_DUMP_LIMIT = 3.0
"""Seconds that the stacks of all threads get to be written."""
_DUMP_LOOK = 0.01
_GROUP_LOOK = 0.02
"""Seconds between two looks at the group of a worker that has ended."""
_GROUP_LATER = 1.0
"""Seconds for which the signal to a group is put off while its worker writes."""
_GROUP_PATIENCE = 1.0
"""Seconds for those of a group that ignore the signal, and for all where others wait."""
_MAIN_PARTS = (Outcome.RETURNED, Outcome.ENDED)
"""Outcomes after which threads and exit handlers of the program may still work."""


class Stage(enum.Enum):
    """Where a worker's process is on its way to its end."""

    RUNS = enum.auto()
    LAST_RUNS = enum.auto()
    """It runs, and all others have finished well."""
    WAITS = enum.auto()
    """Its function has returned, and it waits for those of the other local ranks."""
    EXITS = enum.auto()
    DUMPS = enum.auto()
    LINGERS = enum.auto()
    """Its program ended well, and it may take the time that it likes."""
    ASKED = enum.auto()
    """It was sent the stop signal."""
    GROUP = enum.auto()
    """It ended by that, and what it started in its group has the rest of its time."""
    KILLED = enum.auto()


_STOPPED = (Stage.ASKED, Stage.GROUP, Stage.KILLED)


class Act(enum.Enum):
    """What is to be done about a worker now."""

    DUMP = enum.auto()
    """Ask for the stacks of its threads."""
    TELL = enum.auto()
    """Tell the launcher that it did not end in time."""
    TELL_LAST_RUNS = enum.auto()
    """Tell the launcher that it runs on, though all others have finished."""
    TERM = enum.auto()
    ASK_GROUP = enum.auto()
    """Send the stop signal to its group, too."""
    LOOK_AT_GROUP = enum.auto()
    """See who is left in the group of one that has ended."""
    END_GROUP = enum.auto()
    """Kill who is left there."""
    KILL = enum.auto()
    GIVE_UP = enum.auto()
    """Not even SIGKILL ended it."""


@dataclass
class Course:
    """One worker's way to its end."""

    exit_timeout: float = DEFAULT_EXIT_TIMEOUT
    """Seconds from the outcome of its program to the end of its process."""
    was_chosen: bool = False
    """Whether the user set that time: it then holds for programs that ended well, too."""
    for_group: bool = False
    """Whether stop signals go to its whole group at once."""
    grace: float = KILL_SECONDS
    """Seconds from the stop signal to SIGKILL."""
    stage: Stage = Stage.RUNS
    outcome: Outcome | None = None
    status: int = 0
    """Exit status of its program, where that is known; ``-n`` for signal ``n``."""
    deadline: float | None = None
    overdue: bool = False
    """Whether it was stopped because its process did not end in time."""
    is_final: bool = False
    """Whether nothing that its process does from here on changes the status."""
    was_waiting: bool = False
    """Whether it waited for other local ranks when the stop began: released, it leaves by itself."""
    _others_finished: float = 0.0
    _had_returned: bool = False
    """Whether its function had returned at the last look, though that is not announced."""
    _told_last_runs: bool = False
    _dump_until: float = 0.0
    _kill_at: float = 0.0
    """When the stop signal is followed by SIGKILL."""
    _patience: float = 0.0
    """Until when those of its group are waited for that ignore the signal: they may end for other reasons."""
    _others_wait: bool = False
    """Whether a restart, or the nodes of a failed job, wait for the end of all."""

    def failed(self) -> bool:
        """Whether its program is known to have failed."""
        return self.outcome is not None and self.status != 0

    def ended_well(self) -> bool:
        """Whether its program is known to have ended well."""
        return self.outcome is not None and self.status == 0

    def _main_part_ended_well(self) -> bool:
        """Whether its function or script is over, and well, while its threads and exit handlers may still work."""
        return self.outcome in _MAIN_PARTS and self.status == 0

    def heard(self, outcome: Outcome, status: int, now: float) -> bool:
        """Take in an announcement; whether it is news that the program failed."""
        if outcome is Outcome.FINAL:
            self.is_final, self.status = True, status
            return False  # what failed in its last moments its end, which is near, will tell
        is_first = self.outcome is None
        if not is_first and not (self._main_part_ended_well() and outcome is Outcome.CLOSING):
            return False
        self.outcome, self.status = outcome, status
        if self.stage in _STOPPED:
            return False  # its end, which is near, will tell
        if outcome is Outcome.RETURNED and status == 0:
            self.stage, self.deadline = Stage.WAITS, None
        else:
            self._exit(now)
        return status != 0

    def _exit(self, now: float) -> None:
        self.stage, self.deadline = Stage.EXITS, now + self.exit_timeout

    def waits(self) -> bool:
        """Whether it waits for other local ranks."""
        return self.stage is Stage.WAITS

    def release(self, now: float) -> None:
        """It waits for nobody any more."""
        if self.waits():
            self._exit(now)

    def note_others_finished(self, now: float, is_function: bool) -> None:
        """All others have finished well. A function may have returned, too: that is seen before people are told."""
        if self.stage is Stage.RUNS:
            self.stage, self._others_finished = Stage.LAST_RUNS, now
            looks_early = is_function and self.was_chosen
            self.deadline = now + min(_TELL_LAST_RUNS_AFTER, self.exit_timeout if looks_early else math.inf)

    def time_of_last_runs(self, now: float) -> tuple[float, float | None]:
        """Seconds since all others have finished, and those that it has left; None: any."""
        return now - self._others_finished, self.exit_timeout if self._had_returned else None

    def stop(self, grace: float, now: float, spare_failed: bool) -> bool:
        """
        The round is being stopped; whether the worker is to be signalled.

        With *spare_failed* one whose program failed keeps the time for its exit handlers.
        """
        if self.stage is Stage.KILLED:
            return False  # nothing is stronger; the deadline is that of the kill
        if self.stage is Stage.GROUP:
            self._kill_at, self.deadline = min(self._kill_at, now + grace), now
            return False
        self.grace, self._others_wait = grace, spare_failed
        self.was_waiting = self.was_waiting or self.waits()
        if spare_failed and self.failed() and self.stage in (Stage.EXITS, Stage.DUMPS):
            return False
        self._ask(now)
        return True

    def _ask(self, now: float) -> None:
        self.stage, self._kill_at = Stage.ASKED, now + self.grace
        self.deadline = self._kill_at if self.for_group else now + self.grace / 2

    def postpone_group(self, now: float) -> None:
        """Its children are needed for what it does: they get the signal later."""
        self.deadline = min(self._kill_at, now + _GROUP_LATER)

    def leaves_time_to_group(self, now: float) -> bool:
        """Its process has ended, with others left in its group; whether these have time, after the signal."""
        if self.stage is not Stage.ASKED or now >= self._kill_at:
            return False
        self.stage, self.deadline, self._patience = Stage.GROUP, now + _GROUP_LOOK, now + _GROUP_PATIENCE
        if self._others_wait:
            self._kill_at = min(self._kill_at, self._patience)
        return True

    def patience_is_over(self, now: float) -> bool:
        """Whether those of its group that ignore the signal had their time."""
        return now >= self._patience

    def due(self, now: float, dumped: bool, returned: bool = False) -> list[Act]:
        """
        What is to be done when the deadline is over.

        *dumped* says that the stacks are written to their end, and *returned* that they show a function to be over.
        """
        if self.deadline is None or now < self.deadline:
            return []
        match self.stage:
            case Stage.EXITS | Stage.LAST_RUNS:
                self.stage, self.deadline, self._dump_until = Stage.DUMPS, now + _DUMP_LOOK, now + _DUMP_LIMIT
                return [Act.DUMP]
            case Stage.DUMPS if not dumped and now < self._dump_until:
                self.deadline = now + _DUMP_LOOK
                return []
            case Stage.DUMPS if self.outcome is None and not (returned and self._had_returned):
                return self._run_on(now, returned and self.was_chosen)
            case Stage.DUMPS if self._main_part_ended_well() and not self.was_chosen:
                # Its threads and exit handlers are part of the program, as those of any Python program.
                self.stage, self.deadline = Stage.LINGERS, None
                return [Act.TELL]
            case Stage.DUMPS:
                self.overdue = True
                self._ask(now)
                return [Act.TELL, Act.TERM]
            case Stage.ASKED if now < self._kill_at:
                self.deadline = self._kill_at
                return [Act.ASK_GROUP]
            case Stage.GROUP if now < self._kill_at:
                self.deadline = min(self._kill_at, now + _GROUP_LOOK)
                return [Act.LOOK_AT_GROUP]
            case Stage.GROUP:
                self.deadline = None
                return [Act.END_GROUP]
            case Stage.ASKED:
                self.stage, self.deadline = Stage.KILLED, now + KILL_SECONDS
                return [Act.KILL]
            case Stage.KILLED:
                self.deadline = None
                return [Act.GIVE_UP]
        return []

    def _run_on(self, now: float, had_returned: bool) -> list[Act]:
        """The last one that runs was looked at: whether people are told now, and when it is looked at once more."""
        tell_at = self._others_finished + _TELL_LAST_RUNS_AFTER
        self.stage, self._had_returned = Stage.LAST_RUNS, had_returned
        if had_returned:
            self.deadline = now + self.exit_timeout
        else:
            self.deadline = tell_at if now < tell_at else None
        if self._told_last_runs or (now < tell_at and not had_returned):
            return []
        self._told_last_runs = True
        return [Act.TELL_LAST_RUNS]

    def facts_of_end(self, code: int) -> dict[str, object]:
        """What the launcher is to know of the end of the worker's process, which ended with *code*."""
        return {
            "exitcode": self.exitcode(code),
            "overdue": self.exit_timeout if self.overdue else None,
            "late": code if self.crashed_late(code) else None,
        }

    def exitcode(self, code: int) -> int:
        """
        The worker's exit code, where its process ended with *code*.

        That of its program, if its status was final, or the process ended otherwise only because we ended it.
        """
        if self.is_final:
            return self.status
        if self.outcome is None:
            return code
        if self.overdue and self._main_part_ended_well():
            return code or -signal.SIGTERM  # its own threads or exit handlers were cut off: that is no success
        if self.overdue or (code < 0 and self.stage in _STOPPED):
            return self.status
        return code

    def crashed_late(self, code: int) -> bool:
        """Whether a process that ended with *code* did so by itself, after its status was final."""
        return self.is_final and code != self.status and self.stage not in (Stage.ASKED, Stage.KILLED)
