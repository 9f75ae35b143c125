"""
Records about helper processes: sidecar, reaper, fork server and spawner.

Rules of this file: a record has facts, and its class makes the text from them. The text names the
process.
"""

from __future__ import annotations

import logging

from attrs import frozen

from elasticlib._wording import duration
from elasticlib.records._sinks import Record


@frozen
class HelperLost(Record, level=logging.WARNING):
    """Loss of a helper before workers ran; it is started again."""

    why: str

    def __str__(self) -> str:
        return f"{self.why}; no worker had started, so it is restarted"


@frozen
class HelperWoken(Record, level=logging.WARNING):
    """Stopped helper, whose workers ran, and which was continued."""

    helper: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.helper} was stopped (SIGSTOP?) for {duration(self.seconds)} while no worker was: the "
            "launcher continues it"
        )


@frozen
class HelperHeld(Record, level=logging.WARNING):
    """Helper that a debugger holds."""

    helper: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.helper} has been paused by a debugger for {duration(self.seconds)}: the job waits for it"


@frozen
class HelperReplaced(Record, level=logging.ERROR):
    """Unresponsive helper, which was killed and is replaced."""

    why: str

    def __str__(self) -> str:
        return self.why


@frozen
class SpawnerKilled(Record, level=logging.ERROR):
    """Unresponsive spawner, which was killed with all its workers."""

    seconds: float

    def __str__(self) -> str:
        return (
            f"the process that ends the workers does not answer, {self.seconds:g} s after the workers should "
            "have been gone: that process and all workers were killed (was it suspended, or paused by a debugger?)"
        )
