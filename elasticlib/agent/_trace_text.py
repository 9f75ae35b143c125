"""
The text of an exception, for records that a thread of ours writes while the program goes on.

Rules of this file: nothing here disturbs what other threads do.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any


def trace_of(error: BaseException) -> str:
    """
    What Python prints of *error*, without the markers below a line.

    For those it parses the line, which some versions cannot do in a thread while another one parses code as well
    (CPython issue 106905): then that one fails, in the midst of a program of the user's.
    """
    told = traceback.TracebackException.from_exception(error)
    if sys.version_info >= (3, 11):  # others have no markers
        every: list[Any] = [told]
        for each in every:
            for frame in each.stack:
                frame.colno = frame.end_colno = None
            every += filter(None, (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())))
    return "".join(told.format())
