"""
elasticlib starts, watches, restarts and resizes the workers of a distributed PyTorch job.

    from elasticlib import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=4, max_restarts=3), train)(1e-3)

Importing it loads neither torch nor numpy.
"""

from elasticlib.agent import ElasticAgent, LocalElasticAgent, SimpleElasticAgent
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ElasticError,
    EntrypointError,
    LaunchInterrupted,
    LogDirError,
    PicklingError,
    PreloadError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    SignalException,
    SpecError,
    StartError,
)
from elasticlib.launch import elastic_launch, launch_agent
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std, WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState
from elasticlib.workers.record import record

__version__ = "0.1.0"

__all__ = [
    "ChildFailedError",
    "ConfigError",
    "DefaultLogsSpecs",
    "ElasticAgent",
    "ElasticError",
    "EntrypointError",
    "LaunchConfig",
    "LaunchInterrupted",
    "LocalElasticAgent",
    "LogDirError",
    "LogsDest",
    "LogsSpecs",
    "PicklingError",
    "PreloadError",
    "ProcessFailure",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "SpecError",
    "StartError",
    "Std",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "elastic_launch",
    "launch_agent",
    "record",
]
