"""
What IPython shows of an error: the user's own lines, and nothing of ours.

Rules of this file: IPython is asked where it is there, and never imported; another version of it costs a name at most.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from typing import Any

from elasticlib._wording import counted
from elasticlib.stacks import Frame, is_users, users_frames

_FIRST, _LAST = 1, 3
"""Frames of the user's that are shown of a deep stack, from outside and from inside."""


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


def stack(frames: Iterable[Frame]) -> list[str]:
    """Two lines for each frame of the user's, one for those of libraries that lie between."""
    parts: list[list[str]] = []
    skipped = 0
    every = [*frames]
    for frame in every:
        if not is_users(frame.file) and frame is not every[-1]:
            skipped += 1
            continue
        if skipped:
            parts.append([f"    ... {counted(skipped, 'frame')} of libraries"])
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
