"""
Invariants of every cluster after every step, under any faults.

Rules of this file: it checks the coordinator's decisions, the notices that agents received, and the
running workers. A broken rule raises at once, with the history that led to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

from elasticlib.rendezvous.coordinator._server import DESTROYED, SET_BACK
from elasticlib.rendezvous.coordinator._state import Entry, JobState
from elasticlib.rendezvous.protocol._messages import Final, RankAssignment
from elasticlib.rendezvous.protocol._shortening import brief
from elasticlib.rendezvous.protocol._timing import KILL
from tests.sim.simulator.group import Group
from tests.sim.simulator.node import Node

if TYPE_CHECKING:
    from tests.sim.simulator.cluster import SimulatedCluster

WAKING = 0.1
"""Seconds that workers of a machine which was frozen as a whole may run on after it wakes, whoever took their ranks."""
PERSONAL = ("left", "refused", "closed")


class InvariantBroken(AssertionError):  # noqa: N818 - it names what happened
    """A rule of the rendezvous was broken in a simulated cluster."""


NO_MEMORY = (SET_BACK, DESTROYED)
"""Ends by which nothing is decided but the end itself, on a memory that is known to be an old one, or none."""


@frozen
class Finalized:
    """A round as it was when it was made."""

    entries: Mapping[str, Entry]
    assignments: tuple[RankAssignment, ...]
    by_node: Mapping[str, RankAssignment]


@define(eq=False, repr=False)
class Begun:
    """Workers of one round, as they were started."""

    groups: list[Group] = Factory(list)
    ranks: dict[int, str] = Factory(dict)
    agreed: tuple[object, ...] | None = None


@define(eq=False, repr=False)
class Watcher:
    """Something that checks a cluster."""

    cluster: SimulatedCluster

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"at {self.cluster.now:.6f} s: {what}")


@define(eq=False, repr=False)
class Watch(Watcher):
    """Checks, as it happens."""

    rounds: dict[int, Finalized] = Factory(dict)
    restarts: int = 0
    final: Final | None = None
    forgotten: list[Final] = Factory(list)
    """Ends that were told by coordinators without their memory."""
    begun: dict[tuple[int, int], Begun] = Factory(dict)
    newest: tuple[int, int] = (0, -1)
    """Number of the newest round whose workers were started anywhere, after how often memory was set back."""
    may_forget: bool = False
    """True if an old memory may replace that of the coordinator."""
    before: list[dict[int, Finalized]] = Factory(list)
    """The rounds that were known each time when that was done."""

    def decided(self, state: JobState) -> Finalized | None:
        """The coordinator's state counts now; returns the round if it is new."""
        current, new = state.round, None
        if state.final is not None and _has_no_memory(state.final):
            self._demand(not state.final.succeeded, f"without its memory it gave the verdict {state.final}")
            self.forgotten.append(state.final)
            return None
        if self.may_forget and self._is_behind(state):
            self._set_back(state)
        if current is not None:
            known = self.rounds.get(current.number)
            if known is None:
                self._demand(current.number == len(self.rounds), "a round number was left out")
                by_node = dict(zip(current.entries, current.assignments, strict=True))
                new = self.rounds[current.number] = Finalized(current.entries, current.assignments, by_node)
                self._check_assignments(new, current.number)
            else:
                same = known.assignments is current.assignments or known.assignments == current.assignments
                same = same and (known.entries is current.entries or known.entries.keys() == current.entries.keys())
                self._demand(same, "a sealed round has changed")
            self._demand(current.number == len(self.rounds) - 1, "a former round is open again")
        self._demand(
            self.restarts <= state.restarts <= self.cluster.rules.max_restarts, f"{state.restarts} restarts were spent"
        )
        self.restarts = state.restarts
        if self.final is not None:
            self._demand(_same(state.final, self.final), f"the verdict {self.final} became {state.final}")
        self.final = state.final
        return new

    def _is_behind(self, state: JobState) -> bool:
        """Return whether the coordinator has forgotten decisions."""
        current = state.round
        number = -1 if current is None else current.number
        if number < len(self.rounds) - 1 or state.restarts < self.restarts:
            return True
        known = self.rounds.get(number)
        if known is not None and current is not None and known.assignments != current.assignments:
            return True
        return self.final is not None and not _same(state.final, self.final)

    def _set_back(self, state: JobState) -> None:
        """Nobody need notice, but workers of what was forgotten must not run beside those of what follows."""
        number = -1 if state.round is None else state.round.number
        self.before.append(self.rounds)
        self.rounds = {each: sealed for each, sealed in self.rounds.items() if each <= number}
        if state.round is not None and self.rounds.get(number) is not None:
            assignments, entries = state.round.assignments, state.round.entries
            if self.rounds[number].assignments != assignments:
                self.rounds[number] = Finalized(entries, assignments, dict(zip(entries, assignments, strict=True)))
        self.restarts = state.restarts
        if self.final is not None:
            self.forgotten.append(self.final)
            self.final = None

    def _age(self, node: Node, assignment: RankAssignment) -> tuple[int, int] | None:
        """Return the position of the assignment in the order of rounds; None: it was never decided."""
        for age, rounds in reversed([*enumerate([*self.before, self.rounds])]):
            sealed = rounds.get(assignment.round)
            if sealed is not None and sealed.by_node.get(node.name) == assignment:
                return age, assignment.round
        return None

    def _check_assignments(self, sealed: Finalized, number: int) -> None:
        rules, assignments = self.cluster.rules, sealed.assignments
        self._demand(
            rules.min_nodes <= len(assignments) <= rules.max_nodes, f"round {number} has {len(assignments)} nodes"
        )
        self._demand(len(assignments) == len(sealed.entries), f"round {number} has ranks for others than its nodes")
        base = 0
        world = sum(entry.descriptor.slots for entry in sealed.entries.values())
        first = next(iter(sealed.entries.values())).descriptor
        for place, (entry, assignment) in enumerate(zip(sealed.entries.values(), assignments, strict=True)):
            here = (
                assignment.round,
                assignment.group_rank,
                assignment.group_world_size,
                assignment.rank_base,
                assignment.world_size,
            )
            there = (number, place, len(assignments), base, world)
            self._demand(here == there, f"{entry.node} has ranks {here} instead of {there}")
            master = (assignment.master_addresses, assignment.master_port)
            self._demand(master == (first.addresses, first.store_port), f"{entry.node} has the master {master}")
            base += entry.descriptor.slots

    def assigned(self, node: Node, assignment: RankAssignment) -> None:
        """An agent was given ranks."""
        decided = self.rounds.get(assignment.round)
        own = decided.by_node.get(node.name) if decided else None
        assigned = self._age(node, assignment) is not None
        self._demand(assigned, f"{node.name} holds {assignment}, the coordinator decided on {own}")

    def received_final(self, node: Node, final: Final) -> None:
        """An agent was told how its job ended."""
        if not any(_same(final, each) for each in (self.final, *self.forgotten)):
            personal = not final.succeeded and final.kind in PERSONAL
            self._demand(personal, f"{node.name} was told {final}, the verdict is {self.final}")

    def ends(self, node: Node, own: int | None, succeeded: bool, final: Final) -> None:
        """An agent takes leave, with the results of its round *own*: as one that *succeeded*, or not."""
        good = self.final.round if self.final is not None else None
        if own is not None and any(each.succeeded and each.round == own for each in self.forgotten):
            return
        if own is not None:
            self._demand(succeeded and own == good, f"{node.name} returns results of round {own}, {good} succeeded")
        elif node.reported_success is not None and not _has_no_memory(final):
            what = (
                f"{node.name} told success in round {node.reported_success}, {good} succeeded: it ends without results"
            )
            self._demand(not succeeded and node.reported_success != good, what)

    def started(self, group: Group) -> None:
        """Workers run from now on."""
        number = self._age(group.node, group.assignment) or (len(self.before), group.assignment.round)
        if number < self.newest:
            self._is_late(group)
            return
        self.newest = number
        for round, begun in self.begun.items():
            if round < number:
                begun.groups = [other for other in begun.groups if not other.ended]
                for other in begun.groups:
                    self._outlives(other, number)
        self.begun = {round: begun for round, begun in self.begun.items() if round == number or begun.groups}
        self._agrees(group, self.begun.setdefault(number, Begun()))

    def _is_late(self, group: Group) -> None:
        node = group.node
        what = f"{node.name} starts round {group.assignment.round} after {self.newest[1]} has begun"
        number = self._age(node, group.assignment) or self.newest
        self._is_waking(group, number, _thaws_at(node), what)

    def _outlives(self, group: Group, number: tuple[int, int]) -> None:
        what = f"workers of {group.node.name} in round {group.assignment.round} run beside those of round {number[1]}"
        before = self._age(group.node, group.assignment) or number
        thaws_at = group.process.thaws_at
        if group.node.rendezvous.missed and not thaws_at:
            thaws_at = _thaws_at(group.node)  # they were started as it woke, on ranks that it got in its sleep
        self._is_waking(group, before, thaws_at, what)

    def _is_anyone_at_work(self, after: tuple[int, int]) -> bool:
        later = (begun.groups for number, begun in self.begun.items() if number > after)
        return any(not group.ended for groups in later for group in groups)

    def _is_waking(self, group: Group, number: tuple[int, int], thaws_at: float, what: str) -> None:
        """
        Nobody can act while the whole machine is frozen; it must at once when it wakes.

        One whose clock stood still sees that by what others say, no later than when it would be cut off without.
        """
        slept = KILL * self.cluster.rules.heartbeat if group.node.rendezvous.missed else 0.0
        awake = thaws_at + slept + WAKING if thaws_at else 0.0
        self._demand(awake > self.cluster.now, what)

        def check() -> None:
            alone = self.may_forget and not self._is_anyone_at_work(after=number)
            self._demand(group.ended or group.process.thaws_at > self.cluster.now or alone, f"woken, {what}")

        self.cluster.timeline.at(awake, None, check)

    def _agrees(self, group: Group, begun: Begun) -> None:
        assignment, name = group.assignment, group.node.name
        ranks = range(assignment.rank_base, assignment.rank_base + group.node.descriptor.slots)
        for rank in ranks:
            other = begun.ranks.setdefault(rank, name)
            self._demand(other == name, f"{name} and {other} both have rank {rank} of round {assignment.round}")
        self._demand(ranks.stop <= assignment.world_size, f"{name} has {ranks} of {assignment.world_size} ranks")
        sizes = (assignment.world_size, assignment.group_world_size, assignment.restart_count)
        ours = (*sizes, assignment.master_addresses, assignment.master_port)
        begun.agreed = begun.agreed or ours
        self._demand(begun.agreed == ours, f"{name} was told {ours}, others of round {assignment.round} {begun.agreed}")
        begun.groups.append(group)


class NoWatch(Watch):
    """Checks nothing: where a stranger can sign for anybody, whatever is said may be his."""

    def decided(self, state: JobState) -> Finalized | None:
        """No matter what."""
        return None

    def assigned(self, node: Node, assignment: RankAssignment) -> None:
        """No matter where."""

    def received_final(self, node: Node, final: Final) -> None:
        """No matter what."""

    def ends(self, node: Node, own: int | None, succeeded: bool, final: Final) -> None:
        """No matter how."""

    def started(self, group: Group) -> None:
        """No matter which."""


def _same(one: Final | None, other: Final | None) -> bool:
    """Return whether two outcomes are the same; a full store may have cut the texts of one of them."""
    return one == other or (one is not None and other is not None and brief(one) == brief(other))


def _thaws_at(node: Node) -> float:
    """When the whole machine woke."""
    return min(node.agent.thaws_at, node.rendezvous.thaws_at)


def _has_no_memory(final: Final) -> bool:
    return any(why in final.why for why in NO_MEMORY)


def over(nodes: list[Node]) -> None:
    """Nothing happens any more: nobody may be left."""
    left = [node.name for node in nodes if any(not group.ended for group in node.groups)]
    silent = [node.name for node in nodes if node.agent.alive and node.outcome is None]
    if left:
        raise InvariantBroken(f"workers of {', '.join(left)} were never reaped")
    if silent:
        raise InvariantBroken(f"{', '.join(silent)} wait for ever")
