"""Jobs by number, with faults of all kinds; some at whose store an adversary sits, and the shortest of these."""

from __future__ import annotations

import random
from collections.abc import Iterator

from attrs import evolve, frozen

from elasticlib.testing import (
    Break,
    Cut,
    DeleteLeader,
    FailWorker,
    Fault,
    FaultPlan,
    Flap,
    Join,
    Kill,
    Leave,
    Pause,
    PauseStore,
    Replay,
    SetBack,
    Skew,
    Slow,
    Stubborn,
    Suspend,
    Tamper,
)
from elasticlib.testing._faults import PLACES
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import InvariantBroken, Rules, SimulatedCluster

TOKEN = "secret"
_PARTS = ("machine", "agent", "rendezvous")


@frozen
class Case:
    """Parameters of a simulated cluster."""

    rules: Rules
    nodes: int
    faults: tuple[Fault, ...]
    coordinator: str
    seed: int
    work: float
    token: str

    def run(self) -> SimulatedCluster:
        """Its history. Raises `InvariantBroken`."""
        plan = FaultPlan(self.faults)
        cluster = CheckedCluster(self.rules, self.nodes, plan, self.coordinator, self.seed, self.work, token=self.token)
        return cluster.run()

    def breaks(self) -> InvariantBroken | None:
        """Return the violation of an invariant in its history, or None."""
        try:
            self.run()
        except InvariantBroken as broken:
            return broken
        return None


def case(
    number: int, tokens: tuple[str, ...] = (TOKEN, ""), coordinators: tuple[str, ...] = ("fixed", "elected")
) -> Case:
    """The case of that number: always the same."""
    chance = random.Random(f"adversary {number}")
    rules = _rules(chance)
    nodes = chance.randint(1, 4)
    others = [_fault(chance) for _ in range(chance.choice((0, 0, 1, 2, 3, 5)))]
    tampers = [_tamper(chance) for _ in range(chance.choice((1, 1, 1, 2)))]
    return Case(
        rules, nodes, (*others, *tampers), chance.choice(coordinators), chance.randrange(1000),
        chance.choice((5.0, 20.0, 60.0)), chance.choice(tokens),
    )  # fmt: skip


def plain(number: int) -> Case:
    """The job of that number at whose store nobody sits: always the same."""
    chance = random.Random(f"plain {number}")
    rules = _rules(chance)
    faults = [_fault(chance) for _ in range(chance.choice((1, 2, 3, 4, 6)))]
    mild = (each for each in faults if not isinstance(each, (Replay, SetBack)))
    coordinator = chance.choice(("fixed", "elected"))
    return Case(rules, chance.randint(1, 4), tuple(mild), coordinator, chance.randrange(1000), 20.0, "")


def _rules(chance: random.Random) -> Rules:
    least = chance.choice((1, 1, 2, 2, 3))
    return Rules(
        least,
        chance.randint(least, 4),
        chance.randrange(4),
        last_call=chance.choice((0.0, 2.0, 30.0)),
        join_timeout=chance.choice((60.0, 20.0, 0.0)),
        heartbeat=10.0,
        wait_for=chance.choice(("quiet", "quiet", "min", "max")),
    )


def _moment(chance: random.Random) -> float:
    return chance.choice((chance.randrange(400) / 1000, chance.randrange(480) / 8))


def _tamper(chance: random.Random) -> Tamper:
    where = () if chance.random() < 0.6 else tuple(chance.sample(PLACES, chance.randint(1, 3)))
    every = chance.choice((0.02, 0.1, 0.25, 0.5, 2.0, 5.0))
    seconds = min(chance.choice((1.0, 5.0, 20.0, 60.0)), 400 * every)
    return Tamper(_moment(chance), seconds, chance.randrange(1_000_000), every, where)


def _fault(chance: random.Random) -> Fault:
    node, at, seconds = chance.randrange(4), _moment(chance), chance.randint(1, 160) / 4
    faults: tuple[Fault, ...] = (
        FailWorker(node, at, chance.random() < 0.5),
        Break(node, at),
        Join(node, at),
        Join(node, at),
        Leave(node, at),
        Flap(node, at, seconds, chance.choice((0.1, 1.0, 15.0))),
        Kill(node, at, chance.choice((*_PARTS, "node"))),
        Kill(node, at),
        Cut(node, at, seconds),
        Pause(node, at, seconds, chance.choice(_PARTS)),
        Suspend(node, at, seconds),
        Slow(node, at, seconds, chance.choice((0.1, 0.5, 2.0))),
        Stubborn(node, at, chance.choice((0.5, 3.0, 12.0, 60.0))),
        PauseStore(at, seconds),
        DeleteLeader(at),
        SetBack(at, seconds),
        Replay(node, at, seconds),
        Skew(node, chance.choice((60.0, -60.0, 1e5)), chance.choice((0.0, 0.01, -0.01))),
    )
    return chance.choice(faults)


def shortest(broken: Case) -> Case:
    """The same with less, as long as it breaks a rule."""
    again = True
    while again:
        again = False
        for less in _lesser(broken):
            if less.breaks() is not None:
                broken, again = less, True
                break
    return broken


def _lesser(whole: Case) -> Iterator[Case]:
    for index, fault in enumerate(whole.faults):
        rest = (*whole.faults[:index], *whole.faults[index + 1 :])
        yield evolve(whole, faults=rest)
        if isinstance(fault, Tamper):
            for less in _fewer_acts(fault):
                yield evolve(whole, faults=(*whole.faults[:index], less, *whole.faults[index + 1 :]))
    if whole.nodes > 1:
        yield evolve(whole, nodes=whole.nodes - 1)


def _fewer_acts(fault: Tamper) -> Iterator[Tamper]:
    acts = fault.acts or tuple(range(int(fault.seconds / fault.every) + 1))
    size = len(acts) // 2
    while size:
        for start in range(0, len(acts), size):
            rest = (*acts[:start], *acts[start + size :])
            if rest:
                yield evolve(fault, acts=rest)
        size //= 2
