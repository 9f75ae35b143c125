"""
Worker processes of this machine: started, watched and ended together.

`start_processes` is the way in for programs without an agent. This package is the launcher's side; `spawner` is what
runs between launcher and workers, `child` what runs in a worker. It knows local ranks only, nothing of rounds between
nodes; whatever a context starts ends with this program (a `SubprocessHandler` by itself is a plain child, as torch's).
"""

from typing import TYPE_CHECKING

from elasticlib import _lazy

if TYPE_CHECKING:
    from elasticlib.errors import ProcessFailure, SignalException
    from elasticlib.logs import DefaultLogsSpecs
    from elasticlib.spec import LogsDest, LogsSpecs, Std, to_map
    from elasticlib.workers._context import (
        MultiprocessContext,
        PContext,
        RunProcsResult,
        SubprocessContext,
        start_processes,
    )

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

# Only when they are used: an agent needs other parts of this package, at each start of a launch.
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "elasticlib.errors": ("ProcessFailure", "SignalException"),
        "elasticlib.logs": ("DefaultLogsSpecs",),
        "elasticlib.workers._context": (
            "MultiprocessContext",
            "PContext",
            "RunProcsResult",
            "SubprocessContext",
            "start_processes",
        ),
        "elasticlib.spec": ("LogsDest", "LogsSpecs", "Std", "to_map"),
    },
)
