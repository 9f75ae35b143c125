"""
Reports of a node's workers, and questions about them: frames between an agent and its client. Pure.

Rules of this file: a report is a value as JSON. A reader returns one, or raises ValueError, KeyError or TypeError.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from json import dumps
from typing import Any

from attrs import asdict, evolve, field, frozen

from elasticlib._untrusted import exactly, parse
from elasticlib.job import JobCourse, JobStatus, RankStatus

_STATES = ("stopping", "running", "starting", "waiting for ranks")
"""States of a node that runs; the first one that a node has is that of the job."""
_STOPS = ("failed", "stopped")
"""States of a node that has ended, after which no other one can end its round with success."""
_RUNNING = ("starting", "running")
"""States of a worker without an outcome."""
_NODES_A_SECOND = 100
"""Reports that a client takes: of a thousand nodes each one reports every ten seconds."""
_MOST_CHARACTERS = 8 * 2**20
"""Characters in one answer: a frame takes them, however JSON spells them."""


LAST_OUTPUT = -1
"""Number of the answer with the output that the client keeps after a node's end."""
_MOST_KEPT_OF_RANK = 2**18
_MOST_KEPT = 64 * 2**20
"""Bytes of output that a client keeps after the ends of all nodes."""


@frozen
class NodeReport:
    """The state of one node of a job."""

    state: str
    """As in `JobStatus`."""
    why: str
    round: int
    restarts: int
    nodes: int
    ranks: tuple[RankStatus, ...]

    @classmethod
    def of(cls, status: JobStatus) -> NodeReport:
        """Return the report on a node with this *status*."""
        return cls(status.state, status.why, status.round, status.restarts, status.nodes, status.ranks)

    def is_news_after(self, other: NodeReport | None) -> bool:
        """Return True if it differs from *other* by more than the passing of time."""
        return other is None or _without_ages(self) != _without_ages(other)

    def after_the_end(self) -> NodeReport:
        """Return the report once the job has ended: a worker without an outcome was stopped."""
        ranks = [evolve(each, state="stopped") if each.state in _RUNNING else each for each in self.ranks]
        return evolve(self, ranks=tuple(ranks))

    def packed(self) -> bytes:
        """Return the report as bytes."""
        return dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> NodeReport:
        """Return a report from its bytes."""
        given = parse(data, constants=True)
        ranks = tuple(RankStatus(**{**row, "metrics": _metrics(row["metrics"])}) for row in given["ranks"])
        return cls(**{**given, "ranks": ranks})


def _without_ages(report: NodeReport) -> NodeReport:
    return evolve(report, ranks=tuple(evolve(each, age=None) for each in report.ranks))


def _metrics(given: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in given.items()}


def seconds_between_reports(nodes: int, least: float = 0.5) -> float:
    """Return the seconds between two reports of a node, in a job of so many *nodes*; *least* of few nodes."""
    return max(least, nodes / _NODES_A_SECOND)


def kept_bytes(world: int) -> int:
    """Return the bytes of output that a client keeps of each rank of a job with *world* ranks."""
    return min(_MOST_KEPT_OF_RANK, _MOST_KEPT // max(1, world))


def course_of(reports: Collection[NodeReport]) -> JobCourse:
    """Return the state of a job by the *reports* of its nodes."""
    if not reports:
        return JobCourse()

    newest = _most_telling(reports)
    state = _common_state({each.state for each in reports}, newest.state)
    return JobCourse(state, newest.why, newest.round, newest.restarts, nodes=newest.nodes)


def _most_telling(reports: Collection[NodeReport]) -> NodeReport:
    """Return a report of the newest round, if possible that of a node that has ended without success."""
    return max(reports, key=lambda each: (each.round, each.state in _STOPS))


def _common_state(states: Collection[str], newest: str) -> str:
    """Return the state of a job from the *states* of its nodes and the *newest*, that of the most telling report."""
    unfinished = next((each for each in _STATES if each in states), None)
    if unfinished is None:
        return newest
    # The others end with it, and a lost node leaves its last report.
    return "stopping" if newest in _STOPS else unfinished


def ranks_of(reports: Collection[NodeReport]) -> tuple[RankStatus, ...]:
    """Return the status of the workers in *reports*, by rank."""
    found = [rank for report in reports for rank in report.ranks]
    return tuple(sorted(found, key=lambda each: each.rank))


@frozen
class Question:
    """A question to an agent; each one of a client has a number of its own."""

    number: int
    about: str
    """``stacks`` or ``logs``."""
    rank: int = 0
    """For ``logs``: a global rank of the agent's node."""
    timeout: float = 0.0
    """For ``stacks``: seconds for the answer."""

    def packed(self) -> bytes:
        """Return the question as bytes."""
        return dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Question:
        """Return a question from its bytes."""
        return cls(**parse(data))


@frozen
class Answer:
    """The answer of an agent."""

    number: int
    """Number of the question; `LAST_OUTPUT` for one that every agent sends at its node's end."""
    texts: Mapping[int, str] = field(factory=dict)
    """Stacks, or output, by global rank."""
    error: str = ""
    """The reason for an answer without texts."""

    def packed(self) -> bytes:
        """Return the answer as bytes; of a long text the end counts."""
        most = _MOST_CHARACTERS // max(1, len(self.texts))
        return dumps({**asdict(self), "texts": {rank: text[-most:] for rank, text in self.texts.items()}}).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Answer:
        """Return an answer from its bytes."""
        given = parse(data)
        texts = {int(rank): exactly(text, str) for rank, text in given["texts"].items()}
        return cls(exactly(given["number"], int), texts, exactly(given["error"], str))
