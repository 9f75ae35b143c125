"""Worker functions of a notebook's cell, under each library: the workers import them."""

import os
import time


def writes(rank: int, count: int, pause: float, is_loud: bool = True) -> None:
    """
    Write *count* lines with the time, *pause* seconds apart; the same without the lines where it is not *is_loud*.

    *rank* is what torch's own functions get; where it is negative, environment or process group have it.
    """
    if rank < 0 and "RANK" in os.environ:
        rank = int(os.environ["RANK"])
    elif rank < 0:
        import torch.distributed

        rank = torch.distributed.get_rank()
    # Not all at once: workers of one machine that train are not in step to the millisecond.
    due = time.monotonic() + pause * (rank % 8) / 8
    for number in range(count):
        time.sleep(max(0.0, due - time.monotonic()))
        due += pause
        if is_loud:
            print(f"beat {rank} step {number} time {time.monotonic():.6f}.", flush=True)


def nothing() -> None:
    """Do nothing: the function of the shortest launch."""
