"""
What happened to processes of ours, beside the launcher and its workers.

Rules of this file: a record holds facts; its text is made from them, here, and names the process.
"""

from __future__ import annotations

import logging

from attrs import frozen

from elasticlib._wording import duration
from elasticlib.records._sinks import Record


@frozen
class HelperLost(Record, level=logging.WARNING):
    """A process of ours was lost before workers ran, and is started again."""

    why: str

    def __str__(self) -> str:
        return f"{self.why}; no worker had begun, so it is started again"


@frozen
class HelperWoken(Record, level=logging.WARNING):
    """A process of ours had been stopped while its workers ran, and was continued."""

    helper: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.helper} was stopped (SIGSTOP?) for {duration(self.seconds)} while no worker was: it is continued"


@frozen
class HelperHeld(Record, level=logging.WARNING):
    """A debugger holds a process of ours."""

    helper: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.helper} has been held by a debugger for {duration(self.seconds)}: the job waits for it"


@frozen
class HelperReplaced(Record, level=logging.ERROR):
    """A process of ours stood still and was killed, so that another one takes its place."""

    why: str

    def __str__(self) -> str:
        return self.why


@frozen
class SpawnerKilled(Record, level=logging.ERROR):
    """The process that starts and stops the workers did not answer, and was killed with all of them."""

    seconds: float

    def __str__(self) -> str:
        return (
            f"the process that stops the workers does not answer, {self.seconds:g} s after they should have been gone: "
            "it was killed, and they with it (stopped from outside, or held by a debugger?)"
        )
