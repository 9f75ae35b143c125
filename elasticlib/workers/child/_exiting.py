"""
The course of a worker from its program's outcome to its process's end: the time limits, and the
steps after them.

Once a program has raised, returned or ended, its process may live on. Other threads work, exit
handlers run, finalizers or native calls do not return. From the outcome on, which the worker
announces, it has its *exit timeout*. Then the stacks of its threads are requested, and it is
stopped with the same steps as every other. A function that returned first waits for those of the
other local ranks.

    RUNS --outcome--> EXITS --exit timeout--> DUMPS --stacks written--> SIGNALLED --grace--> KILLED --limit--> given up
      |                                         |                        ^    |
      |                                         |                        |    +-- it ends, its group does not --> GROUP
      |                                         +-- a program that ended well, no timeout set --> LINGERS
      +------------------------------ the round is being stopped --------+
      |
      +-- a function returned --> WAITS --all others returned or ended--> EXITS
      |
      +-- all others ended well --> LAST_RUNS --some time--> DUMPS --stacks written--> LAST_RUNS
                                                               +-- its function had returned --exit timeout--> SIGNALLED

In SIGNALLED the signal goes to the worker alone, and to its group after half of the grace.

The last running worker may be at work, such as on a checkpoint: the launcher only reports where
it is. But a function may hang before anything is announced, in the destructor of a process group
in a local variable. A timeout that the user set ends it only if its stacks show that twice.

Rules of this file: time is an argument. PURE: it sends and reads nothing.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

from elasticlib.processes import KILL_SECONDS
from elasticlib.workers.child._announcing import ProgramOutcome

DEFAULT_EXIT_TIMEOUT = 30.0
"""Seconds from a program's outcome to the end of its process, by default."""
_REPORT_LAST_RUNS_AFTER = 30.0
"""Seconds until the launcher reports where the last running worker is."""
_DUMP_LIMIT = 3.0
"""Seconds within which the stacks of all threads must be written."""
_DUMP_LOOK = 0.01
_GROUP_LOOK = 0.02
"""Seconds between two looks at the group of a worker that has ended."""
_GROUP_LATER = 1.0
"""Seconds by which the signal to a group is delayed while its worker writes."""
_GROUP_PATIENCE = 1.0
"""Seconds for processes of a group that ignore the signal, and for all if others wait."""
_MAIN_PARTS = (ProgramOutcome.RETURNED, ProgramOutcome.ENDED)
"""Outcomes after which threads and exit handlers of the program may still work."""


class Stage(enum.Enum):
    """The stage of a worker's process on its way to its end."""

    RUNS = enum.auto()
    LAST_RUNS = enum.auto()
    """It runs, and all others have finished well."""
    WAITS = enum.auto()
    """Its function has returned, and it waits for those of the other local ranks."""
    EXITS = enum.auto()
    DUMPS = enum.auto()
    LINGERS = enum.auto()
    """Its program ended well, and its process has no time limit."""
    SIGNALLED = enum.auto()
    """It was sent the stop signal."""
    GROUP = enum.auto()
    """
    It ended by that signal, and the processes that it started in its group have the rest of its
    time.
    """
    KILLED = enum.auto()


_STOPPED = (Stage.SIGNALLED, Stage.GROUP, Stage.KILLED)


class ExitAction(enum.Enum):
    """An action that a worker needs."""

    DUMP = enum.auto()
    """Ask for the stacks of its threads."""
    REPORT_OVERDUE = enum.auto()
    """Report to the launcher that it did not end in time."""
    REPORT_LAST_RUNS = enum.auto()
    """Report to the launcher that it still runs, though all others have finished."""
    TERM = enum.auto()
    SIGNAL_GROUP = enum.auto()
    """Send the stop signal to its group, too."""
    LOOK_AT_GROUP = enum.auto()
    """Check the group of a worker that has ended for remaining processes."""
    END_GROUP = enum.auto()
    """Kill the remaining processes of the group."""
    KILL = enum.auto()
    GIVE_UP = enum.auto()
    """Not even SIGKILL ended it."""


@dataclass
class _LastRun:
    """The last running worker, once all others have finished well."""

    others_finished: float = 0.0
    had_returned: bool = False
    """True if its function had returned at the last look, though that is not announced."""
    was_reported: bool = False

    def next_look(self, now: float, exit_timeout: float) -> float | None:
        """Return the time of the next look at it; None for none."""
        if self.had_returned:
            return now + exit_timeout
        report_at = self.others_finished + _REPORT_LAST_RUNS_AFTER
        if now < report_at:
            return report_at
        return None

    def must_be_reported(self, now: float) -> bool:
        """
        Return True once, after some time; at once if it has returned, because it may be stopped
        then.
        """
        if self.was_reported:
            return False
        is_early = now < self.others_finished + _REPORT_LAST_RUNS_AFTER
        if is_early and not self.had_returned:
            return False
        self.was_reported = True
        return True


@dataclass
class AnnouncedOutcome:
    """Outcome of a worker's program, as far as the worker has announced it."""

    outcome: ProgramOutcome | None = None
    status: int = 0
    """Exit status of the program, if it is known; ``-n`` for signal ``n``."""
    is_final: bool = False
    """True if the process cannot change the status any more."""

    def failed(self) -> bool:
        """Return True if the program is known to have failed."""
        return self.outcome is not None and self.status != 0

    def ended_well(self) -> bool:
        """Return True if the program is known to have ended well."""
        return self.outcome is not None and self.status == 0

    def main_part_ended_well(self) -> bool:
        """
        Return True if the function or script ended well; its threads and exit handlers may still
        work.
        """
        return self.outcome in _MAIN_PARTS and self.status == 0

    def note(self, outcome: ProgramOutcome, status: int) -> bool:
        """
        Note an announcement; return True for the first outcome, and for a later failure of exit
        handlers or threads.
        """
        if outcome is ProgramOutcome.FINAL:
            # A failure in its last moments is reported with its end, which is near.
            self.is_final, self.status = True, status
            return False

        is_late = outcome is ProgramOutcome.CLOSING and self.main_part_ended_well()
        counts = self.outcome is None or is_late
        if counts:
            self.outcome, self.status = outcome, status
        return counts

    def exitcode(self, code: int, *, is_overdue: bool, was_killed: bool) -> int:
        """
        Return the worker's exit code for a process that ended with *code*.

        It is that of its program, if its status was final, or if only the stop changed the
        process's status. *is_overdue*: it was stopped because it did not end in time.
        *was_killed*: a signal of the stop ended it.
        """
        if self.is_final:
            return self.status
        if self.outcome is None:
            return code
        if is_overdue and self.main_part_ended_well():
            # Its own threads or exit handlers were cut off: that is not a success.
            return code or -signal.SIGTERM
        # Otherwise its own later end counts, such as a crash in an exit handler.
        return self.status if is_overdue or was_killed else code


@dataclass
class _StopTimes:
    """Times of a worker that is being stopped, and of the processes in its group."""

    grace: float = KILL_SECONDS
    """Seconds from the stop signal to SIGKILL."""
    kill_at: float = 0.0
    """Time when SIGKILL follows the stop signal."""
    patience_until: float = 0.0
    """Time until which processes of its group that ignore the signal may still end."""
    others_wait: bool = False
    """True if a restart, or the nodes of a failed job, wait for the end of all."""

    def begin(self, now: float) -> None:
        """Note that the worker gets the stop signal."""
        self.kill_at = now + self.grace

    def shorten(self, grace: float, now: float) -> None:
        """Leave at most *grace* seconds until SIGKILL."""
        self.kill_at = min(self.kill_at, now + grace)

    def begin_group(self, now: float) -> None:
        """Note that the worker has ended, and the rest of its time is that of its group."""
        self.patience_until = now + _GROUP_PATIENCE
        if self.others_wait:
            self.kill_at = min(self.kill_at, self.patience_until)


@dataclass
class ExitCourse:
    """Course of one worker to its end: its stage, and when the next action is due."""

    exit_timeout: float = DEFAULT_EXIT_TIMEOUT
    """Seconds from the outcome of its program to the end of its process."""
    was_chosen: bool = False
    """True if the user set that time: then it also applies to programs that ended well."""
    for_group: bool = False
    """True if stop signals go to its whole group at once."""
    stage: Stage = Stage.RUNS
    program: AnnouncedOutcome = field(default_factory=AnnouncedOutcome)
    deadline: float | None = None
    """Time when `due` has the next action; None: it waits for an event."""
    overdue: bool = False
    """True if it was stopped because its process did not end in time."""
    was_waiting: bool = False
    """
    True if it waited for other local ranks when the stop began: once released, it ends without a
    signal.
    """
    _last_run: _LastRun = field(default_factory=_LastRun)
    _dump_until: float = 0.0
    _times: _StopTimes = field(default_factory=_StopTimes)

    # Events of the worker and of the others.

    def announced(self, outcome: ProgramOutcome, status: int, now: float) -> bool:
        """
        Process an announcement; return True if it reports a failure that the launcher does not
        know yet.
        """
        if not self.program.note(outcome, status):
            return False

        # Its end is near, and reports the failure.
        if self.stage in _STOPPED:
            return False

        has_returned = outcome is ProgramOutcome.RETURNED and status == 0
        if has_returned:
            self.stage, self.deadline = Stage.WAITS, None
        else:
            self._exit(now)
        return status != 0

    def waits(self) -> bool:
        """Return True if it waits for other local ranks."""
        return self.stage is Stage.WAITS

    def release(self, now: float) -> None:
        """Note that it does not wait for other ranks any more."""
        if self.waits():
            self._exit(now)

    def _exit(self, now: float) -> None:
        self.stage = Stage.EXITS
        self.deadline = now + self.exit_timeout

    def note_others_finished(self, now: float, is_function: bool) -> None:
        """Note that all others have finished well."""
        if self.stage is not Stage.RUNS:
            return

        self.stage = Stage.LAST_RUNS
        self._last_run.others_finished = now
        wait = _REPORT_LAST_RUNS_AFTER
        # A function may have returned, too: that is checked before the report.
        if is_function and self.was_chosen:
            wait = min(wait, self.exit_timeout)
        self.deadline = now + wait

    def time_of_last_runs(self, now: float) -> tuple[float, float | None]:
        """
        Return the seconds since all others have finished, and the seconds left (None: no limit).
        """
        left = self.exit_timeout if self._last_run.had_returned else None
        return now - self._last_run.others_finished, left

    # The stop.

    def stop(self, grace: float, now: float, spare_failed: bool) -> bool:
        """
        Stop the worker with its round; return True if it must be signalled.

        With *spare_failed* a worker whose program failed keeps the time for its exit handlers.
        """
        if self.stage is Stage.KILLED:
            # No signal is stronger than SIGKILL, and its own deadline is running.
            return False

        if self.stage is Stage.GROUP:
            self._times.shorten(grace, now)
            self.deadline = now
            return False

        self._times.grace, self._times.others_wait = grace, spare_failed
        self.was_waiting |= self.waits()
        if spare_failed and self._exits_after_failure():
            return False

        self._signal(now)
        return True

    def _exits_after_failure(self) -> bool:
        return self.program.failed() and self.stage in (Stage.EXITS, Stage.DUMPS)

    def _signal(self, now: float) -> None:
        self.stage = Stage.SIGNALLED
        self._times.begin(now)
        # Its group gets the signal at once, or after half of the grace.
        self.deadline = self._times.kill_at if self.for_group else now + self._times.grace / 2

    def postpone_group(self, now: float) -> None:
        """Delay the signal to its children: it needs them for its present work."""
        self.deadline = min(self._times.kill_at, now + _GROUP_LATER)

    def leaves_time_to_group(self, now: float) -> bool:
        """
        Note that its process has ended before its group; return True if the group has time left.
        """
        if self.stage is not Stage.SIGNALLED or now >= self._times.kill_at:
            return False
        self.stage = Stage.GROUP
        self.deadline = now + _GROUP_LOOK
        self._times.begin_group(now)
        return True

    def patience_is_over(self, now: float) -> bool:
        """Return True if the processes of its group that ignore the signal had their time."""
        return now >= self._times.patience_until

    # Actions, once the deadline is over.

    def due(self, now: float, dumped: bool, returned: bool = False) -> list[ExitAction]:
        """
        Return the actions that are due once the deadline is over.

        *dumped*: the stacks are completely written. *returned*: they show that a function is
        over.
        """
        if self.deadline is None or now < self.deadline:
            return []

        match self.stage:
            case Stage.EXITS | Stage.LAST_RUNS:
                return self._begin_dump(now)
            case Stage.DUMPS:
                return self._await_dump(now, dumped, returned)
            case Stage.SIGNALLED:
                return self._after_signal(now)
            case Stage.GROUP:
                return self._look_at_group(now)
            case Stage.KILLED:
                self.deadline = None
                return [ExitAction.GIVE_UP]
            case _:
                # A worker that runs, waits or lingers has no deadline.
                return []

    def _begin_dump(self, now: float) -> list[ExitAction]:
        self.stage = Stage.DUMPS
        self.deadline = now + _DUMP_LOOK
        self._dump_until = now + _DUMP_LIMIT
        return [ExitAction.DUMP]

    def _await_dump(self, now: float, dumped: bool, returned: bool) -> list[ExitAction]:
        waits_for_stacks = not dumped and now < self._dump_until
        if waits_for_stacks:
            self.deadline = now + _DUMP_LOOK
            return []
        return self._after_dump(now, returned)

    def _after_dump(self, now: float, returned: bool) -> list[ExitAction]:
        if self.program.outcome is None:
            return self._after_dump_of_last(now, returned)
        if self.program.main_part_ended_well() and not self.was_chosen:
            return self._linger()
        return self._end_overdue(now)

    def _after_dump_of_last(self, now: float, returned: bool) -> list[ExitAction]:
        # Stacks may happen to show a function that is about to end: only two in a row count.
        hangs_at_end = returned and self._last_run.had_returned
        if hangs_at_end:
            return self._end_overdue(now)

        self.stage = Stage.LAST_RUNS
        self._last_run.had_returned = returned and self.was_chosen
        self.deadline = self._last_run.next_look(now, self.exit_timeout)
        if self._last_run.must_be_reported(now):
            return [ExitAction.REPORT_LAST_RUNS]
        return []

    def _linger(self) -> list[ExitAction]:
        # Its threads and exit handlers are part of the program, like those of any Python program.
        self.stage, self.deadline = Stage.LINGERS, None
        return [ExitAction.REPORT_OVERDUE]

    def _end_overdue(self, now: float) -> list[ExitAction]:
        self.overdue = True
        self._signal(now)
        return [ExitAction.REPORT_OVERDUE, ExitAction.TERM]

    def _after_signal(self, now: float) -> list[ExitAction]:
        # The first deadline is that of the group's signal.
        if now < self._times.kill_at:
            self.deadline = self._times.kill_at
            return [ExitAction.SIGNAL_GROUP]

        self.stage = Stage.KILLED
        self.deadline = now + KILL_SECONDS
        return [ExitAction.KILL]

    def _look_at_group(self, now: float) -> list[ExitAction]:
        if now < self._times.kill_at:
            self.deadline = min(self._times.kill_at, now + _GROUP_LOOK)
            return [ExitAction.LOOK_AT_GROUP]
        self.deadline = None
        return [ExitAction.END_GROUP]

    # The end of the process.

    def facts_of_end(self, code: int) -> dict[str, object]:
        """Return the facts for the launcher on the end of the process, which ended with *code*."""
        return {
            "exitcode": self.exitcode(code),
            "overdue": self.exit_timeout if self.overdue else None,
            "late": code if self.crashed_late(code) else None,
        }

    def exitcode(self, code: int) -> int:
        """Return the worker's exit code for a process that ended with *code*."""
        was_killed = code < 0 and self.stage in _STOPPED
        return self.program.exitcode(code, is_overdue=self.overdue, was_killed=was_killed)

    def crashed_late(self, code: int) -> bool:
        """
        Return True if a process that ended with *code* crashed after its status was final,
        without a stop.
        """
        was_stopped = self.stage in (Stage.SIGNALLED, Stage.KILLED)
        return self.program.is_final and code != self.program.status and not was_stopped
