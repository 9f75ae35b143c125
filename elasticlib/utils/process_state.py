"""States of processes in ``/proc``. (torch: ``torch.distributed.elastic.utils.process_state``)"""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def stat_words(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; [] if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in front of the state is in brackets, and may contain any character.
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def read_proc_state(pid: int) -> str | None:
    """Return the letter of a process's state (``R``, ``S``, ``D``, ``Z``, ...); None if unknown."""
    return next(iter(stat_words(pid)), None)


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether *state* is uninterruptible sleep, which no signal ends, not even SIGKILL."""
    return state is not None and state.startswith("D")
