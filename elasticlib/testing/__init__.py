"""
For tests of distributed code: suites of unittest whose tests run on ranks, and a cluster that is simulated.

Rules of this package: importing it loads neither torch nor hypothesis nor pytest; `strategies` needs hypothesis, and
is imported by those who have it. `ranks` is what tests on ranks are made of, for pytest and for unittest.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.rendezvous.coordinator._state import Rules as Rules
    from elasticlib.testing._case import ElasticTestCase as ElasticTestCase
    from elasticlib.testing._cluster import SimulatedCluster as SimulatedCluster
    from elasticlib.testing._faults import (
        Break as Break,
        Cut as Cut,
        DeleteLeader as DeleteLeader,
        FailWorker as FailWorker,
        Fault as Fault,
        FaultPlan as FaultPlan,
        Flap as Flap,
        Join as Join,
        Kill as Kill,
        Leave as Leave,
        Pause as Pause,
        PauseStore as PauseStore,
        Replay as Replay,
        SetBack as SetBack,
        Skew as Skew,
        Slow as Slow,
        Stubborn as Stubborn,
        Suspend as Suspend,
        Tamper as Tamper,
    )
    from elasticlib.testing._history import (
        AgentEnded as AgentEnded,
        AgentStarted as AgentStarted,
        Ended as Ended,
        Fenced as Fenced,
        Finalized as Finalized,
        Gone as Gone,
        Happened as Happened,
        Record as Record,
        Started as Started,
        Tampered as Tampered,
        TookOver as TookOver,
    )
    from elasticlib.testing._invariants import InvariantBroken as InvariantBroken
    from elasticlib.testing.ranks._failed import (
        DirtyWorkerWarning as DirtyWorkerWarning,
        RanksFailed as RanksFailed,
    )
    from elasticlib.testing.torch_cases._warm import warm_torch_cases as warm_torch_cases

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.rendezvous.coordinator._state": "Rules",
        "elasticlib.testing._case": "ElasticTestCase",
        "elasticlib.testing._cluster": "SimulatedCluster",
        "elasticlib.testing._faults": (
            "Break Cut DeleteLeader FailWorker Fault FaultPlan Flap Join Kill Leave Pause PauseStore Replay SetBack "
            "Skew Slow Stubborn Suspend Tamper"
        ),
        "elasticlib.testing._history": (
            "AgentEnded AgentStarted Ended Fenced Finalized Gone Happened Record Started Tampered TookOver"
        ),
        "elasticlib.testing._invariants": "InvariantBroken",
        "elasticlib.testing.torch_cases._warm": "warm_torch_cases",
        "elasticlib.testing.ranks._failed": "DirtyWorkerWarning RanksFailed",
    },
)
