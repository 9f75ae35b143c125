"""
A debugger in a rank, at pytest's terminal, for ``breakpoint()`` and for failures with ``--pdb``.

Rules of this file: one rank has the terminal at a time. Another rank that reaches a breakpoint then
prints a line and continues, because the first one may wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from elasticlib.testing.ranks._rank_call import RankCall
from elasticlib.workers.child import ask_caller


class _Terminal:
    """Debugger at pytest's terminal, while this rank has it."""

    def __init__(self) -> None:
        self.debugger: pdb.Pdb | None = None
        self._stack = contextlib.ExitStack()

    def open(self) -> pdb.Pdb | None:
        """Return a debugger at the terminal; None if another rank has it, or if there is none."""
        if self.debugger is not None:
            return self.debugger

        answer = ask_caller({"wants": "terminal"})
        if answer is None or not answer[0].get("has"):
            print(f"rank {os.environ['RANK']} does not stop here: another rank is in the debugger", file=sys.stderr)
            return None

        stdin, stdout = (
            self._stack.enter_context(_stream(each, mode)) for each, mode in zip(answer[1], "rw", strict=True)
        )
        # With `nosigint` pdb leaves the worker's handler of SIGINT as it is.
        self.debugger = pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True)
        self.debugger.prompt = f"(Pdb rank {os.environ['RANK']}) "
        self.debugger.use_rawinput = False
        return self.debugger

    def say(self, text: str) -> None:
        assert self.debugger is not None
        self.debugger.stdout.write(text)
        self.debugger.stdout.flush()

    def close(self) -> None:
        if self.debugger is not None:
            self.debugger = None
            self._stack.close()
            ask_caller({"wants": "no terminal"})


def _stream(descriptor: int, mode: str) -> Any:
    return open(descriptor, mode, errors="replace", buffering=1, closefd=True)


_terminal = _Terminal()


@contextlib.contextmanager
def offered(call: RankCall) -> Iterator[None]:
    """Let ``breakpoint()`` open a debugger at pytest's terminal within the block."""
    former = sys.breakpointhook

    # The user may have chosen another debugger, by the variable or by one that follows children.
    if os.environ.get("PYTHONBREAKPOINT") in (None, "") and former is sys.__breakpointhook__:
        sys.breakpointhook = _stop
    try:
        yield
    finally:
        sys.breakpointhook = former
        # The debugger would trace the next test too.
        sys.settrace(None) if _terminal.debugger is not None else None
        _terminal.close()


def _stop(*_: Any, **__: Any) -> None:
    frame: FrameType | None = sys._getframe().f_back
    debugger = _terminal.open()
    if debugger is not None:
        _terminal.say(f"\n>>> rank {os.environ['RANK']} is at a breakpoint\n")
        debugger.set_trace(frame)


def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* wrapped to run in the debugger from its first line on, for ``--trace``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        debugger = _terminal.open()
        return function(*args, **kwargs) if debugger is None else debugger.runcall(function, *args, **kwargs)

    return call


def look_at(error: BaseException) -> bool | None:
    """
    Debug *error* in the frame that raised it.

    Returns True if the user then wants to stop the tests, and None if no debugger could be opened.
    """
    debugger = _terminal.open()
    if debugger is None or error.__traceback__ is None:
        return None
    debugger.reset()
    try:
        debugger.interaction(None, error.__traceback__)
        return bool(debugger.quitting)
    finally:
        _terminal.close()
