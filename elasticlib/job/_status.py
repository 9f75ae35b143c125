"""
Status of a job: its course according to its records, and snapshots of it for users. Pure.

Rules of this file: times are in seconds. Facts come only from records. A snapshot is a value: it does
not change when the job continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import evolve, field, frozen
from typing_extensions import Self

from elasticlib import records
from elasticlib.stacks import is_heading, ranks_text

_SHOWN = 60
"""Maximum number of characters of a line of output in a table."""


class _Printer(Protocol):
    """The part of IPython's ``RepresentationPrinter`` that shows a text."""

    def text(self, obj: str) -> None: ...


@frozen
class JobCourse:
    """Present state of a job, according to its records."""

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
        """Return the course after *record*."""
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
    """Status of one worker of a job."""

    rank: int
    """Global rank."""
    local_rank: int
    node: int
    """Number of its node (``GROUP_RANK``)."""
    host: str
    state: str
    """``starting``, ``running``, ``succeeded``, ``failed``, or ``stopped`` (by a stop, or after another's failure)."""
    pid: int
    exitcode: int | None
    """Exit status; None while it runs; ``-n`` if signal ``n`` ended it."""
    restarts: int
    """Number of restarts of the whole group so far."""
    step: int | None
    """Latest step that it reported by `progress`; None before the first report."""
    total: int | None
    metrics: Mapping[str, float]
    age: float | None
    """Seconds since its latest report."""
    last_line: str
    """Last line of its output, if that is in a file; else empty."""

    def __str__(self) -> str:
        return "  ".join(self.cells())

    def cells(self) -> list[str]:
        """Return the row of a table, under `HEADINGS`."""
        state = f"failed ({self.exitcode})" if self.state == "failed" else self.state
        metrics = " ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return [
            str(self.rank),
            self.host,
            state,
            str(self.pid or ""),
            self._step_text(),
            metrics,
            _shortened(self.last_line),
        ]

    def _step_text(self) -> str:
        if self.step is None:
            return ""
        if self.total is None:
            return str(self.step)
        return f"{self.step}/{self.total}"


def _shortened(line: str) -> str:
    """Return the beginning of *line*, as much as fits into the table."""
    if len(line) <= _SHOWN:
        return line
    return f"{line[: _SHOWN - 3]}..."


def state_of(pid: int, exitcode: int | None, *, was_stopped: bool) -> str:
    """Return the state of a worker, as in `RankStatus`; *was_stopped*: a stop ended it, not a failure."""
    if exitcode is None:
        # Without a process id the worker does not exist yet.
        return "running" if pid else "starting"
    if exitcode == 0:
        return "succeeded"
    return "stopped" if was_stopped else "failed"


HEADINGS = ["rank", "host", "state", "pid", "step", "metrics", "last line"]


@frozen
class JobStatus:
    """Snapshot of a job's status; its text is a table of its ranks."""

    name: str
    state: str
    """``starting``, ``waiting for ranks``, ``running``, ``stopping``; ``succeeded``, ``failed`` or ``stopped``."""
    why: str
    """Reason for the stop or the failure; empty for none."""
    seconds: float
    """Seconds since its start; after its end, the duration."""
    restarts: int
    """Number of restarts of the whole group that failures used up."""
    round: int
    """Number of the job's round; -1 before the first."""
    nodes: int
    ranks: tuple[RankStatus, ...] = field(factory=tuple)
    """Status of the workers of this machine, or with an engine of all machines; in the order of ranks."""
    engine: Mapping[str, str] = field(factory=dict)
    """For a job of a batch system its ``engine``, ``job_id``, ``folder``, ``state`` and ``reason`` there; else {}."""

    def __str__(self) -> str:
        head = f"job {self.headline()}"
        if not self.ranks:
            return head
        rows = [HEADINGS]
        rows += [rank.cells() for rank in self.ranks]
        return "\n".join([head, *_table(rows)])

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:
        """Show the table as the value of a notebook cell (IPython's protocol)."""
        printer.text(str(self))

    def headline(self) -> str:
        """Return name, state, duration and reason in one line."""
        restarts = f", restart {self.restarts}" if self.restarts else ""
        when = "after" if self.state in ENDED_STATES else "for"
        head = f"{self.name!r}: {self.state} {when} {self.seconds:.1f} s{restarts}{self._engine_text()}"
        return f"{head}: {self.why}" if self.why else head

    def _engine_text(self) -> str:
        if not self.engine:
            return ""
        job = f"{self.engine['engine']} job {self.engine['job_id']}"
        state = " ".join(filter(None, (self.engine.get("state"), self.engine.get("reason"))))
        return f" ({job}: {state})" if state else f" ({job})"


ENDED_STATES = frozenset({"succeeded", "failed", "stopped"})


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns, without columns that are empty below their heading."""
    columns = [_aligned(column) for column in zip(*rows, strict=True) if any(column[1:])]
    lines = zip(*columns, strict=True)
    return ["  ".join(line).rstrip() for line in lines]


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


class Stacks(dict[int, str]):
    """
    Stacks of the workers' threads: {global rank: text}, innermost frame first.

    The format is that of Python's fault handler. The text of this object groups ranks with the same
    stacks.
    """

    def __str__(self) -> str:
        together: dict[str, list[int]] = {}
        for rank, text in sorted(self.items()):
            together.setdefault(_without_numbers(text), []).append(rank)
        parts = []
        for ranks in together.values():
            parts.append(f"{ranks_text(ranks)}:\n{self[ranks[0]]}")
        return "\n\n".join(parts) or "no worker runs here"

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:
        """Show the text as the value of a notebook cell (IPython's protocol)."""
        printer.text(str(self))


def _without_numbers(text: str) -> str:
    """Return stacks without the numbers of threads, which differ between processes."""
    lines = []
    for line in text.splitlines():
        lines.append("Thread" if is_heading(line) else line)
    return "\n".join(lines)
