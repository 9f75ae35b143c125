"""
What IPython shows of an error: the user's own lines, and nothing of ours.

Rules of this file: IPython is asked where it is there, and never imported; another version of it costs a name at most.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from elasticlib._stack_text import Frame, is_library

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of our own files, whose frames say nothing to the user."""
_FIRST, _LAST = 1, 3
"""Frames of the user's that are shown of a deep stack, from outside and from inside."""
ELSEWHERE = "worker"
"""``__name__`` in frames that were made after those of another process."""


def shell() -> Any:
    """IPython's; None outside of it."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find() if find is not None else None


def label(file: str) -> str:
    """What IPython calls the cell that is *file*, such as ``Cell In[3]``; empty for any other."""
    try:
        found = shell().compile.format_code_name(file)
        return f"{found[0]} {found[1]}" if found else ""
    except (AttributeError, IndexError, TypeError):
        return ""


def heading(kind: str) -> str:
    """The first line."""
    return f"{kind:<42}Traceback (most recent call last)"


def users_frames(trace: TracebackType | None) -> list[Frame]:
    """The frames of *trace* in this process that are neither ours nor IPython's own."""
    found = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith(OWN) and frame.f_globals.get("__name__") != ELSEWHERE
    ]
    while found and is_library(found[0].file):
        del found[0]
    return found


def stack(frames: Iterable[Frame]) -> list[str]:
    """Two lines for each frame of the user's, one for those of libraries that lie between."""
    parts: list[list[str]] = []
    skipped = 0
    every = [*frames]
    for frame in every:
        if is_library(frame.file) and frame is not every[-1]:
            skipped += 1
            continue
        if skipped:
            parts.append([f"    ... {skipped} frame{'s' * (skipped > 1)} of libraries"])
            skipped = 0
        where = "" if frame.function == "<module>" else f", in {frame.function}"
        source = linecache.getline(frame.file, frame.line).rstrip()
        shown = [f"----> {frame.line} {source}"] if source else []
        parts.append([f"{label(frame.file) or f'File {frame.file}'}, line {frame.line}{where}", *shown])
    if len(parts) > _FIRST + _LAST + 1:
        left_out = len(parts) - _FIRST - _LAST
        parts[_FIRST:-_LAST] = [[f"    ... {left_out} more frames, in print(error)"]]
    return [line for part in parts for line in part]


def rendered(error: BaseException) -> list[str]:
    """The lines for an error of this process."""
    kind = type(error).__name__
    return [heading(kind), *stack(users_frames(error.__traceback__)), f"{kind}: {error}"]
