"""
How a job is: what its records have said so far, and the picture of it that people get. Pure.

Rules of this file: times are seconds; what a record does not say is not known. A picture is a value: it does not change
when the job goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen
from typing_extensions import Self

from elasticlib import records
from elasticlib.stacks import is_heading, ranks_text

_SHOWN = 60
"""Characters of a line of output in a table."""


@frozen
class JobCourse:
    """Where a job is in its course, by its records."""

    state: str = "starting"
    """As in `JobStatus`."""
    why: str = ""
    round: int = -1
    restarts: int = 0
    ranks: tuple[int, ...] = ()
    """Global ranks of this node's workers, by local rank."""
    node: int = 0
    nodes: int = 0

    def after(self, record: records.Record) -> Self:
        """The course after what *record* tells."""
        match record:
            case records.RanksAwaited():
                return evolve(self, state="waiting for ranks", why="")
            case records.RanksReceived(number, node, nodes):
                return evolve(
                    self, state="starting", why="", round=number, restarts=record.restart_count, node=node, nodes=nodes
                )
            case records.RanksAssigned():
                return evolve(self, ranks=record.ranks)
            case records.RoundStarted():
                return evolve(self, state="running", why="")
            case records.WorkersStopping():
                return evolve(self, state="stopping", why=record.why)
        return self


@frozen
class RankStatus:
    """One worker of a job, on this machine."""

    rank: int
    """Its global rank."""
    local_rank: int
    node: int
    """Number of its node (``GROUP_RANK``)."""
    host: str
    state: str
    """``starting``, ``running``, ``succeeded`` or ``failed``; ``stopped`` where others' failure or a stop ended it."""
    pid: int
    exitcode: int | None
    """None while it runs; ``-n`` when signal ``n`` ended it."""
    restarts: int
    """Of the whole group, up to now."""
    step: int | None
    """What it told last by `progress`; None when nothing."""
    total: int | None
    metrics: Mapping[str, float]
    age: float | None
    """Seconds since it told that."""
    last_line: str
    """Of its output, where that is in a file."""

    def __str__(self) -> str:
        return "  ".join(self.cells())

    def cells(self) -> list[str]:
        """The row of a table, under `HEADINGS`."""
        steps = "" if self.step is None else f"{self.step}" if self.total is None else f"{self.step}/{self.total}"
        metrics = " ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        state = f"failed ({self.exitcode})" if self.state == "failed" else self.state
        line = self.last_line if len(self.last_line) <= _SHOWN else f"{self.last_line[: _SHOWN - 3]}..."
        return [str(self.rank), self.host, state, str(self.pid or ""), steps, metrics, line]


def state_of(pid: int, exitcode: int | None, *, was_stopped: bool) -> str:
    """The state of a worker, which *was_stopped* or not, as in `RankStatus`."""
    if exitcode is None:
        return "running" if pid else "starting"
    if exitcode == 0:
        return "succeeded"
    return "stopped" if was_stopped else "failed"


HEADINGS = ["rank", "host", "state", "pid", "step", "metrics", "last line"]


@frozen
class JobStatus:
    """How a job was when it was asked; as text, a table of its ranks on this machine."""

    name: str
    state: str
    """``starting``, ``waiting for ranks``, ``running``, ``stopping``; ``succeeded``, ``failed`` or ``stopped``."""
    why: str
    """Why it is being stopped, or did not succeed."""
    seconds: float
    """Since its start, up to its end."""
    restarts: int
    """Restarts of the whole group that failures used up."""
    round: int
    """Number of the job's round; -1 before the first."""
    nodes: int
    ranks: tuple[RankStatus, ...] = field(factory=tuple)
    """The workers of this machine, by local rank."""

    def __str__(self) -> str:
        head = f"job {self.headline()}"
        return "\n".join([head, *_table([HEADINGS, *(rank.cells() for rank in self.ranks)])]) if self.ranks else head

    def headline(self) -> str:
        """Return name, state, duration and reason in one line."""
        restarts = f", restart {self.restarts}" if self.restarts else ""
        when = "after" if self.state in ENDED_STATES else "for"
        head = f"{self.name!r}: {self.state} {when} {self.seconds:.1f} s{restarts}"
        return f"{head}: {self.why}" if self.why else head


ENDED_STATES = frozenset({"succeeded", "failed", "stopped"})


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns below each other, without those that hold nothing but a heading."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


class Stacks(dict[int, str]):
    """
    Where the threads of workers are: {global rank: text}, innermost frame first, as Python's fault handler writes them.

    As text, ranks with the same stacks stand together.
    """

    def __str__(self) -> str:
        together: dict[str, list[int]] = {}
        for rank, text in sorted(self.items()):
            together.setdefault(_without_numbers(text), []).append(rank)
        parts = []
        for ranks in together.values():
            parts.append(f"{ranks_text(ranks)}:\n{self[ranks[0]]}")
        return "\n\n".join(parts) or "no worker runs here"


def _without_numbers(text: str) -> str:
    """Stacks without the numbers of threads, which no two processes share."""
    return "\n".join("Thread" if is_heading(line) else line for line in text.splitlines())
