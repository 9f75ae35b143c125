"""
Where in the user's code a worker was, by the text of a traceback or of the fault handler's stacks.

Rules of this file: pure; text that is no traceback has no frames.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)', re.MULTILINE)
_CRASH_FRAME = re.compile(r'^ +File "([^"\n]+)", line (\d+),? in (\S+)', re.MULTILINE)
_TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.MULTILINE)
_CRASH = re.compile(r"^(?:Current thread|Thread) [^\n]*\(most recent call first\):", re.MULTILINE)
_PARTS = re.compile(r"^ +\+-\+--", re.MULTILINE)
_LIBRARY = re.compile(
    rf"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/python\d|^{re.escape(os.path.dirname(__file__))}/"
)
"""Files that are not the user's."""


@dataclass(frozen=True)
class Frame:
    """A frame of a worker's stack."""

    file: str
    line: int
    function: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Its local variables, as text: of what is not Python's own the class, of tensors the shape."""


def place_of(traceback: str) -> str:
    """File and line of the innermost frame of the user's own, as far as a traceback tells; empty without one."""
    if _CRASH.search(traceback) is not None:
        frames = [(frame.file, str(frame.line)) for frame in crash_frames(traceback)]
    else:
        # Of a chain the last one ended the worker; what a group holds comes after its own frames.
        last = list(_TRACEBACK.finditer(traceback))[-1:]
        frames = _FRAME.findall(_PARTS.split(traceback[last[0].end() :])[0]) if last else []
    own = [(file, line) for file, line in frames if not _LIBRARY.search(file)]
    if not frames:
        return ""
    file, line = (own or frames)[-1]
    return " ".join(f"{os.path.basename(file)}:{line}".split())


def crash_frames(traceback: str) -> tuple[Frame, ...]:
    """The stack of the thread that crashed, the innermost frame last; none where *traceback* is of an exception."""
    threads = list(_CRASH.finditer(traceback))
    if not threads:
        return ()
    # Where all threads are told, the newest comes first: the one that crashed is said to be the current one.
    crash = next((each for each in threads if each[0].startswith("Current")), threads[0])
    stack = re.split(r"\n\s*\n", traceback[crash.end() :])[0]
    found = [Frame(file, int(line), name) for file, line, name in _CRASH_FRAME.findall(stack)]
    return tuple(reversed(found))  # the fault handler begins with the innermost


def is_library(file: str) -> bool:
    """Whether the code of *file* is not the user's own."""
    return _LIBRARY.search(file) is not None
