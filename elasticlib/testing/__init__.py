"""
Tools for testing distributed code: unittest classes whose tests run on ranks, and fault plans.

Rules of this package: importing it loads neither torch nor hypothesis nor pytest. `ranks` runs
tests on ranks, both for pytest and for unittest.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.testing._case import ElasticTestCase as ElasticTestCase
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
    from elasticlib.testing.ranks._failed import DirtyWorkerWarning as DirtyWorkerWarning, RanksFailed as RanksFailed
    from elasticlib.testing.torch_cases._warm import warm_torch_cases as warm_torch_cases

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.testing._case": "ElasticTestCase",
        "elasticlib.testing._faults": (
            "Break Cut DeleteLeader FailWorker Fault FaultPlan Flap Join Kill Leave Pause PauseStore Replay "
            "SetBack Skew Slow Stubborn Suspend Tamper"
        ),
        "elasticlib.testing.ranks._failed": "DirtyWorkerWarning RanksFailed",
        "elasticlib.testing.torch_cases._warm": "warm_torch_cases",
    },
)
