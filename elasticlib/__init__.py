"""
elasticlib starts, watches, restarts and resizes the workers of a distributed PyTorch job.

    from elasticlib import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=4, max_restarts=3), train)(1e-3)

The import loads neither torch nor numpy, and each name is loaded at its first use. Worker processes
import this package too, and so they start faster.

PYTEST_DONT_REWRITE: a rank that runs pytest imports this package before pytest, which would warn
that it cannot rewrite it.
"""

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.agent import (
        ElasticAgent as ElasticAgent,
        LocalElasticAgent as LocalElasticAgent,
        SimpleElasticAgent as SimpleElasticAgent,
    )
    from elasticlib.errors import (
        ChildFailedError as ChildFailedError,
        ConfigError as ConfigError,
        ElasticError as ElasticError,
        EntrypointError as EntrypointError,
        InvalidTransitionError as InvalidTransitionError,
        JobRunsError as JobRunsError,
        LaunchInterrupted as LaunchInterrupted,
        LogDirError as LogDirError,
        NodesError as NodesError,
        PicklingError as PicklingError,
        PoolError as PoolError,
        PreemptedError as PreemptedError,
        PreloadError as PreloadError,
        ProcessFailure as ProcessFailure,
        RendezvousClosedError as RendezvousClosedError,
        RendezvousConnectionError as RendezvousConnectionError,
        RendezvousError as RendezvousError,
        RendezvousGracefulExitError as RendezvousGracefulExitError,
        RendezvousNotFoundError as RendezvousNotFoundError,
        RendezvousStateError as RendezvousStateError,
        RendezvousTimeoutError as RendezvousTimeoutError,
        SignalException as SignalException,
        SpecError as SpecError,
        StartError as StartError,
        TimerError as TimerError,
        TimerServerError as TimerServerError,
        UnknownNameError as UnknownNameError,
    )
    from elasticlib.job import (
        Job as Job,
        JobStatus as JobStatus,
        Place as Place,
        RankStatus as RankStatus,
        Results as Results,
        Stacks as Stacks,
        jobs as jobs,
    )
    from elasticlib.launch import (
        elastic_launch as elastic_launch,
        launch_agent as launch_agent,
    )
    from elasticlib.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from elasticlib.pools import Pool as Pool, pool as pool
    from elasticlib.spec import (
        LaunchConfig as LaunchConfig,
        LogsDest as LogsDest,
        LogsSpecs as LogsSpecs,
        Std as Std,
        WorkerSpec as WorkerSpec,
    )
    from elasticlib.state import (
        RunResult as RunResult,
        Worker as Worker,
        WorkerGroup as WorkerGroup,
        WorkerState as WorkerState,
    )
    from elasticlib.workers.child._record import record as record
    from elasticlib.workers.child._should_stop import Stop as Stop, should_stop as should_stop
    from elasticlib.workers.child._worker_progress import progress as progress

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.agent": "ElasticAgent LocalElasticAgent SimpleElasticAgent",
        "elasticlib.errors": (
            "ChildFailedError ConfigError ElasticError EntrypointError InvalidTransitionError JobRunsError "
            "LaunchInterrupted LogDirError NodesError PicklingError PoolError PreemptedError PreloadError "
            "ProcessFailure RendezvousClosedError RendezvousConnectionError RendezvousError "
            "RendezvousGracefulExitError RendezvousNotFoundError RendezvousStateError RendezvousTimeoutError "
            "SignalException SpecError StartError TimerError TimerServerError UnknownNameError"
        ),
        "elasticlib.job": "Job JobStatus Place RankStatus Results Stacks jobs",
        "elasticlib.launch": "elastic_launch launch_agent",
        "elasticlib.logs": "DefaultLogsSpecs",
        "elasticlib.pools": "Pool pool",
        "elasticlib.spec": "LaunchConfig LogsDest LogsSpecs Std WorkerSpec",
        "elasticlib.state": "RunResult Worker WorkerGroup WorkerState",
        "elasticlib.workers.child._should_stop": "Stop should_stop",
        "elasticlib.workers.child._worker_progress": "progress",
        "elasticlib.workers.child._record": "record",
    },
)
