"""
What a notebook's cell shows of a job: its output, figures and progress bars, and the errors of its workers.

`CallersStream` takes the output of a job that runs beside the cell; `Mark` is how a worker's output
says where a figure or a bar belongs. `render_error` and `render_worker_error` are what IPython shows of an error.
Rules of this package: IPython and its widgets are asked where they are there, and never imported.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.notebook._callers_stream import CallersStream as CallersStream
    from elasticlib.notebook._front_end import (
        Cell as Cell,
        cell_label as cell_label,
        current_cell as current_cell,
        ipython_shell as ipython_shell,
        is_stdout_replaced as is_stdout_replaced,
    )
    from elasticlib.notebook._marks import Mark as Mark, without as without, written as written
    from elasticlib.notebook._tracebacks import render_error as render_error
    from elasticlib.notebook._worker_errors import render_worker_error as render_worker_error, trace_of as trace_of

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.notebook._callers_stream": "CallersStream",
        "elasticlib.notebook._front_end": "Cell cell_label current_cell ipython_shell is_stdout_replaced",
        "elasticlib.notebook._marks": "Mark without written",
        "elasticlib.notebook._tracebacks": "render_error",
        "elasticlib.notebook._worker_errors": "render_worker_error trace_of",
    },
)
