"""
Errors of workers in a notebook: frames of the cell, frames of the worker, then the other ranks.

Rules of this file: a debugger can enter the frames of a worker; their variables are text.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.notebook._front_end import ipython_shell
from elasticlib.notebook._tracebacks import traceback_heading, traceback_lines
from elasticlib.stacks import ELSEWHERE, Frame, crash_frames, ranks_text, users_frames

_LONGEST_LINE = 300
"""Maximum number of characters of a line of a worker's message."""
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
"""Python's words between the parts of a traceback."""


def trace_of(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback to raise *error* with: *trace*, or in IPython the worker's frames."""
    if not isinstance(error, ChildFailedError) or ipython_shell() is None:
        return trace
    _, failure = error.get_first_failure()
    return entered(failure.frames)


class _VariableText(str):
    """Text of a worker's variable, which a debugger shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def entered(frames: Iterable[Frame]) -> TracebackType | None:
    """Return a traceback with *frames*, the innermost last; None without frames."""
    found: TracebackType | None = None
    for frame in reversed([*frames]):
        # The empty lines put the code on the worker's line, which a debugger then shows.
        code = compile("\n" * (frame.line - 1) + "raise _Worker", frame.file, "exec").replace(co_name=frame.function)
        variables: dict[str, Any] = {name: _VariableText(text) for name, text in frame.variables.items()}
        scope = {**variables, "_Worker": _Elsewhere, "__name__": ELSEWHERE}

        # Python makes frames only for code that runs, and a traceback only by raising.
        try:
            exec(code, scope)
        except _Elsewhere as error:
            here = error.__traceback__
            assert here is not None and here.tb_next is not None
            # A debugger lists the variables of the frame, and the worker did not have these two.
            del scope["_Worker"], scope["__builtins__"]
            found = TracebackType(found, here.tb_next.tb_frame, here.tb_next.tb_lasti, frame.line)

    return found


class _Elsewhere(Exception):  # noqa: N818 - nobody sees it
    """Exception that is raised to make a frame."""


def render_worker_error(error: ChildFailedError) -> list[str]:
    """Return the lines that a notebook shows: the cell's frames, the worker's, then the other ranks."""
    rank, failure = error.get_first_failure()
    kind = failure.exception_type or "ChildFailedError"
    lines = [traceback_heading(kind), *traceback_lines(users_frames(error.__traceback__))]
    if not failure.process:
        frames = failure.frames or crash_frames(failure.traceback)
        lines += [f"in the worker of {_place(error, rank)}:", *traceback_lines(frames)]

    return [*lines, *_message(failure), *_others(error, rank)]


def _place(error: ChildFailedError, rank: int) -> str:
    item = getattr(error, "_elastic_item", None)
    return f"rank {rank}" if item is None else f"rank {rank}, at item {item}"


def _message(failure: ProcessFailure) -> list[str]:
    if not failure.exception_type:
        # The process was killed, or it is a program of another language: its last lines may say why.
        summary = failure.summary(with_place=False)
        hint = [failure.hint] if failure.hint not in summary else []
        return [summary, *hint, *failure.log_tail[-3:]]

    every = failure.message.splitlines() or [failure.exception_type]
    lines = [_shortened(line) for line in every]
    return _first_lines(lines, f"... {len(lines) - 3} more lines: print(error) shows them") + _cause(failure.traceback)


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ... (print(error) shows all)"


def _cause(traceback: str) -> list[str]:
    """Return a line with the cause of the worker's exception; [] if it has none."""
    before, _, _ = traceback.rpartition(_CAUSED)
    line = before.rstrip().rpartition("\n")[2].strip()
    return [f"raised from {line[:_LONGEST_LINE]}"] if line else []


def _others(error: ChildFailedError, root: int) -> list[str]:
    """Return lines about the other ranks, one for each distinct failure, without ranks that only lost a peer."""
    alike: dict[str, list[int]] = {}
    first = error.failures[root]
    own = first.summary(with_place=False)
    for rank, failure in sorted(error.failures.items()):
        is_consequence = failure.secondary and not first.secondary
        if rank == root or is_consequence:
            continue
        summary = failure.summary(with_place=False)
        text = "the same" if summary == own else summary
        alike.setdefault(text, []).append(rank)

    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in alike.items()]
    count = sum(map(len, alike.values()))
    return _first_lines(lines, f"... and {count} ranks in all: error.failures")


def _first_lines(lines: list[str], rest: str) -> list[str]:
    """Return *lines*, of more than four only the first three and *rest*, which stands for the others."""
    return lines if len(lines) <= 4 else [*lines[:3], rest]
