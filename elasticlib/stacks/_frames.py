"""
Frames of stacks: the user's own among them, and frames from the text of a traceback or of CPython's fault handler.

Rules of this file: pure. The location of a file decides if it is the user's or a library's. Python and
elasticlib count as libraries. Shown tracebacks keep the frames of libraries between the user's, but no
frame of elasticlib.
"""

from __future__ import annotations

import os
import re
import traceback
import types
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


# Frames from text. Text that is not a traceback has no frames. CPython does not guarantee the format of
# tracebacks and of the fault handler's stacks: all knowledge of them is below.

_TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.MULTILINE)
_RAISED_IN = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)', re.MULTILINE)
"""A frame of a traceback."""
_PARTS = re.compile(r"^ +\+-\+--", re.MULTILINE)
"""The line before the exceptions of a group."""
_HEADING = re.compile(
    r"^(?P<kind>Current thread|Thread) (?P<identity>0x[0-9a-f]+)?[^\n]*\(most recent call first\):$", re.MULTILINE
)
"""The first line of a thread's stack, as the fault handler writes it."""
_CURRENT = "Current thread (most recent call first):"
_FRAME = re.compile(r'^ +File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<function>\S+)', re.MULTILINE)
"""A frame below such a heading."""


@dataclass(frozen=True)
class Thread:
    """A thread in the fault handler's stacks."""

    identity: int | None
    """Number, as `threading.get_ident` returns it; None if the heading has none."""
    is_current: bool
    """True for the thread that crashed, or that requested the stacks."""
    frames: tuple[Frame, ...]
    """Frames, the innermost first."""
    text: str
    """Complete text of the fault handler for this thread."""


def with_heading(stack: str) -> str:
    """Return the text of a fault handler that wrote one thread only, as that of the current one."""
    return stack.replace("Stack (most recent call first):", _CURRENT, 1)


def stack_text(frame: types.FrameType | None) -> str:
    """Return the stack that ends in *frame* as the fault handler writes the current thread's."""
    lines = [_CURRENT]
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, ""])


def threads_of(stacks: str) -> tuple[Thread, ...]:
    """Return the threads of a fault handler's *stacks*, in its order: the newest first, the main thread last."""
    headings = list(_HEADING.finditer(stacks))
    ends = [*(each.start() for each in headings), len(stacks)][1:]
    return tuple(_thread(heading, stacks[heading.start() : end]) for heading, end in zip(headings, ends, strict=False))


def _thread(heading: re.Match[str], text: str) -> Thread:
    identity = int(heading["identity"], 16) if heading["identity"] else None
    is_current = heading["kind"] == "Current thread"
    return Thread(identity, is_current, _frames_below(text[len(heading[0]) :]), text)


def _frames_below(text: str) -> tuple[Frame, ...]:
    # Text after an empty line does not belong to this thread.
    stack = re.split(r"\n\s*\n", text)[0]
    return tuple(map(_frame, _FRAME.finditer(stack)))


def _frame(found: re.Match[str]) -> Frame:
    return Frame(found["file"], int(found["line"]), found["function"])


def crash_frames(stacks: str) -> tuple[Frame, ...]:
    """Return the stack of the thread that crashed, the innermost frame last; () for the traceback of an exception."""
    threads = threads_of(stacks)
    if not threads:
        return ()
    # If all threads are written, the newest comes first, and the current one has crashed.
    crashed = next((each for each in threads if each.is_current), threads[0])
    return tuple(reversed(crashed.frames))


def place_of(traceback: str) -> str:
    """Return ``file:line`` of the user's innermost frame in *traceback*, else of the innermost; "" without frames."""
    if is_of_threads(traceback):
        places = [(frame.file, frame.line) for frame in crash_frames(traceback)]
    else:
        places = _raised_in(traceback)
    if not places:
        return ""
    users = [place for place in places if is_users(place[0])]
    file, line = (users or places)[-1]
    return " ".join(f"{os.path.basename(file)}:{line}".split())


def _raised_in(traceback: str) -> list[tuple[str, int]]:
    """Return file and line of each frame of the exception that ended the program, the innermost last."""
    tracebacks = list(_TRACEBACK.finditer(traceback))
    if not tracebacks:
        return []
    # In a chain of exceptions, the last one ended the worker.
    last = traceback[tracebacks[-1].end() :]
    # The exceptions of a group come after the group's own frames.
    without_parts = _PARTS.split(last)[0]
    return [(file, int(line)) for file, line in _RAISED_IN.findall(without_parts)]


def is_of_threads(text: str) -> bool:
    """Return True for stacks of a fault handler, False for the traceback of an exception."""
    return _HEADING.search(text) is not None


def is_heading(line: str) -> bool:
    """Return True for the line that begins a thread in a fault handler's stacks."""
    return _HEADING.match(line) is not None


def frame_of(line: str) -> Frame | None:
    """Return the frame on this *line* of a fault handler's stacks; None for any other line."""
    found = _FRAME.match(line)
    return None if found is None else _frame(found)
