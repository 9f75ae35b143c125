"""
Launches as objects: a `Job` watches, awaits and stops a launch that runs in the background.

`Results` and `JobStatus` hold its outcome and its state. `JobLogs` keeps its output in files.
`combined_error` makes the exception that a launch raises for a worker's exception, and `uncaught_hook`
leaves frames of this library out of uncaught errors.

Rules of this package: one thread runs a job. Requests to the job go to its inbox, and events of the
job arrive as records. This package makes no decisions about workers.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.job._control import (
        RunningLaunch as RunningLaunch,
        ask_to_stop as ask_to_stop,
        controlled as controlled,
        running_launches as running_launches,
        wait_for_end as wait_for_end,
    )
    from elasticlib.job._end_watch import (
        AnnouncedEnd as AnnouncedEnd,
        Source as Source,
        end_watch as end_watch,
        source_of as source_of,
    )
    from elasticlib.job._job import Job as Job
    from elasticlib.job._output import (
        JobLogs as JobLogs,
        announce_log_folder as announce_log_folder,
        own_logs as own_logs,
        remove_logs as remove_logs,
        shown_ranks as shown_ranks,
        shows_errors_in_cell as shows_errors_in_cell,
        warn_of_ranks as warn_of_ranks,
        warn_of_shown_ranks as warn_of_shown_ranks,
    )
    from elasticlib.job._raising import combined_error as combined_error, uncaught_hook as uncaught_hook
    from elasticlib.job._register import GPU_SHARES as GPU_SHARES, jobs as jobs
    from elasticlib.job._results import Place as Place, Results as Results
    from elasticlib.job._status import (
        ENDED_STATES as ENDED_STATES,
        JobCourse as JobCourse,
        JobStatus as JobStatus,
        RankStatus as RankStatus,
        Stacks as Stacks,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.job._control": "RunningLaunch ask_to_stop controlled running_launches wait_for_end",
        "elasticlib.job._end_watch": "AnnouncedEnd Source end_watch source_of",
        "elasticlib.job._job": "Job",
        "elasticlib.job._output": (
            "JobLogs announce_log_folder own_logs remove_logs shown_ranks shows_errors_in_cell warn_of_ranks "
            "warn_of_shown_ranks"
        ),
        "elasticlib.job._raising": "combined_error uncaught_hook",
        "elasticlib.job._register": "GPU_SHARES jobs",
        "elasticlib.job._results": "Place Results",
        "elasticlib.job._status": "ENDED_STATES JobCourse JobStatus RankStatus Stacks",
    },
)
