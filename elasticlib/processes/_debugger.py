"""
A debugger that follows the children of this program: pydevd, which debugpy (VS Code) and PyCharm bring along.

It takes the place of the calls that start a program, and has each new interpreter call back. Of a job only the workers
are the user's: helpers are started without the debugger, and the command of a worker, which a helper starts out of the
debugger's sight, is made here as the debugger would have made it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_PYDEVD = "_pydev_bundle.pydev_monkey"


def debugger_follows() -> bool:
    """Return True where a debugger would follow a program that this one starts."""
    return _follower() is not None


def followed_by_debugger(command: Sequence[str]) -> list[str]:
    """Return *command* as the debugger wants it to be, so that it stops at breakpoints there; unchanged without one."""
    follower = _follower()
    return list(command) if follower is None else list(follower.patch_args(list(command)))


@contextlib.contextmanager
def unseen_by_debugger() -> Iterator[None]:
    """While entered, the debugger does not follow what this thread starts."""
    pydevd = _pydevd()
    with contextlib.nullcontext() if pydevd is None else pydevd.skip_subprocess_arg_patch():
        yield


def _follower() -> Any:
    """Return pydevd's own module for children where some client attends to these; else None."""
    return None if _is_kernel() else _pydevd()


def _pydevd() -> Any:
    """Return pydevd's own module for children; None where it is not loaded, or was told to leave them alone."""
    module = sys.modules.get(_PYDEVD)
    is_told_to_follow = hasattr(os, "original_posix_spawn")
    has_all = hasattr(module, "patch_args") and hasattr(module, "skip_subprocess_arg_patch")
    return module if is_told_to_follow and has_all else None


def _is_kernel() -> bool:
    """
    Return True in a kernel of Jupyter, whose front ends have a debugger for the cells alone.

    There pydevd's own children hang at their start: they wait for a client that never comes.
    """
    application: Any = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return application is not None and application.initialized()
