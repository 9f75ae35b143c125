"""
What a simulated cluster is made of: what may be asked for, and what is refused.

Rules of this file: each value is checked by itself, and named with its rule.
"""

from __future__ import annotations

import math
from typing import Protocol

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.testing._faults import FaultPlan

NO_FAULTS = FaultPlan(())
COORDINATORS = ("fixed", "elected")


class Asked(Protocol):
    """What a cluster was asked for."""

    coordinator: str
    work: float


def check(asked: Asked) -> None:
    """Raise a `ConfigError` for what breaks its rule."""
    for name, kind in (("rules", Rules), ("plan", FaultPlan)):
        if not isinstance(value := getattr(asked, name), kind):
            raise ConfigError(f"{name}={value!r:.80}: give {kind.__name__}(...)")
    if asked.coordinator not in COORDINATORS:
        raise ConfigError(f"coordinator={asked.coordinator!r}: give one of {', '.join(COORDINATORS)}")
    for name in ("nodes", "slots"):
        value = getattr(asked, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r:.80}: give a whole number, 1 or more")
    if isinstance(asked.work, bool) or not isinstance(asked.work, (int, float)) or not 0 <= asked.work < math.inf:
        raise ConfigError(f"work={asked.work!r:.80}: give a number of seconds, 0 or more")
