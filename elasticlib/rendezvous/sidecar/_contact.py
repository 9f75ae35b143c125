"""
The contact of a launcher with its sidecar: whether it answers, and the deadline for that. Pure.

    starting --first answer--> answering --no answer in time--> silent --answer--> answering

Rules of this file: times are this machine's monotonic seconds. A sidecar that starts may take the
whole join time, as importing torch from a cold disk does. One that has begun answers within a share
of the heartbeat time. A silent one has the job's reconnect time to answer again.
"""

from __future__ import annotations

from attrs import define, frozen

FIRST_REPORT = 5.0
"""
Seconds after which a starting process is first reported; later reports come after twice the time
before.
"""


@frozen
class ContactLimits:
    """Time limits of a sidecar in seconds."""

    birth: float
    """Time for the start."""
    answer: float | None
    """Time between two answers; None if none is expected."""
    reconnect: float
    """Seconds to answer again, once it was found to be silent."""


@define
class SidecarContact:
    """Times and state of the contact with one sidecar."""

    limits: ContactLimits
    born: float
    """Time of its start."""
    answered_at: float
    """Time of its last answer."""
    begun: bool = False
    """True if it has imported all that it needs."""
    silent_since: float | None = None
    """Time at which it was found to be silent, and the agent got the notice."""
    _report_after: float = FIRST_REPORT

    @property
    def is_silent(self) -> bool:
        """True if it was found to be silent, and has not answered since."""
        return self.silent_since is not None

    def note_answer(self, now: float, *, begins: bool) -> None:
        """Note an answer; *begins*: it shows that the sidecar has begun."""
        # Any answer ends a silence: the process may only have been stopped for a while.
        self.answered_at = now
        self.silent_since = None
        self.begun = self.begun or begins

    def find_silent(self, now: float) -> None:
        """Note that no answer came in time."""
        self.silent_since = now

    def deadline(self) -> float | None:
        """Return the time by which it must answer; None if no answer is expected."""
        if self.silent_since is not None:
            return self.silent_since + self.limits.reconnect
        if not self.begun:
            # Its import may wait for a cold disk: no other node has been asked for anything yet.
            return self.answered_at + self.limits.birth
        if self.limits.answer is None:
            return None
        return self.answered_at + self.limits.answer

    def wake_at(self) -> float | None:
        """Return the time of the next check, if no answer arrives before."""
        deadline = self.deadline()
        if deadline is None or self.begun or self.is_silent:
            return deadline
        # People should read about the start before its time is over.
        return min(deadline, self.born + self._report_after)

    def report_of_birth(self, now: float) -> float | None:
        """Return the seconds since the start, if it is time to report them again."""
        waited = now - self.born
        if self.begun or waited < self._report_after:
            return None
        # Ever more rarely: a start that takes minutes needs no line every five seconds.
        self._report_after = 2 * waited
        return waited
