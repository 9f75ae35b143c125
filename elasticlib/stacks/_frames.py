"""
Selection of the user's own frames in a stack.

Rules of this file: the location of a file decides if it is the user's or a library's. Python and
elasticlib count as libraries. Shown tracebacks keep the frames of libraries between the user's, but no
frame of elasticlib.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType

_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_LIBRARY = re.compile(rf"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/python\d|^{re.escape(_OURS)}")
_LAUNCHERS = re.compile(rf"{re.escape(_OURS)}workers/|.*/multiprocessing/(process|popen_fork|context)\.py$|<string>$")
CALLERS: set[str] = set()
"""Files whose functions call the user's functions: users do not need their frames. Each file adds its own name."""
ELSEWHERE = "worker"
"""``__name__`` in frames that were rebuilt from those of another process."""


@dataclass(frozen=True)
class Frame:
    """A frame of a worker's stack."""

    file: str
    line: int
    function: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Local variables as text: values of Python's own types, the shape of tensors, else the class."""


def is_users(file: str) -> bool:
    """Return True unless *file* belongs to Python, an installed library or elasticlib."""
    return _LIBRARY.search(file) is None


def is_ours(file: str) -> bool:
    """Return True for the files of this package."""
    return file.startswith(_OURS)


def is_launcher(file: str) -> bool:
    """Return True for the files that start a worker; their frames are the outermost of its stacks."""
    return _LAUNCHERS.match(file) is not None


def users_frames(trace: TracebackType | None) -> list[Frame]:
    """
    Return the frames of *trace*, in this process, from the user's first frame on, without elasticlib's.

    Frames of libraries after the user's first frame stay. IPython's own frames come before it.
    """
    found = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if not _is_ours_or_elsewhere(frame)
    ]
    while found and not is_users(found[0].file):
        del found[0]
    return found


def _is_ours_or_elsewhere(frame: FrameType) -> bool:
    return is_ours(frame.f_code.co_filename) or frame.f_globals.get("__name__") == ELSEWHERE


def users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame to the last frame whose file is not in `CALLERS`."""
    first = error.__traceback__
    while first is not None and _is_caller(first):
        first = first.tb_next
    last = each = first
    while each is not None:
        if not _is_caller(each):
            last = each
        each = each.tb_next

    if last is not None:
        last.tb_next = None
    return first


def _is_caller(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename in CALLERS
