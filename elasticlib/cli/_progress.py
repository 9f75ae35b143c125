"""
What ``--progress`` shows of a job: a head, one row for each rank, and a word about those that find no room. Pure.

Rules of this file: a row holds printable text only, whatever a worker wrote. Where there are more ranks than rows,
those that a reader must see come first: the failed ones, then the slowest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from elasticlib._wording import counted, duration
from elasticlib.job import ENDED_STATES, JobStatus, RankStatus

_SILENT = 10.0
"""Seconds without a step after which a row says so."""
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|[@-Z\\-_])")


@frozen
class Row:
    """One rank."""

    rank: str
    state: str
    """As `RankStatus` has it."""
    shown_state: str
    """That with the exit status of a failed rank."""
    share: float | None
    """Of all its steps; None where it did not tell how many there are."""
    steps: str
    metrics: str
    line: str
    """Its last line of output."""


@frozen
class Picture:
    """A job as it is now."""

    head: str
    rows: Sequence[Row]
    rest: str
    """About the ranks without a row; empty where there are none."""


def picture_of(status: JobStatus, room: int) -> Picture:
    """What to show of *status* where there is room for so many rows, one at least."""
    ranks = sorted(status.ranks, key=lambda each: each.rank)
    kept, left = ranks, []
    if len(ranks) > max(1, room):
        by_need = sorted(ranks, key=lambda each: (each.state != "failed", _steps_done(each), each.rank))
        kept = sorted(by_need[: max(1, room)], key=lambda each: each.rank)
        left = by_need[max(1, room) :]
    return Picture(_head(status), [_row(each) for each in kept], _rest(left))


def _head(status: JobStatus) -> str:
    when = "after" if status.state in ENDED_STATES else "for"
    parts = [f"{printable(status.name)}: {status.state} {when} {duration(status.seconds)}"]
    if status.restarts:
        parts.append(f"restart {status.restarts}")
    if status.nodes > 1:
        parts.append(f"node {status.ranks[0].node if status.ranks else '?'} of {status.nodes}")
    head = ", ".join(parts)
    return f"{head}: {printable(status.why)}" if status.why else head


def _row(rank: RankStatus) -> Row:
    *_, shown_state, _, steps, metrics, _ = rank.cells()
    share = None
    if rank.total and rank.step is not None:
        share = min(1.0, max(0.0, rank.step / rank.total))
    if rank.state == "running" and rank.age is not None and rank.age > _SILENT:
        metrics = f"{metrics} ({duration(rank.age)} ago)".strip()
    return Row(str(rank.rank), rank.state, shown_state, share, steps, printable(metrics), printable(rank.last_line))


def _steps_done(rank: RankStatus) -> float:
    return -1.0 if rank.step is None else rank.step


def _rest(left: Sequence[RankStatus]) -> str:
    if not left:
        return ""
    who = counted(len(left), "more rank")
    told = [rank.step for rank in left if rank.step is not None]
    if not told:
        return f"and {who}"
    at = f"step {told[0]}" if min(told) == max(told) else f"steps {min(told)} to {max(told)}"
    return f"and {who}, at {at}"


def printable(text: str) -> str:
    """*text* in one line, without what would do anything to a terminal."""
    return "".join(each if each.isprintable() else " " for each in _ESCAPE.sub("", text)).strip()
