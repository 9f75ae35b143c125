"""What the kernel says a process is doing. (torch: ``torch.distributed.elastic.utils.process_state``)"""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The letter of the state that the process *pid* is in, such as ``R``, ``S``, ``D`` or ``Z``; None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except OSError:
        return None
    # The name before it stands in brackets and may hold any character, brackets too.
    _, bracket, rest = content.rpartition(b")")
    words = rest.split()
    return words[0].decode("ascii", "replace") if bracket and words else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in *state* waits in the kernel for a device, where no signal reaches it, SIGKILL included."""
    return state is not None and state.startswith("D")
