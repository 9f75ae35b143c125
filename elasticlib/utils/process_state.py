"""What the kernel says a process is doing. (torch: ``torch.distributed.elastic.utils.process_state``)"""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def stat_words(pid: int) -> list[str]:
    """What ``/proc/PID/stat`` says of the process *pid*, from the letter of its state on; nothing when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it stands in brackets and may hold any character, brackets too.
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def read_proc_state(pid: int) -> str | None:
    """The letter of the state that the process *pid* is in, such as ``R``, ``S``, ``D`` or ``Z``; None if unknown."""
    return next(iter(stat_words(pid)), None)


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in *state* waits in the kernel for a device, where no signal reaches it, SIGKILL included."""
    return state is not None and state.startswith("D")
