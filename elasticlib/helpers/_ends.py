"""The process that ended first where several end together, and how it ended: the error names it."""

from __future__ import annotations

import signal

from elasticlib.errors import StartError, name_of_signal
from elasticlib.processes import FROM_OUTSIDE, ChildProcess, HelperLostError, Process

_REAPER_LIMIT = 1.0
"""
Seconds from the end of a fork server to that of its reaper, which first kills the processes
below.
"""


def reaper_lost(reaper: ChildProcess) -> HelperLostError | None:
    """
    Return the error that says that the *reaper* was killed, and all processes below it ended;
    None if it was not.
    """
    status = reaper.exitcode() or 0
    return HelperLostError.of("reaper", reaper.pid, -status) if status < 0 else None


def fork_server_lost(reaper: ChildProcess, process: Process | None, output: str) -> StartError:
    """
    Return the reason why a fork server has ended: its own end, or that of its *reaper*.

    *output* is what the fork server wrote to its stderr. *process* is the fork server, None if it
    was still at its imports.
    """
    is_importing = process is None

    # A reaper that was killed is gone by now. A living one reports how its fork server ended,
    # unless it continues.
    reaper.ends(_REAPER_LIMIT if is_importing else 0.05)
    lost = reaper_lost(reaper)
    if lost is not None:
        return lost

    status = reaper.exitcode()

    # On a busy machine the reaper may not have ended yet.
    is_unknown = status is None or not is_importing

    # An import that fails writes the reason to stderr, and a crash shows in the signal.
    was_killed = status == signal.SIGKILL or (is_unknown and not output)
    if was_killed:
        pid = 0 if process is None else process.pid
        code = status or 0
        return HelperLostError.of("fork server", pid, code)

    return _unexpected_end(status, output)


def _unexpected_end(status: int | None, output: str) -> StartError:
    how = f" ({name_of_signal(status)})" if status else ""
    reason = f": {output}" if output else FROM_OUTSIDE
    return StartError(f"the fork server process ended unexpectedly{how}{reason}")
