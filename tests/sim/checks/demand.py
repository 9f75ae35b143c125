"""Function by which a check reports a broken rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tests.sim.simulator import InvariantBroken

Demand: TypeAlias = Callable[[bool, str], None]
"""Breaks an invariant unless the first holds; the second says what is wrong then."""
SOON = 1e-6
"""Seconds that sums of times may be off."""


def demand(who: str, holds: bool, what: str) -> None:
    """Raise, unless that *holds*, that *who* does *what*."""
    if not holds:
        raise InvariantBroken(f"{who}: {what}")
