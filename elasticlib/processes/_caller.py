"""
The program that launches, as its child processes would have it: who it is to the kernel, and how it is set up.

Workers are forked from a process that was started earlier; the program may have changed since. `CallerIdentity` is what
no process gives itself, so that another process has to be started; `Surroundings` is what a worker sets for itself;
`Caller` is both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticlib.processes._identity import CallerIdentity
from elasticlib.processes._surroundings import Surroundings

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Caller:
    """The calling thread at one moment: when a fork server is started, or at a launch."""

    identity: CallerIdentity
    surroundings: Surroundings

    @classmethod
    def now(cls) -> Self:
        """The calling thread as it is."""
        return cls(CallerIdentity.now(), Surroundings.now())

    def can_serve(self, other: Self) -> bool:
        """Whether a process that this one has started may fork what is like a child of the *other* one."""
        return self.identity == other.identity and other.surroundings.can_follow(self.surroundings)
