"""
The code of a worker's process: from its birth in the fork server to the end of its program.

`StartSpec` is a worker's order. `read_report` and its kin read the files that a worker leaves.
`pack_result` and `pack_exception` pickle its results. `serve_calls` is the work of a pool's
worker, which sends messages to the launcher during a call with `ask_caller` and `notify_caller`.

Rules of this package: the standard library and elasticlib only.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.workers.child._by_value import Pickler as Pickler
    from elasticlib.workers.child._loaded import (
        file_of_module as file_of_module,
        is_module as is_module,
        names_of_class as names_of_class,
        names_of_module as names_of_module,
    )
    from elasticlib.workers.child._own_modules import folders_before as folders_before, hidden_by as hidden_by
    from elasticlib.workers.child._pooled import (
        CALLS_MEMORY as CALLS_MEMORY,
        ask_caller as ask_caller,
        is_worker_variable as is_worker_variable,
        notify_caller as notify_caller,
        release_peers as release_peers,
        serve_calls as serve_calls,
    )
    from elasticlib.workers.child._randomness import reseed_caller as reseed_caller
    from elasticlib.workers.child._record import (
        SERVER_VARIABLE as SERVER_VARIABLE,
        write_error_file as write_error_file,
    )
    from elasticlib.workers.child._report import (
        Report as Report,
        is_secondary as is_secondary,
        qualified_name as qualified_name,
        read_report as read_report,
        report_of_exception as report_of_exception,
        text_of_exception as text_of_exception,
    )
    from elasticlib.workers.child._result_pickles import (
        can_be_pickled as can_be_pickled,
        exception_members as exception_members,
        pack_exception as pack_exception,
        pack_result as pack_result,
        set_exception_members as set_exception_members,
        unpack_exception as unpack_exception,
    )
    from elasticlib.workers.child._should_stop import StopBoard as StopBoard
    from elasticlib.workers.child._showing import DISPLAYED_SUFFIX as DISPLAYED_SUFFIX
    from elasticlib.workers.child._start_spec import StartSpec as StartSpec
    from elasticlib.workers.child._threads import set_blas_threads as set_blas_threads

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.workers.child._by_value": "Pickler",
        "elasticlib.workers.child._loaded": "file_of_module is_module names_of_class names_of_module",
        "elasticlib.workers.child._own_modules": "folders_before hidden_by",
        "elasticlib.workers.child._pooled": (
            "CALLS_MEMORY ask_caller is_worker_variable release_peers serve_calls notify_caller"
        ),
        "elasticlib.workers.child._randomness": "reseed_caller",
        "elasticlib.workers.child._record": "SERVER_VARIABLE write_error_file",
        "elasticlib.workers.child._report": (
            "Report is_secondary qualified_name read_report report_of_exception text_of_exception"
        ),
        "elasticlib.workers.child._result_pickles": (
            "can_be_pickled exception_members pack_exception pack_result set_exception_members unpack_exception"
        ),
        "elasticlib.workers.child._should_stop": "StopBoard",
        "elasticlib.workers.child._showing": "DISPLAYED_SUFFIX",
        "elasticlib.workers.child._start_spec": "StartSpec",
        "elasticlib.workers.child._threads": "set_blas_threads",
    },
)
