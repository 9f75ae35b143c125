"""
Display of a job in a notebook's cell: output, figures, progress bars, and errors of workers.

`CallersStream` writes a job's output to the cell. A `Mark` in a worker's output gives the place of a
figure or a bar. `render_error` and `render_worker_error` make the lines that IPython shows of an error.

Rules of this package: it uses IPython and its widgets if they are loaded, and never imports them.
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
