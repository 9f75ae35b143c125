"""
What the workers of a round left behind, put together: results, those that were cut short, a store that was lost.

Rules of this file: ranks are local ones but where *rank_base* is added; nothing is waited for or changed.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping
from typing import Any

from elasticlib._programs import FEW_DESCRIPTORS
from elasticlib.errors import PicklingError, ProcessFailure
from elasticlib.workers import _failure
from elasticlib.workers._launch_events import Exit, StoreGone


def blamed(ends: Mapping[int, Exit], count: int) -> int | None:
    """Of *count* workers the rank that stands for a lost store: the first that did not fail by another cause."""
    return next((rank for rank in range(count) if _may_be_blamed(ends.get(rank))), None)


def _may_be_blamed(end: Exit | None) -> bool:
    return end is None or not _failure.failed(end, "") or (end.report is not None and end.report.secondary)


def lost_store(gone: StoreGone, rank: int, rank_base: int, kills: int, at: float) -> ProcessFailure:
    """The failure of the store that went away at the Unix time *at*, in the name of *rank*."""
    hint = _failure.explain(gone.exitcode, kills) if gone.pid else ""
    failure = ProcessFailure(rank, gone.pid, gone.exitcode, "", message=gone.why, rank=rank_base + rank, hint=hint)
    failure.timestamp = at
    return failure


def cut_short(exits: Mapping[int, Exit], pids: Mapping[int, int], count: int) -> dict[int, ProcessFailure]:
    """The workers that a stop ended before they were done, or that were not seen to end."""
    found = {}
    for rank in range(count):
        end, pid = exits.get(rank), pids.get(rank, 0)
        if end is None:
            why = f"process {pid} was not seen to end: it is in uninterruptible sleep, or was left running"
            found[rank] = ProcessFailure(rank, pid, -signal.SIGKILL, "", message=why, rank=rank)
        elif end.exitcode != 0:
            hint = "stopped by its launcher before it was done"
            found[rank] = ProcessFailure(rank, end.pid, end.exitcode, "", rank=rank, hint=hint)
    return found


def return_values(exits: Mapping[int, Exit], count: int, rank_base: int) -> dict[int, Any]:
    """What the workers returned, by global rank; None from programs. Raises `PicklingError`."""
    values: dict[int, Any] = {}
    for rank in range(count):
        report = exits[rank].report
        if exits[rank].unread:
            raise PicklingError(
                f"the return value of rank {rank_base + rank} could not be received: this program has as many files "
                f"open as it may: {FEW_DESCRIPTORS.removeprefix('; ')}"
            )
        values[rank_base + rank] = None
        if report is not None and report.kind == "result":
            try:
                values[rank_base + rank] = pickle.loads(report.payload)
            except Exception as error:
                raise PicklingError(
                    f"the return value of rank {rank_base + rank} cannot be rebuilt here: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return values
