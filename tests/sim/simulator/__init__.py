"""
A simulator of jobs of many nodes: the real decisions of the rendezvous on simulated machines, in simulated time.

Its plans of faults are those of `elasticlib.testing`. It cannot run a user's code: simulated workers work for a while,
and end.

Rules of this package: a test imports from here what it asks a job for, and what it finds in its history; from the
modules only what it replaces or looks into. `strategies` needs hypothesis, and is imported by those who have it.
"""

from __future__ import annotations

from elasticlib.rendezvous.coordinator._state import Rules
from tests.sim.simulator.cluster import SimulatedCluster
from tests.sim.simulator.history import (
    AgentEnded,
    AgentStarted,
    Ended,
    Fenced,
    Finalized,
    Happened,
    Record,
    Started,
    Tampered,
    TookOver,
    WorkersEnded,
)
from tests.sim.simulator.invariants import InvariantBroken

__all__ = [
    "AgentEnded",
    "AgentStarted",
    "Ended",
    "Fenced",
    "Finalized",
    "Happened",
    "InvariantBroken",
    "Record",
    "Rules",
    "SimulatedCluster",
    "Started",
    "Tampered",
    "TookOver",
    "WorkersEnded",
]
