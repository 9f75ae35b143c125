"""
Hypothesis strategies for fault plans and clusters.

Rules of this file: moments lie on a grid of milliseconds, so that examples shrink to numbers that people read;
what is drawn first is what matters least, so that examples shrink to few faults.
"""

from __future__ import annotations

from hypothesis import strategies as st

from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.testing import Fault, FaultPlan, _faults as kinds

PARTS = ("agent", "machine", "rendezvous", "spawner")


def moments(most: float = 60.0) -> st.SearchStrategy[float]:
    """Seconds, from 0 to *most*: early ones, when rounds are made, as often as all others."""
    fine = st.integers(0, 400).map(lambda thousandths: thousandths / 1000)
    coarse = st.integers(0, int(most * 8)).map(lambda eighths: eighths / 8)
    return fine | coarse


def spans(most: float = 40.0) -> st.SearchStrategy[float]:
    """Return durations in quarters of a second, up to *most* seconds."""
    return st.integers(1, int(most * 4)).map(lambda quarters: quarters / 4)


def faults(nodes: int = 3, most: float = 60.0) -> st.SearchStrategy[Fault]:
    """One fault of a cluster of so many nodes, at most so many seconds after the start."""
    node, at, seconds = st.integers(0, nodes - 1), moments(most), spans()
    parts = st.sampled_from(PARTS)
    return st.one_of(
        st.builds(kinds.FailWorker, node, at, st.booleans()),
        st.builds(kinds.Break, node, at),
        st.builds(kinds.Join, node, at),
        st.builds(kinds.Leave, node, at),
        st.builds(kinds.Flap, node, at, seconds, st.sampled_from((0.1, 1.0, 15.0))),
        st.builds(kinds.Kill, node, at, st.sampled_from(kinds.KILLED)),
        st.builds(kinds.Cut, node, at, seconds),
        st.builds(kinds.Pause, node, at, seconds, parts),
        st.builds(kinds.Suspend, node, at, seconds),
        st.builds(kinds.Slow, node, at, seconds, st.sampled_from((0.1, 0.5, 2.0))),
        st.builds(kinds.Stubborn, node, at, st.sampled_from((0.5, 3.0, 12.0, 60.0))),
        st.builds(kinds.PauseStore, at, seconds),
        st.builds(kinds.DeleteLeader, at),
        st.builds(kinds.Replay, node, at, seconds),
        st.builds(kinds.Skew, node, st.sampled_from((60.0, -60.0, 1e5)), st.sampled_from((0.0, 0.01, -0.01))),
    )


def tampers(most: float = 60.0) -> st.SearchStrategy[Fault]:
    """Acts of a stranger who reads and writes the store, or puts an old state of it back."""
    where = st.lists(st.sampled_from(kinds.PLACES), max_size=3, unique=True)
    acts = st.lists(st.integers(0, 400), min_size=1, max_size=40, unique=True).map(sorted)
    every = st.sampled_from((0.02, 0.1, 0.25, 0.5, 2.0))
    seconds = st.sampled_from((1.0, 5.0, 20.0))
    return st.builds(kinds.Tamper, moments(most), seconds, st.integers(0, 1_000_000), every, where, acts) | st.builds(
        kinds.SetBack, moments(most), spans()
    )


def fault_plans(
    nodes: int = 3, most: float = 60.0, size: int = 6, stranger: bool = False
) -> st.SearchStrategy[FaultPlan]:
    """Plans of at most *size* faults; with a *stranger*, and of at most three series of acts of his."""
    plain = st.lists(faults(nodes, most), max_size=size)
    if not stranger:
        return plain.map(FaultPlan)
    his = st.lists(tampers(most), min_size=1, max_size=3)
    return st.tuples(plain, his).map(lambda both: FaultPlan((*both[0], *both[1])))


@st.composite
def rules(draw: st.DrawFn, most_nodes: int = 4) -> Rules:
    """Draw rules that a job may ask for, with short waits."""
    least = draw(st.integers(1, most_nodes - 1))
    return Rules(
        least,
        draw(st.integers(least, most_nodes)),
        draw(st.integers(0, 3)),
        last_call=draw(st.sampled_from((0.0, 2.0, 30.0))),
        join_timeout=draw(st.sampled_from((60.0, 20.0, 0.0))),
        heartbeat=10.0,
        wait_for=draw(st.sampled_from(("quiet", "min", "max"))),
    )
