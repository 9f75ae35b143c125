"""What a `Job` carries out: nothing of how a launch does so is known to it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from elasticlib.job._job import Job


class Work(Protocol):
    """A launch that was checked, and can be carried out once."""

    title: str
    signums: tuple[signal.Signals, ...]
    grace: float
    quit_shows_stacks: bool
    """Whether SIGQUIT shows the stacks of all workers; not where its user asked for it to stop them."""

    @property
    def folder(self) -> str:
        """Where the job's own output is kept after its success; empty where it is the caller's or gone."""

    def __call__(self, job: Job, /) -> dict[int, Any]:
        """Run the workers to their end; their results."""

    def abandon(self) -> None:
        """It will not be carried out: let go of what it holds."""
