"""
Worker processes of this machine: started, watched and ended together.

`start_processes` is the entry for programs without an agent. An agent calls `prepare_workers`
once for each launch, and starts and stops each round with `Processes`. `Signals` and its kin turn
signals into requests to a launch.

This package is the launcher's side. `spawner` runs between launcher and workers, `child` runs in
a worker. The package knows local ranks only, not the rounds between nodes. All processes of a
context end with this program; only a `SubprocessHandler` alone is a plain child, like torch's.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.errors import ProcessFailure as ProcessFailure, SignalException as SignalException
    from elasticlib.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from elasticlib.spec import LogsDest as LogsDest, LogsSpecs as LogsSpecs, Std as Std, to_map as to_map
    from elasticlib.workers._context import (
        MultiprocessContext as MultiprocessContext,
        PContext as PContext,
        RunProcsResult as RunProcsResult,
        SubprocessContext as SubprocessContext,
        start_processes as start_processes,
    )
    from elasticlib.workers._devices import (
        default_numa_options as default_numa_options,
        workers_per_node as workers_per_node,
    )
    from elasticlib.workers._environment import (
        CUDA_DEVICES_VARIABLE as CUDA_DEVICES_VARIABLE,
        HIP_DEVICES_VARIABLE as HIP_DEVICES_VARIABLE,
        THREADS_VARIABLE as THREADS_VARIABLE,
        NodePlace as NodePlace,
        changed_variables as changed_variables,
        threads_per_worker as threads_per_worker,
        without_secrets as without_secrets,
        worker_variables as worker_variables,
    )
    from elasticlib.workers._failure import (
        failure_of as failure_of,
        original_exception as original_exception,
        return_values as return_values,
    )
    from elasticlib.workers._fork_servers import ForkServer as ForkServer, fork_servers as fork_servers
    from elasticlib.workers._launch_events import Exit as Exit, WorkerNow as WorkerNow
    from elasticlib.workers._machine import gpu_count as gpu_count, gpu_names as gpu_names
    from elasticlib.workers._packing import pack_call as pack_call
    from elasticlib.workers._plan import (
        Preparation as Preparation,
        check_call as check_call,
        check_function as check_function,
        ignoring as ignoring,
        prepare_workers as prepare_workers,
        serving_caller as serving_caller,
        shown_by_caller as shown_by_caller,
        with_descriptors as with_descriptors,
        without_keyboard as without_keyboard,
    )
    from elasticlib.workers._processes import Processes as Processes
    from elasticlib.workers._signals import (
        NOTICES as NOTICES,
        DeferredSignals as DeferredSignals,
        HandledSignals as HandledSignals,
        Inbox as Inbox,
        NoticeReceived as NoticeReceived,
        Signals as Signals,
        StacksRequest as StacksRequest,
        StopRequest as StopRequest,
        end_signals as end_signals,
        interruption as interruption,
        parse_signals as parse_signals,
        survive_notices as survive_notices,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.errors": "ProcessFailure SignalException",
        "elasticlib.logs": "DefaultLogsSpecs",
        "elasticlib.spec": "LogsDest LogsSpecs Std to_map",
        "elasticlib.workers._context": (
            "MultiprocessContext PContext RunProcsResult SubprocessContext start_processes"
        ),
        "elasticlib.workers._devices": "default_numa_options workers_per_node",
        "elasticlib.workers._environment": (
            "CUDA_DEVICES_VARIABLE HIP_DEVICES_VARIABLE NodePlace THREADS_VARIABLE changed_variables "
            "threads_per_worker without_secrets worker_variables"
        ),
        "elasticlib.workers._failure": "failure_of original_exception return_values",
        "elasticlib.workers._fork_servers": "ForkServer fork_servers",
        "elasticlib.workers._launch_events": "Exit WorkerNow",
        "elasticlib.workers._machine": "gpu_count gpu_names",
        "elasticlib.workers._packing": "pack_call",
        "elasticlib.workers._plan": (
            "Preparation check_call check_function ignoring prepare_workers serving_caller shown_by_caller "
            "with_descriptors without_keyboard"
        ),
        "elasticlib.workers._processes": "Processes",
        "elasticlib.workers._signals": (
            "DeferredSignals HandledSignals Inbox NOTICES NoticeReceived Signals StacksRequest StopRequest "
            "end_signals interruption parse_signals survive_notices"
        ),
    },
)
