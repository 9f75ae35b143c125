"""
Checks of helpers: the kernel's report on each, and questions to those that can answer.

Rules of this file: it decides nothing (`_helper_liveness` decides), and it waits for nothing. A
process id is used only while the handle says that its process lives.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from attrs import define, field, frozen

from elasticlib import records
from elasticlib._clock import Clock, monotonic
from elasticlib.helpers._helper_liveness import LOOK, STOPPED, AwakeTime, HelperAction, HelperLook, Liveness
from elasticlib.processes import is_paused, process_facts

_CPU_TICKS = slice(11, 13)
"""Time in user and system mode, in ``/proc/PID/stat`` from the state letter on."""


class Signalled(Protocol):
    """Interface of a process that a watch can check."""

    @property
    def pid(self) -> int: ...

    @property
    def send(self) -> Callable[[int], object]: ...

    def ends(self, limit: float) -> bool:
        """Return True if it has ended, or ends within *limit* seconds."""


@frozen
class Reported:
    """A process that another one holds, which reports its end and forwards signals."""

    pid: int
    send: Callable[[int], object]

    def ends(self, limit: float) -> bool:
        """Return False: the process that holds it reports the end."""
        return False


@define(eq=False)
class Helper:
    """A helper process, and its record."""

    name: str
    process: Signalled
    ask: Callable[[int], object] | None = None
    """Function that asks it a numbered question; None if it answers none."""
    is_needed: bool = True
    """False if no job waits for its work: then it is woken, and never replaced."""
    questions: int = 0
    answered: int = 0
    liveness: Liveness = field(factory=Liveness)

    def __str__(self) -> str:
        return f"the {self.name} process (pid {self.process.pid})"

    def may_be(self, act: HelperAction) -> bool:
        """Return True if *act* is useful: a helper that no job needs is not replaced."""
        return self.is_needed or act is not HelperAction.REPLACE

    def request_answer(self) -> None:
        """Ask it for a sign of life, if it can give one."""
        if self.ask is not None:
            self.questions += 1
            self.ask(self.questions)


@frozen
class Finding:
    """Action that a helper needs, and the seconds for which it has stood still."""

    helper: Helper
    act: HelperAction
    seconds: float

    @property
    def why(self) -> str:
        """Reason for its replacement."""
        what = "was stopped" if self.helper.liveness.stopped else "did not answer"
        return f"{self.helper} {what} for {self.seconds:.0f} s and was killed"


@define(eq=False)
class HelperWatch:
    """Checks helpers every `LOOK` seconds."""

    sink: records.Sink
    clock: Clock = monotonic
    _awake: AwakeTime = field(factory=AwakeTime)

    def due_in(self) -> float:
        """Return the seconds until the next look."""
        return 0.0 if self._awake.last is None else max(0.0, self._awake.last + LOOK - self.clock())

    def tend(
        self,
        helpers: Callable[[], Iterable[Helper]],
        workers: Collection[int],
        replace: Callable[[Helper, str], object],
    ) -> float:
        """
        Look at *helpers* if it is time, and wake or *replace* those that stand still; return
        `due_in`.
        """
        if self.due_in() == 0.0:
            for found in self.look(helpers(), workers):
                self._act_on(found, replace)
        return self.due_in()

    def _act_on(self, found: Finding, replace: Callable[[Helper, str], object]) -> None:
        match found.act:
            case HelperAction.WAKE:
                found.helper.process.send(signal.SIGCONT)
                self.sink(records.HelperWoken(str(found.helper), found.seconds))
            case HelperAction.REPORT_DEBUGGER:
                self.sink(records.HelperHeld(str(found.helper), found.seconds))
            case HelperAction.REPLACE:
                self.sink(records.HelperReplaced(found.why))
                replace(found.helper, found.why)

    def look(self, helpers: Iterable[Helper], workers: Collection[int]) -> list[Finding]:
        """
        Return the actions that *helpers* need; *workers* are the process ids of the running
        workers.
        """
        self._awake, passed = self._awake.look(self.clock())
        living = _look_at_all(helpers)

        # Workers are checked only if a helper has stopped: they may be many.
        has_stopped = any(look.state == STOPPED for _, look in living)
        alone = has_stopped and not any(map(is_paused, workers))
        found = []
        for helper, look in living:
            helper.liveness, act = helper.liveness.step(look, passed, alone)
            if act is not None and helper.may_be(act):
                now = helper.liveness
                found.append(Finding(helper, act, max(now.stopped, now.traced, now.silent)))

        return found


def _look_at_all(helpers: Iterable[Helper]) -> list[tuple[Helper, HelperLook]]:
    """Look at *helpers*, and leave out those that have ended."""
    found = []
    for helper in helpers:
        look = _look(helper)
        if look is not None:
            found.append((helper, look))
    return found


def _look(helper: Helper) -> HelperLook | None:
    """
    Look at *helper*, and ask it for a sign of life unless it still owes one; None if it has
    ended.
    """
    pid = helper.process.pid
    facts = process_facts(pid)
    if facts is None:
        return None

    owes = helper.questions != helper.answered

    # Only a helper that owes an answer can count as silent.
    turns = _turns(pid, facts) if owes else 0

    # The handle is asked last: until then the number was the helper's own.
    if helper.process.ends(0.0):
        return None

    state = facts[0].decode()

    # A stopped helper cannot answer before it is woken.
    if state != STOPPED and not owes:
        helper.request_answer()
    return HelperLook(state, turns, owes)


def _turns(pid: int, facts: list[bytes]) -> int:
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            # The third number counts how often it got a CPU.
            return int(file.read().split()[2])
    except (OSError, IndexError, ValueError):
        # Without the kernel's count of turns: ticks of CPU time.
        return sum(map(int, facts[_CPU_TICKS]))


def first_child(pid: int) -> int:
    """
    Return the oldest child of process *pid*, which has one thread; 0 if it has none, or this user
    may not look.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError):
        return 0
