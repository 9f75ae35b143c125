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
    DeleteLeader,
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
)
from elasticlib.testing._history import (
    AgentEnded,
    AgentStarted,
    Ended,
    Fenced,
    Finalized,
    Gone,
    Happened,
    Record,
    Started,
    Tampered,
    TookOver,
)
from elasticlib.testing._invariants import InvariantBroken

__all__ = [
    "AgentEnded",
    "AgentStarted",
    "Break",
    "Cut",
    "DeleteLeader",
    "Ended",
    "FailWorker",
    "Fault",
    "FaultPlan",
    "Fenced",
    "Finalized",
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
    "SetBack",
    "SimulatedCluster",
    "Skew",
    "Slow",
    "Started",
    "Stubborn",
    "Suspend",
    "Tamper",
    "Tampered",
    "TookOver",
]
