"""
Worker processes of this machine: started, watched and ended together.

`start_processes` is the way in for programs without an agent. This package is the launcher's side; `spawner` is what
runs between launcher and workers, `child` what runs in a worker. It knows local ranks only, nothing of rounds between
nodes; whatever a context starts ends with this program (a `SubprocessHandler` by itself is a plain child, as torch's).
"""

from typing import TYPE_CHECKING

from elasticlib import _lazy

if TYPE_CHECKING:
    from elasticlib.errors import (
        ProcessFailure as ProcessFailure,
        SignalException as SignalException,
    )
    from elasticlib.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from elasticlib.spec import (
        LogsDest as LogsDest,
        LogsSpecs as LogsSpecs,
        Std as Std,
        to_map as to_map,
    )
    from elasticlib.workers._context import (
        MultiprocessContext as MultiprocessContext,
        PContext as PContext,
        RunProcsResult as RunProcsResult,
        SubprocessContext as SubprocessContext,
        start_processes as start_processes,
    )

# Only when they are used: an agent needs other parts of this package, at each start of a launch.
__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.errors": "ProcessFailure SignalException",
        "elasticlib.logs": "DefaultLogsSpecs",
        "elasticlib.spec": "LogsDest LogsSpecs Std to_map",
        "elasticlib.workers._context": "MultiprocessContext PContext RunProcsResult SubprocessContext start_processes",
    },
)
