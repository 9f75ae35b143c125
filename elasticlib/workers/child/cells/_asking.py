"""
What a function that runs for a notebook meets where it would ask its user: an error that says what to do instead.

Rules of this file: the cell's input is the kernel's, and a worker reads nothing. Without an error the prompt of a
debugger would meet the end of its input and end the program. A hook that the program sets later, as debugpy does, and
one that the variable PYTHONBREAKPOINT names are left alone.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any, NoReturn

from elasticlib.stacks import CALLERS
from elasticlib.workers.child._serving import when_imported

_VARIABLE = "PYTHONBREAKPOINT"


def refuse_to_ask() -> None:
    """In a worker, before any of the user's code: have whatever asks its user raise."""
    sys.breakpointhook = _break
    builtins.input = _input  # and the prompts of debuggers, which use it
    when_imported("getpass", _replace_getpass)


def _replace_getpass() -> None:
    sys.modules["getpass"].__dict__["getpass"] = _getpass


def _break(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get(_VARIABLE):
        return sys.__breakpointhook__(*args, **kwargs)
    _refuse_to_stop("breakpoint()")


def _input(prompt: object = "", /) -> str:
    asker = sys._getframe(1).f_globals.get("__name__")
    if asker == "cmd":  # the module with the loop of pdb's prompt
        _refuse_to_stop("a debugger")
    _refuse("input()")


def _getpass(prompt: str = "", stream: object = None, *, echo_char: str | None = None) -> str:
    _refuse("getpass()")


def _refuse_to_stop(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot stop in a rank of a launch from a notebook, which cannot read what you type: call the function "
        "in the cell itself, without the launch, or let the rank raise an exception and run %debug in the next cell"
    )


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot ask in a rank of a launch from a notebook, which cannot read what you type: ask in the cell, "
        "and give the answer to the function as an argument"
    )


CALLERS.add(__file__)
