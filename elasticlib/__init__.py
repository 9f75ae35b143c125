"""
elasticlib starts, watches, restarts and resizes the workers of a distributed PyTorch job.

    from elasticlib import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=4, max_restarts=3), train)(1e-3)

Importing it loads neither torch nor numpy, and each name only when it is used: the processes that become
workers import this package too and start the sooner for it.
"""

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.agent import ElasticAgent, LocalElasticAgent, SimpleElasticAgent
    from elasticlib.errors import (
        ChildFailedError,
        ConfigError,
        ElasticError,
        EntrypointError,
        InvalidTransitionError,
        LaunchInterrupted,
        LogDirError,
        NodesError,
        PicklingError,
        PreloadError,
        ProcessFailure,
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousNotFoundError,
        RendezvousStateError,
        RendezvousTimeoutError,
        SignalException,
        SpecError,
        StartError,
        TimerError,
        TimerServerError,
        UnknownNameError,
    )
    from elasticlib.launch import elastic_launch, launch_agent
    from elasticlib.logs import DefaultLogsSpecs
    from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std, WorkerSpec
    from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState
    from elasticlib.workers.child._record import record

__version__ = "0.1.0"

__all__ = [
    "ChildFailedError",
    "ConfigError",
    "DefaultLogsSpecs",
    "ElasticAgent",
    "ElasticError",
    "EntrypointError",
    "InvalidTransitionError",
    "LaunchConfig",
    "LaunchInterrupted",
    "LocalElasticAgent",
    "LogDirError",
    "LogsDest",
    "LogsSpecs",
    "NodesError",
    "PicklingError",
    "PreloadError",
    "ProcessFailure",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousNotFoundError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "SpecError",
    "StartError",
    "Std",
    "TimerError",
    "TimerServerError",
    "UnknownNameError",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "elastic_launch",
    "launch_agent",
    "record",
]

_MODULES = {
    "elasticlib.agent": (
        "ElasticAgent",
        "LocalElasticAgent",
        "SimpleElasticAgent",
    ),
    "elasticlib.errors": (
        "ChildFailedError",
        "ConfigError",
        "ElasticError",
        "EntrypointError",
        "InvalidTransitionError",
        "LaunchInterrupted",
        "LogDirError",
        "NodesError",
        "PicklingError",
        "PreloadError",
        "ProcessFailure",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousGracefulExitError",
        "RendezvousNotFoundError",
        "RendezvousStateError",
        "RendezvousTimeoutError",
        "SignalException",
        "SpecError",
        "StartError",
        "TimerError",
        "TimerServerError",
        "UnknownNameError",
    ),
    "elasticlib.launch": (
        "elastic_launch",
        "launch_agent",
    ),
    "elasticlib.logs": ("DefaultLogsSpecs",),
    "elasticlib.spec": (
        "LaunchConfig",
        "LogsDest",
        "LogsSpecs",
        "Std",
        "WorkerSpec",
    ),
    "elasticlib.state": (
        "RunResult",
        "Worker",
        "WorkerGroup",
        "WorkerState",
    ),
    "elasticlib.workers.child._record": ("record",),
}
__getattr__, __dir__ = _lazy.names(__name__, _MODULES)
