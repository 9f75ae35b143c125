"""
Text that IPython shows of an error: the user's own lines, and nothing of ours.

Rules of this file: of a deep stack the outermost frame and the innermost ones are shown; ``print(error)`` has all.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from elasticlib._wording import counted
from elasticlib.notebook._front_end import cell_label
from elasticlib.stacks import Frame, is_users, users_frames

_FIRST, _LAST = 1, 3
"""Frames of the user's that are shown of a deep stack, from outside and from inside."""


def traceback_heading(kind: str) -> str:
    """Return the first line of a traceback."""
    return f"{kind:<42}Traceback (most recent call last)"


def traceback_lines(frames: Iterable[Frame]) -> list[str]:
    """Return two lines for each frame of the user's, one for those of libraries that lie between."""
    parts: list[list[str]] = []
    skipped = 0
    every = [*frames]
    for frame in every:
        # The innermost frame is where it happened, also in a library.
        is_shown = is_users(frame.file) or frame is every[-1]
        if not is_shown:
            skipped += 1
            continue
        if skipped:
            parts.append([f"    ... {counted(skipped, 'frame')} of libraries"])
            skipped = 0
        parts.append(_frame_lines(frame))
    if len(parts) > _FIRST + _LAST + 1:
        left_out = len(parts) - _FIRST - _LAST
        parts[_FIRST:-_LAST] = [[f"    ... {left_out} more frames, in print(error)"]]
    return [line for part in parts for line in part]


def _frame_lines(frame: Frame) -> list[str]:
    place = cell_label(frame.file) or f"File {frame.file}"
    where = "" if frame.function == "<module>" else f", in {frame.function}"
    lines = [f"{place}, line {frame.line}{where}"]
    source = linecache.getline(frame.file, frame.line).rstrip()
    if source:
        lines.append(f"----> {frame.line} {source}")
    return lines


def render_error(error: BaseException) -> list[str]:
    """Return the lines that IPython shows of an error of this process."""
    kind = type(error).__name__
    return [traceback_heading(kind), *traceback_lines(users_frames(error.__traceback__)), f"{kind}: {error}"]
