"""
For tests of jobs: faults as data, and a cluster that is simulated.

Rules of this package: importing it loads neither torch nor hypothesis; `strategies` needs hypothesis, and is
imported by those who have it.
"""

from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.testing._cluster import SimulatedCluster
from elasticlib.testing._faults import (
    Break,
    Cut,
    FailWorker,
    Fault,
    FaultPlan,
    Flap,
    Join,
    Kill,
    Leave,
    Pause,
    PauseStore,
    Replay,
    SetBack,
    Skew,
    Slow,
    Stubborn,
    Suspend,
    Tamper,
    Unseat,
)
from elasticlib.testing._history import (
    AgentStarted,
    Ended,
    Fenced,
    Gone,
    Happened,
    Record,
    Sealed,
    Started,
    Tampered,
    Took,
    Verdict,
)
from elasticlib.testing._invariants import InvariantBroken

__all__ = [
    "AgentStarted",
    "Break",
    "Cut",
    "Ended",
    "FailWorker",
    "Fault",
    "FaultPlan",
    "Fenced",
    "Flap",
    "Gone",
    "Happened",
    "InvariantBroken",
    "Join",
    "Kill",
    "Leave",
    "Pause",
    "PauseStore",
    "Record",
    "Replay",
    "Rules",
    "Sealed",
    "SetBack",
    "SimulatedCluster",
    "Skew",
    "Slow",
    "Started",
    "Stubborn",
    "Suspend",
    "Tamper",
    "Tampered",
    "Took",
    "Unseat",
    "Verdict",
]
