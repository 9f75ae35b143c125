"""
Jobs under an adversary that reads and writes all values in the store.

With a token, the adversary can delay a job or end it, and no more. The simulated cluster itself
checks the invariants. Without a token, it checks that no step fails and every agent can be ended.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
from attrs import evolve

from elasticlib.rendezvous.coordinator import _departures, _node_liveness
from elasticlib.rendezvous.coordinator._incoming import Incoming
from elasticlib.rendezvous.coordinator._state import Sighting
from elasticlib.rendezvous.node import _session_liveness
from elasticlib.rendezvous.node._node_outbox import NodeOutbox
from elasticlib.rendezvous.protocol import _codec
from elasticlib.rendezvous.protocol._messages import decode
from elasticlib.testing import (
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
    SetBack,
    Skew,
    Slow,
    Stubborn,
    Suspend,
    Tamper,
)
from tests.sim.adversaries import TOKEN, case
from tests.sim.checks import CheckedCluster
from tests.sim.simulator import (
    Fenced,
    Finalized,
    InvariantBroken,
    Rules,
    SimulatedCluster,
    Started,
    TookOver,
    WorkersEnded,
)
from tests.sim.simulator.history import Tampered
from tests.sim.simulator.store import Store

RULES = Rules(2, 3, last_call=2.0, heartbeat=10.0)
BOTH = pytest.mark.parametrize("coordinator", ["fixed", "elected"])
NOTHING = Tamper(0.0, 0.0, acts=(1,))
"""Has the cluster know that strangers write to its store."""


def job(*faults: Fault, coordinator: str = "elected", nodes: int = 3, token: str = TOKEN) -> SimulatedCluster:
    return CheckedCluster(RULES, nodes, FaultPlan((*faults, NOTHING)), coordinator, token=token)


def again_and_again(cluster: SimulatedCluster, do: Callable[[], None], start: float, end: float) -> None:
    """Do it fifty times in each of these seconds."""
    for turn in range(int((end - start) * 50)):
        cluster.timeline.at(start + turn / 50, None, do)


def kinds(cluster: SimulatedCluster) -> list[str]:
    return [node.outcome.kind if node.outcome else "-" for node in cluster.members]


@pytest.mark.sampled
@pytest.mark.parametrize("start", range(0, 45, 5))
def test_with_a_token_nothing_but_delay_or_a_clear_end_follows_from_him(start: int) -> None:
    for number in range(start, start + 5):
        case(number, (TOKEN,)).run()


@pytest.mark.sampled
@pytest.mark.parametrize("start", range(0, 45, 5))
def test_without_a_token_no_step_breaks_and_every_agent_can_be_ended(start: int) -> None:
    for number in range(start, start + 5):
        case(number, ("",)).run()


def test_the_same_acts_give_the_same_history() -> None:
    one, other = (case(3, (TOKEN,)).run() for _ in range(2))

    assert one.history == other.history


@BOTH
def test_a_job_with_a_token_that_nobody_touches_ends_well(coordinator: str) -> None:
    assert ["succeeded"] * 3 == kinds(job(coordinator=coordinator).run())


# What he did once, and must not again.


@BOTH
def test_node_with_destroyed_heartbeats_stops_before_others_start(coordinator: str) -> None:
    """The store acknowledges them, so that nothing else tells it that it is taken for dead."""
    cluster = job(coordinator=coordinator)

    def destroy() -> None:
        assert cluster.store is not None
        for key in [key for key in cluster.store.values if key.startswith("beat/n2/")]:
            del cluster.store.values[key]

    again_and_again(cluster, destroy, 20.0, 45.0)
    cluster.run()

    fenced = [record for record in cluster.history if isinstance(record, Fenced)]
    assert {"n2"} == {record.node.partition("/")[0] for record in fenced}
    assert "the job's coordinator has read none of this node's heartbeats in the store for" in fenced[0].why
    assert fenced[0].at < 28.0
    assert ["succeeded"] * 3 == kinds(cluster)


def test_node_with_stopped_launcher_learns_of_its_destroyed_heartbeat() -> None:
    """
    It writes no other one that could be missed, and the store has acknowledged that one.

    Its workers end well meanwhile, in a round that the others repeat without it: that it says.
    """
    rules = Rules(2, 3, 1, last_call=0.0, join_timeout=60.0, heartbeat=10.0)
    plan = FaultPlan((Pause(3, 52.875, 39.0, what="agent"), Tamper(44.75, 20.0, seed=631439, every=0.5, acts=(13,))))
    cluster = CheckedCluster(rules, 4, plan, seed=154, token=TOKEN)
    cluster.run()

    destroyed = [record for record in cluster.history if isinstance(record, Tampered)]
    assert ["act 13: beat: delete beat/n3"] == [record.what.rpartition("/100")[0] for record in destroyed]
    assert ["replaced", *["succeeded"] * 3] == sorted(kinds(cluster))


def test_node_that_reads_no_heartbeat_takes_its_own_for_lost() -> None:
    """He changes all heartbeats again and again: the store acknowledges what nobody will ever read."""
    rules = Rules(1, 2, 2, last_call=30.0, join_timeout=20.0, heartbeat=10.0, wait_for="min")
    tamper = Tamper(36.0, 8.0, seed=570618, every=0.02, where=("pulse",), acts=(1, 10, 179, 301, 320))
    plan = FaultPlan((Cut(1, 0.184, 20.5), tamper))
    cluster = CheckedCluster(rules, 4, plan, "fixed", seed=486, work=60.0, token=TOKEN)
    cluster.run()

    assert ["succeeded"] * 4 == kinds(cluster)


@pytest.mark.parametrize("at", [8.0, 20.0])
@BOTH
def test_former_nodes_do_not_start_a_job_again_if_all_was_deleted(coordinator: str, at: float) -> None:
    cluster = job(FailWorker(0, 3.0), Tamper(at, 0.0, where=("all",)), coordinator=coordinator)
    cluster.run()

    assert 1 == len(cluster.watches)
    if coordinator == "elected":
        assert {"lost"} == set(kinds(cluster))


def test_nodes_end_when_a_newcomer_starts_their_deleted_job_again() -> None:
    """He finds nothing of it: nobody could have told him."""
    away = [Cut(node, 7.5, 5.0) for node in range(3)]
    cluster = job(*away, Tamper(8.0, 0.0, where=("all",)), Join(3, 8.001), Join(4, 8.001))
    cluster.run()

    assert 2 == len(cluster.watches)
    assert ["lost"] * 3 == kinds(cluster)[:3]


def test_join_after_the_end_gets_the_outcome_despite_two_refusals() -> None:
    """It lives where it asks: what it has not read is written again for as long as its heartbeats come there."""
    rules = Rules(1, 3, 3, last_call=30.0, join_timeout=20.0, heartbeat=10.0, wait_for="max")
    tamper = Tamper(39.25, 40.0, 362429, 0.1, ("state", "hello", "inbox"), (245, 246, 279, 335))
    plan = FaultPlan((PauseStore(16.875, 30.25), tamper))
    cluster = CheckedCluster(rules, 1, plan, "elected", seed=770, work=5.0, token=TOKEN)
    cluster.run()

    (node,) = cluster.members
    assert node.outcome is not None
    assert "changed by another writer" in node.outcome.why


def test_node_asleep_during_its_loss_and_a_takeover_learns_of_the_loss() -> None:
    """The successor does not know of the loss, and its heartbeats show no passed time."""
    rules = Rules(2, 3, 3, last_call=0.0, join_timeout=60.0, heartbeat=10.0)
    tamper = Tamper(2.5, 40.0, 615217, 0.1, ("beat",), (328, 329, 330, 337, 338))
    plan = FaultPlan((DeleteLeader(35.0), Suspend(2, 1.125, 36.25), tamper))
    cluster = CheckedCluster(rules, 4, plan, "elected", seed=338, work=60.0, token=TOKEN)
    cluster.run()

    assert ["succeeded"] * 4 == kinds(cluster)


def test_node_that_returns_after_its_loss_at_the_end_learns_of_the_end() -> None:
    """He changes the state so that the end cannot be written, and hides heartbeats until nobody waits for the node."""
    rules = Rules(1, 1, 1, last_call=2.0, join_timeout=20.0, heartbeat=10.0)
    tamper = Tamper(4.875, 40.0, 55727, 0.1, ("state", "beat"), (151, 174, 252, 254, 282, 312))
    cluster = CheckedCluster(rules, 1, FaultPlan((tamper,)), "elected", seed=330, work=20.0, token=TOKEN)
    cluster.run()

    assert ["succeeded"] == kinds(cluster)


def test_node_asleep_during_the_end_learns_of_end_despite_old_notice() -> None:
    """Its coordinator had forgotten how much it read, and began to number anew."""
    rules = Rules(2, 3, 1, last_call=30.0, join_timeout=20.0, heartbeat=10.0, wait_for="max")
    faults = Join(3, 0.155), Suspend(3, 21.5, 36.5), Kill(2, 44.354), PauseStore(0.021, 13.25)
    tamper = Tamper(40.875, 5.0, seed=363845, every=0.1, acts=(4, 24, 28))
    cluster = CheckedCluster(rules, 3, FaultPlan((*faults, tamper)), "elected", seed=769, work=60.0, token=TOKEN)
    cluster.run()

    assert ["lost", "lost", "-", "lost"] == kinds(cluster)


def test_node_that_asks_after_the_end_is_handed_to_the_successor() -> None:
    rules = Rules(2, 4, 1, last_call=30.0, join_timeout=0.0, heartbeat=10.0, wait_for="max")
    tamper = Tamper(0.172, 20.0, 847222, 2.0, ("leader", "all", "state"), (0, 3, 4))
    plan = FaultPlan((Flap(0, 0.395, 8.5), tamper))
    cluster = CheckedCluster(rules, 1, plan, "elected", seed=728, work=60.0, token=TOKEN)
    cluster.run()

    assert "succeeded" not in kinds(cluster)


def test_node_cut_off_until_the_job_has_ended_finds_no_memory_and_ends() -> None:
    """Its round was to be repeated, as far as it knows; the others succeeded in it after all, and left."""
    rules = Rules(2, 3, 3, last_call=2.0, join_timeout=20.0, heartbeat=10.0, wait_for="max")
    slow = Slow(1, 0.233, 32.0, delay=2.0), Slow(0, 30.0, 36.0, delay=2.0)
    tamper = Tamper(0.041, 60.0, seed=427827, every=2.0, where=("hello",), acts=(16, 17))
    plan = FaultPlan((Join(1, 0.122), *slow, tamper))
    cluster = SimulatedCluster(rules, 2, plan, "elected", seed=123, work=5.0, token=TOKEN)
    cluster.run()

    assert ["lost", "succeeded", "succeeded"] == kinds(cluster)


def test_memory_of_an_ended_job_is_put_back_where_no_node_of_it_is_left() -> None:
    """The reader finds a round of exited nodes: they count as lost, and the job ends once more."""
    rules = Rules(2, 2, last_call=0.0, join_timeout=0.0, heartbeat=10.0)
    plan = FaultPlan((Flap(2, 0.0, 30.25, after=0.1), DeleteLeader(15.25), SetBack(15.25, 13.75)))
    cluster = SimulatedCluster(rules, 3, plan, "elected", seed=0, work=5.0, token=TOKEN).run()

    assert 3 == kinds(cluster).count("succeeded"), kinds(cluster)


def test_workers_of_an_ended_job_take_their_time_beside_the_hosts_next_job() -> None:
    rules = Rules(1, 2, 0, last_call=2.0, join_timeout=20.0, heartbeat=10.0, wait_for="min")
    tamper = Tamper(0.023, 5.0, seed=407397, every=0.5, acts=(10,))
    plan = FaultPlan((Flap(0, 0.247, 19.0, after=0.1), Stubborn(2, 0.109, 60.0), tamper))
    cluster = SimulatedCluster(rules, 3, plan, "fixed", seed=625, work=20.0, token=TOKEN).run()

    (ended,) = (each for each in cluster.history if isinstance(each, WorkersEnded) and each.node.startswith("n2/"))
    assert ("closed", True) == (cluster.outcomes[ended.node].kind, ended.at > 10.0)


def test_forged_greeting_gives_the_job_no_name_that_no_key_can_hold() -> None:
    rules = Rules(1, 2, 2, last_call=30.0, join_timeout=20.0, heartbeat=10.0, wait_for="quiet")
    tamper = Tamper(0.049, 8.0, seed=742268, every=0.02, acts=(52, 89, 104, 112, 134, 139, 141, 161, 215))
    cluster = CheckedCluster(rules, 2, FaultPlan((Join(2, 2.5), tamper)), "elected", seed=168, work=20.0)

    cluster.run()


def test_old_memory_gives_no_ranks_while_the_heartbeat_is_hidden() -> None:
    rules = Rules(2, 2, 3, last_call=2.0, join_timeout=20.0, heartbeat=10.0, wait_for="quiet")
    plan = FaultPlan((Tamper(13.625, 5.0, seed=841016, acts=(1, 14, 15, 16, 19)),))
    cluster = CheckedCluster(rules, 4, plan, "elected", seed=844, work=60.0, token=TOKEN)
    cluster.run()

    took = [record.node.partition("/")[0] for record in cluster.history if isinstance(record, TookOver)]
    assert ["n0", "n3"] == took
    assert {"succeeded"} != set(kinds(cluster))


def test_old_memory_without_a_round_gives_no_ranks_at_any_takeover() -> None:
    """It is put back, taken over, and taken over again before those who are at work can have spoken."""
    rules = Rules(1, 1, 2, join_timeout=0.0, heartbeat=10.0, wait_for="max")
    acts = (37, 40, 42, 45, 46, 47, 48, 52, 53, 54, 55)
    plan = FaultPlan((Tamper(0.625, 8.0, seed=511393, every=0.02, acts=acts),))
    cluster = CheckedCluster(rules, 3, plan, "elected", seed=311, work=20.0, token=TOKEN)
    cluster.run()

    assert 3 == sum(isinstance(record, TookOver) for record in cluster.history)
    assert "closed" in kinds(cluster)


def test_second_request_for_ranks_is_answered_only_in_latest_mailbox() -> None:
    rules = Rules(2, 4, 2, last_call=30.0, join_timeout=60.0, heartbeat=10.0)
    tampers = (
        Tamper(29.375, 8.0, seed=856417, every=0.02, acts=(78,)),
        Tamper(37.0, 8.0, seed=793659, every=0.02, acts=(49, 51)),
    )
    cluster = CheckedCluster(rules, 2, FaultPlan(tampers), "fixed", seed=20, work=5.0, token=TOKEN).run()

    assert ["succeeded", "succeeded"] == kinds(cluster)


def test_node_that_left_learns_nothing_from_a_missing_heartbeat() -> None:
    """Without the heartbeat, the place at which the node would read a notice is not known."""
    rules = Rules(3, 4, 0, last_call=2.0, join_timeout=0.0, heartbeat=10.0, wait_for="min")
    tamper = Tamper(19.625, 8.0, seed=924878, every=0.02, acts=(194, 212, 266, 267))
    plan = FaultPlan((Leave(1, 0.329), tamper))
    cluster = CheckedCluster(rules, 2, plan, "fixed", seed=515, work=60.0, token=TOKEN).run()

    assert ["timeout", "left"] == kinds(cluster)


def test_notice_delayed_by_a_slow_store_is_written_again_as_late_as_any() -> None:
    rules = Rules(2, 2, 3, last_call=2.0, join_timeout=0.0, heartbeat=10.0, wait_for="max")
    plan = FaultPlan((Slow(0, 4.5, 32.25, delay=0.3), Tamper(38.25, 5.0, seed=505414, every=0.5, acts=(10,))))
    cluster = CheckedCluster(rules, 2, plan, "elected", seed=520, work=20.0, token=TOKEN).run()

    assert ["succeeded", "succeeded"] == kinds(cluster)


def test_successor_after_the_end_notifies_node_despite_old_heartbeat() -> None:
    rules = Rules(2, 4, 2, last_call=2.0, join_timeout=20.0, heartbeat=10.0, wait_for="min")
    tampers = Tamper(0.152, 60.0, seed=661361, acts=(6, 16, 22, 30, 98)), Tamper(23.25, 60.0, seed=535487, acts=(1,))
    plan = FaultPlan((Skew(1, 60.0, drift=-0.01), Slow(3, 57.125, 35.25, delay=2.0), *tampers))
    cluster = CheckedCluster(rules, 3, plan, "elected", seed=389, work=5.0, token=TOKEN).run()

    assert ["lost", "lost", "lost"] == kinds(cluster)


def test_node_that_read_the_end_is_notified_again_after_a_forged_join() -> None:
    """Its heartbeats are still there: it may be back, and not have read it."""
    rules = Rules(1, 3, 0, last_call=30.0, join_timeout=20.0, heartbeat=10.0)
    tamper = Tamper(0.095, 5.0, seed=756136, where=("leader", "state", "inbox"), acts=(8,))
    plan = FaultPlan((Flap(0, 0.167, 33.0, after=0.1), Kill(2, 0.141), tamper))
    CheckedCluster(rules, 3, plan, "fixed", seed=636, work=20.0, token=TOKEN).run()


def test_node_that_returns_after_its_loss_is_notified_as_long_as_any() -> None:
    pauses = Pause(2, 0.251, 36.5, what="agent"), Pause(2, 0.24, 17.25)
    rules = Rules(3, 4, 3, last_call=2.0, join_timeout=60.0, heartbeat=10.0)
    CheckedCluster(rules, 3, FaultPlan(pauses), "fixed", seed=241, work=20.0, token=TOKEN).run()


def test_spare_that_read_the_end_is_notified_again_after_a_forged_join() -> None:
    rules = Rules(1, 1, 0, last_call=30.0, join_timeout=60.0, heartbeat=10.0)
    plan = FaultPlan([Tamper(3.375, 20.0, seed=284825, acts=(2, 4, 5, 7, 9, 16, 23))])
    CheckedCluster(rules, 3, plan, "elected", seed=566, work=5.0, token=TOKEN).run()


def test_join_after_the_end_without_heartbeats_gets_no_reply() -> None:
    rules = Rules(1, 2, 2, last_call=2.0, join_timeout=60.0, heartbeat=10.0, wait_for="max")
    faults = Slow(1, 0.016, 25.5), Pause(1, 38.0, 13.75, what="agent")
    tamper = Tamper(17.75, 20.0, seed=535567, acts=(13, 37))
    CheckedCluster(rules, 4, FaultPlan((*faults, tamper)), "fixed", seed=570, work=20.0, token=TOKEN).run()


def test_node_that_has_read_an_end_is_notified_again_from_older_memory() -> None:
    rules = Rules(2, 3, 1, last_call=2.0, join_timeout=60.0, heartbeat=10.0, wait_for="min")
    tamper = Tamper(0.129, 40.0, seed=27810, every=0.1, acts=(31, 36, 144, 151, 192))
    plan = FaultPlan((Cut(2, 0.009, 20.0), tamper))
    CheckedCluster(rules, 3, plan, "elected", seed=618, work=5.0, token=TOKEN).run()


@BOTH
def test_sidecar_that_failed_after_the_end_rests_beside_a_stopped_agent(coordinator: str) -> None:
    rules = Rules(3, 4, 0, last_call=2.0, join_timeout=60.0, heartbeat=10.0)
    plan = FaultPlan((Pause(1, 0.204, 39.75, what="agent"), Tamper(0.251, 8.0, seed=114660, every=0.02, acts=(369,))))
    cluster = CheckedCluster(rules, 2, plan, coordinator, seed=113, work=20.0).run()

    assert 20_000 > cluster.timeline.steps


def test_heartbeats_removed_on_both_sides_stop_a_node_in_time() -> None:
    """The store took its heartbeat, so that it had no reason to stop before others had its ranks."""
    tamper = Tamper(
        0.194, 8.0, seed=926327, every=0.02, where=("leader", "all", "inbox"), acts=(32, 149, 291, 307, 393)
    )
    rules = Rules(2, 2, max_restarts=1, last_call=0.0, join_timeout=20.0)

    CheckedCluster(
        rules, 3, FaultPlan((Stubborn(1, 0.27, 60.0), tamper)), "fixed", seed=89, work=60.0, token="secret"
    ).run()


@pytest.mark.parametrize("until", [15.0, 30.0])
def test_node_gets_ranks_withheld_for_long_once_its_heartbeat_is_read(
    until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He deletes them from its mailbox, and the coordinator writes them again: nobody waits for ever."""
    sound = Store.put

    def put(self: Store, key: str, data: bytes) -> None:
        if not (key.startswith("box/n2") and self.network.timeline.now < until):
            sound(self, key, data)

    monkeypatch.setattr(Store, "put", put)
    rules = Rules(3, 3, last_call=0.0, heartbeat=1.0)
    cluster = CheckedCluster(rules, 3, FaultPlan([NOTHING]), seed=3, work=10.0, token=TOKEN).run()

    assert ["succeeded"] * 3 == kinds(cluster)
    assert [until < record.at < until + 1.5 for record in cluster.history if isinstance(record, Started)] == [
        False,
        False,
        True,
    ]


def remove_the_first_wish(patch: pytest.MonkeyPatch) -> None:
    """Before the coordinator reads it."""
    sound, removed = Store.append, list[bytes]()

    def append(self: Store, data: bytes) -> None:
        if removed or not data:
            sound(self, data)
        else:
            removed.append(data)

    patch.setattr(Store, "append", append)


@BOTH
def test_removed_request_for_ranks_is_sent_again(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then that the node is there, nor reads its heartbeats."""
    remove_the_first_wish(monkeypatch)
    cluster = CheckedCluster(evolve(RULES, min_nodes=1), 1, FaultPlan([NOTHING]), coordinator, token=TOKEN).run()

    assert ["succeeded"] == kinds(cluster)


def test_old_memory_put_back_is_noticed_within_seconds() -> None:
    """A spare that takes over from it knows neither them nor their mailboxes: they say again that they are there."""
    faults = (FailWorker(0, at=5.0), SetBack(at=8.0, seconds=3.5), DeleteLeader(at=8.0), NOTHING)
    spares = 0
    for seed in range(12):
        rules = evolve(RULES, min_nodes=1, max_nodes=2)
        cluster = CheckedCluster(rules, 3, FaultPlan(faults), "elected", seed, token=TOKEN).run()
        assigned = {node for record in cluster.history if isinstance(record, Finalized) for node in record.nodes}
        spares += [record.node for record in cluster.history if isinstance(record, TookOver)][-1] not in assigned

        for node in cluster.members:
            assert node.outcome is not None
            assert "saved state was replaced by an older one" in node.outcome.why
            assert node.outcome.at < 16.0
    assert spares > 1


@pytest.mark.sampled
@pytest.mark.parametrize("start", range(0, 20, 5))
def test_memory_of_an_empty_job_gives_no_ranks_beside_nodes_at_work(start: int) -> None:
    """A spare asks again at once, and gets no ranks until those who work had the time to do so, too."""
    faults = (SetBack(at=8.0, seconds=7.99), DeleteLeader(at=8.0), NOTHING)
    for seed in range(start, start + 5):
        cluster = CheckedCluster(
            evolve(RULES, min_nodes=1, max_nodes=1), 3, FaultPlan(faults), "elected", seed, token=TOKEN
        ).run()

        assert 1 == sum(isinstance(record, Started) for record in cluster.history)


# Whoever believes more than is signed, or takes the old for the new, is caught.


def checks_no_signature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_codec, "_check", lambda body, found, key, place: None)


def takes_any_other_count_for_life(patch: pytest.MonkeyPatch) -> None:
    def node_heartbeat(self: Incoming, mailbox: str, data: bytes | None, nonce: str, now: float) -> object:
        try:
            found = decode(data or b"", self.key, f"job/{nonce}/beat/{mailbox}")
        except ValueError:
            return None, ()
        self._latest[mailbox] = found  # type: ignore[assignment]
        return found, ()

    sound = _node_liveness.look

    def look(state, counts, now):  # type: ignore[no-untyped-def]
        after, silent = sound(state, counts, now)
        seen = dict(after.watch.sightings)
        for node, each in state.watch.sightings.items():
            if node in seen and (count := counts.get(each.mailbox)) is not None and count != each.count:
                seen[node] = Sighting(each.mailbox, count, now)
        return evolve(after, watch=evolve(after.watch, sightings=seen)), tuple(
            node for node in silent if seen[node].at < now
        )

    patch.setattr(Incoming, "heartbeat", node_heartbeat)
    patch.setattr(_node_liveness, "look", look)


def takes_what_is_stored_for_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_session_liveness, "_alive_at", lambda contact: contact.acknowledged)
    patch.setattr(_departures, "_send_given_up", lambda entries, why: ())


def never_repeats_its_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeOutbox, "again", lambda self, seen: self)


MUTANTS = [
    checks_no_signature,
    takes_any_other_count_for_life,
    takes_what_is_stored_for_read,
]


def tampered_clusters() -> Iterator[SimulatedCluster]:
    """Clusters in which somebody has time to do harm at one place."""
    for seed in range(6):
        for where in ((), ("beat",)):
            yield job(Tamper(0.0, 40.0, seed=seed, every=0.1, where=where), coordinator=("fixed", "elected")[seed % 2])


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_mutant_is_caught(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)

    with pytest.raises(InvariantBroken):
        for cluster in tampered_clusters():
            cluster.run()


def check_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the checks of sessions: the effect on a job must be visible without them."""
    monkeypatch.setattr(sys.modules[__name__], "CheckedCluster", SimulatedCluster)


@pytest.mark.sampled
@BOTH
def test_node_that_never_repeats_its_request_for_ranks_is_caught(
    coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_repeats_its_request(monkeypatch)
    check_no_steps(monkeypatch)

    with pytest.raises(InvariantBroken, match="wait for ever"):
        test_removed_request_for_ranks_is_sent_again(coordinator, monkeypatch)


def test_node_working_on_beside_its_restarted_job_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_session_liveness, "FENCE", 3.0)
    monkeypatch.setattr(_session_liveness, "KILL", 3.5)
    check_no_steps(monkeypatch)

    with pytest.raises(InvariantBroken, match="run though their job began anew"):
        test_nodes_end_when_a_newcomer_starts_their_deleted_job_again()


@pytest.mark.sampled
@pytest.mark.parametrize("start", range(0, 12, 3))
def test_same_acts_break_nothing_without_a_mutant(start: int) -> None:
    for cluster in itertools.islice(tampered_clusters(), start, start + 3):
        cluster.run()
