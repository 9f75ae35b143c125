"""
Text of an error in IPython, with the user's own frames and without elasticlib's.

Rules of this file: of a deep stack it shows the outermost frame and the innermost ones; ``print(error)``
shows all.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from elasticlib._wording import counted
from elasticlib.notebook._front_end import cell_label
from elasticlib.stacks import Frame, is_users, users_frames

_FIRST, _LAST = 1, 3
"""Numbers of the outermost and the innermost user frames that are shown of a deep stack."""


def traceback_heading(kind: str) -> str:
    """Return the first line of a traceback."""
    return f"{kind:<42}Traceback (most recent call last)"


def traceback_lines(frames: Iterable[Frame]) -> list[str]:
    """Return two lines for each of the user's frames, and one for the frames of libraries between them."""
    parts: list[list[str]] = []
    skipped = 0
    every = [*frames]
    for frame in every:
        # The innermost frame raised the error, so it is shown even if it is a library's.
        is_shown = is_users(frame.file) or frame is every[-1]
        if not is_shown:
            skipped += 1
            continue
        if skipped:
            parts.append([f"    ... {counted(skipped, 'frame')} of libraries"])
            skipped = 0
        parts.append(_frame_lines(frame))

    # A single frame too many is shown: the line in its place would save almost nothing.
    if len(parts) > _FIRST + _LAST + 1:
        left_out = len(parts) - _FIRST - _LAST
        parts[_FIRST:-_LAST] = [[f"    ... {left_out} more frames: print(error) shows them"]]

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
    """Return the lines that IPython shows for an error of this process."""
    kind = type(error).__name__
    return [traceback_heading(kind), *traceback_lines(users_frames(error.__traceback__)), f"{kind}: {error}"]
