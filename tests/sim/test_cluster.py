"""
Jobs with faults of any kind.

The invariants hold after every step, no agent waits without end, and every job that can end well
does. The simulated cluster itself checks the invariants.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given, settings, strategies as st

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.coordinator._places import PAUSES
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
)
from tests.sim.checks import CheckedCluster
from tests.sim.promises import admission_limit, kinds, left_out, must_succeed, verdicts_of_steady_nodes
from tests.sim.simulator import (
    Ended,
    Fenced,
    Finalized,
    Record,
    Rules,
    SimulatedCluster,
    Started,
    TookOver,
    WorkersEnded,
    strategies,
)

pytestmark = pytest.mark.sampled(1.0)

RULES = Rules(2, 3, last_call=2.0, heartbeat=10.0)
MOST = len(PAUSES) + 1
"""Exits of a node that cost it its place."""
BOTH = pytest.mark.parametrize("coordinator", ["fixed", "elected"])
FEWER = max(settings.default.max_examples // 3, 5) if settings.default else 50

clusters = st.builds(
    SimulatedCluster,
    strategies.rules(),
    st.integers(1, 4),
    strategies.fault_plans(4),
    st.sampled_from(("fixed", "elected", "served")),
    st.integers(0, 9),
    st.just(20.0),
)


def run(*faults: Fault, rules: Rules = RULES, nodes: int = 3, coordinator: str = "fixed", seed: int = 0,
        work: float = 60.0, **more: Any) -> SimulatedCluster:  # fmt: skip
    return CheckedCluster(rules, nodes, FaultPlan(faults), coordinator, seed, work, **more).run()


def rounds(cluster: SimulatedCluster) -> list[list[str]]:
    """The machines of each round, by group rank."""
    return [
        [node.partition("/")[0] for node in record.nodes] for record in cluster.history if isinstance(record, Finalized)
    ]


def most_starts_in_a_minute(cluster: SimulatedCluster, machine: str) -> int:
    """Return the largest number of worker starts on *machine* in any 60 s."""
    times = [
        each.at for each in cluster.history if isinstance(each, Started) and each.node.partition("/")[0] == machine
    ]
    return max(sum(begin <= at <= begin + 60.0 for at in times) for begin in times)


# Whatever goes wrong.


@given(cluster=clusters)
def test_invariants_hold_and_every_agent_ends(cluster: SimulatedCluster) -> None:
    cluster.run()

    if must_succeed(cluster):
        assert {"succeeded"} == {outcome.kind if outcome else None for outcome in verdicts_of_steady_nodes(cluster)}


@settings(max_examples=FEWER)
@given(cluster=clusters)
def test_everybody_is_admitted_once_the_faults_stop(cluster: SimulatedCluster) -> None:
    limit = admission_limit(cluster.rules)
    assume(limit < 300.0)
    cluster.work = 400.0

    cluster.run(until=cluster.plan.last + limit)

    assert [] == left_out(cluster)


# What Hypothesis should not have to find again, and what users see.


ALL, PAIR = ["n0", "n1", "n2"], ["n0", "n1"]
WELL = ["succeeded"] * 3
LEAST_3 = evolve(RULES, min_nodes=3)
FIXED, ELECTED, SERVED, ANY = ["fixed"], ["elected"], ["served"], ["fixed", "elected", "served"]
REPLACED = [
    fault
    for number in range(3)
    for fault in (Leave(number, at=20.0 * number + 5.0), Join(number + 3, at=20.0 * number + 10.0))
]
COURSES: dict[str, tuple[list[str], list[Fault], dict[str, Any], list[list[str]] | None, list[str] | None]] = {
    "nothing happens": (ANY, [], {}, [ALL], WELL),
    "a worker fails": (ANY, [FailWorker(1, at=5.0)], {}, [ALL] * 2, WELL),
    "a node is cut off, and comes back": (ANY, [Cut(2, at=5.0, seconds=30.0)], {}, [ALL, PAIR, ALL], WELL),
    "a machine sleeps until it is lost": (ANY, [Suspend(2, at=5.0, seconds=16.0)], {}, [ALL, PAIR, ALL], WELL),
    "a machine sleeps for a short time": (ANY, [Suspend(2, at=5.0, seconds=5.0)], {}, [ALL], WELL),
    "a spare sleeps": (
        ANY,
        [Suspend(1, at=5.0, seconds=30.0), Kill(2, at=40.0)],
        {"rules": evolve(RULES, max_nodes=2)},
        [["n0", "n2"], PAIR],
        ["succeeded", "succeeded", "-"],
    ),
    "a spare replaces a lost node": (
        ANY,
        [Join(3, at=3.0), Kill(2, at=8.0)],
        {"rules": LEAST_3},
        [ALL, ["n0", "n1", "n3"]],
        ["succeeded", "succeeded", "-", "succeeded"],
    ),
    "all processes of a node are killed": (
        ANY,
        [Kill(2, at=5.0, what="node")],
        {},
        [ALL, PAIR],
        ["succeeded", "succeeded", "-"],
    ),
    "a spawner is killed": (ANY, [Kill(2, at=5.0, what="spawner")], {}, [ALL] * 2, WELL),
    "an agent stops for half a second": (ANY, [Pause(2, at=5.0, seconds=0.5, what="agent")], {}, [ALL], WELL),
    "a spawner stops for half a second": (ANY, [Pause(2, at=5.0, seconds=0.5, what="spawner")], {}, [ALL], WELL),
    "a waiting node is taken for dead": (
        ANY,
        [Cut(1, at=2.0, seconds=15.0), Join(2, at=25.0)],
        {"rules": LEAST_3, "nodes": 2},
        None,
        WELL,
    ),
    "others repeat a node's success": (
        ANY,
        [
            Join(3, at=3.0),
            Join(4, at=3.5),
            Pause(1, at=55.0, seconds=9.0),
            Kill(1, at=60.5),
            Cut(2, at=61.0, seconds=40.0),
        ],
        {"rules": LEAST_3},
        [ALL, ["n0", "n3", "n4"]],
        ["succeeded", "-", "replaced", "succeeded", "succeeded"],
    ),
    "the store's host dies": (FIXED, [Kill(0, at=5.0)], {}, [ALL], ["-", "lost", "lost"]),
    "the coordinator sleeps": (FIXED, [Suspend(0, at=5.0, seconds=16.0)], {}, None, WELL),
    "acknowledgements are slow for too long": (
        FIXED,
        [Cut(2, at=24.125, seconds=9.5), Slow(0, at=0.058, seconds=24.0, delay=2.0)],
        {"rules": Rules(2, 3, 0, last_call=0.0, join_timeout=60.0, heartbeat=10.0), "work": 20.0},
        None,
        WELL,
    ),
    "each node dies after another": (
        SERVED,
        [Kill(0, at=5.0), Join(3, at=6.0), Kill(1, at=25.0), Join(4, at=26.0), Kill(2, at=45.0), Join(5, at=46.0)],
        {"work": 60.0},
        None,
        ["-", "-", "-", "succeeded", "succeeded", "succeeded"],
    ),
    "all nodes die at once, and others come": (
        SERVED,
        [*(Kill(number, at=5.0) for number in range(3)), *(Join(number + 3, at=6.0) for number in range(3))],
        {},
        [ALL, ["n3", "n4", "n5"]],
        ["-", "-", "-", "succeeded", "succeeded", "succeeded"],
    ),
    "the coordinator dies": (ELECTED, [Kill(0, at=5.0)], {}, [ALL, ["n1", "n2"]], ["-", "succeeded", "succeeded"]),
    "the coordinator wakes after its lease": (
        ELECTED,
        [Pause(0, at=5.0, seconds=20.0)],
        {},
        [ALL, ["n1", "n2"], ["n1", "n2", "n0"]],
        WELL,
    ),
    "the leader's key is deleted": (
        ELECTED,
        [DeleteLeader(at=5.0), FailWorker(0, at=15.0)],
        {"rules": evolve(RULES, min_nodes=1)},
        [ALL] * 2,
        WELL,
    ),
    "the only node's key is deleted": (
        ELECTED,
        [DeleteLeader(at=5.0), FailWorker(0, at=15.0)],
        {"rules": evolve(RULES, min_nodes=1), "nodes": 1},
        [["n0"]] * 2,
        ["succeeded"],
    ),
    "the store stands still": (ELECTED, [PauseStore(at=5.0, seconds=20.0)], {}, None, WELL),
    "all nodes are replaced one by one": ([*ELECTED, *SERVED], REPLACED, {}, None, ["left"] * 3 + WELL),
}
TAKEOVERS = ("the coordinator dies", "the leader's key is deleted", "the only node's key is deleted")


@pytest.mark.parametrize(
    ("name", "coordinator"), [(name, coordinator) for name, course in COURSES.items() for coordinator in course[0]]
)
def test_a_job_takes_its_course_where(name: str, coordinator: str) -> None:
    _, faults, options, expected, ends = COURSES[name]

    cluster = run(*faults, coordinator=coordinator, **options)

    assert ends == kinds(cluster)
    assert expected in (None, [sorted(nodes) if name.startswith("others") else nodes for nodes in rounds(cluster)])
    if name in TAKEOVERS:
        assert 2 == sum(isinstance(record, TookOver) for record in cluster.history)
    if name.startswith(("all nodes", "a waiting")):
        assert 3 == len(rounds(cluster)[-1])


@BOTH
def test_peers_stop_their_workers_within_a_fraction_of_a_second(coordinator: str) -> None:
    cluster = run(FailWorker(1, at=5.0), coordinator=coordinator)

    stopped = [record.at for record in cluster.history if isinstance(record, WorkersEnded) and record.round == 0]
    assert max(stopped) < 5.3


@BOTH
@pytest.mark.parametrize("lies", [[], [Replay(2, at=5.5, seconds=60.0)]], ids=["", "its heartbeats written again"])
def test_a_dead_machine_is_lost_within_its_heartbeat_time_and_a_second(coordinator: str, lies: list[Fault]) -> None:
    cluster = run(Kill(2, at=5.0), *lies, coordinator=coordinator)

    (end,) = [record for record in cluster.history if isinstance(record, Ended)]
    assert end.at < 5.0 + RULES.heartbeat + 1.0
    assert [["n0", "n1", "n2"], ["n0", "n1"]] == rounds(cluster)


LARGE = [FailWorker(node, at=5.0, workers=8, text=20_000) for node in range(32)]
ETCDS_LIMIT = 1_500_000


@BOTH
def test_outcome_of_large_failures_has_its_root_cause_within_seconds(
    coordinator: str,
) -> None:
    rules = Rules(32, 32, 0, heartbeat=10.0)
    cluster = run(*LARGE, rules=rules, nodes=32, coordinator=coordinator, most_bytes=ETCDS_LIMIT)

    assert {"failed"} == {outcome.kind for outcome in cluster.outcomes.values()}
    assert max(outcome.at for outcome in cluster.outcomes.values()) < 10.0
    final = cluster.state.final if cluster.state else None
    assert final is not None
    assert final.root is not None
    assert len(final.root.traceback) == 20_000
    assert cluster.store is not None
    assert max(cluster.store.use.longest.values()) < ETCDS_LIMIT / 5


@BOTH
def test_small_store_gets_shorter_reports_and_all_nodes_get_outcome(coordinator: str) -> None:
    rules = Rules(4, 4, 0, heartbeat=10.0)
    cluster = run(*LARGE[:4], rules=rules, nodes=4, coordinator=coordinator, most_bytes=8_000)

    assert {"failed"} == {outcome.kind for outcome in cluster.outcomes.values()}
    assert max(outcome.at for outcome in cluster.outcomes.values()) < 10.0


@BOTH
@pytest.mark.parametrize("what", ["agent", "node"])
def test_a_node_without_agent_is_lost_at_once(coordinator: str, what: str) -> None:
    cluster = run(Kill(2, at=5.0, what=what), coordinator=coordinator)

    (end,) = [record for record in cluster.history if isinstance(record, Ended)]
    assert end.at < 5.5


@BOTH
def test_a_node_behind_a_cut_link_is_lost_when_its_heartbeats_are(coordinator: str) -> None:
    cluster = run(Cut(2, at=4.9, seconds=60.0), Kill(2, at=5.0, what="node"), coordinator=coordinator)

    (end,) = [record for record in cluster.history if isinstance(record, Ended)]
    assert 4.9 + RULES.heartbeat / 2 < end.at < 5.0 + RULES.heartbeat + 1.0


def test_nodes_detect_the_death_of_the_stores_process_within_seconds() -> None:
    cluster = run(Kill(0, at=5.0, what="rendezvous"))

    assert ["lost", "lost", "lost"] == kinds(cluster)
    assert cluster.now < 12.0


@BOTH
def test_cut_off_node_stops_its_workers_before_others_take_its_ranks(coordinator: str) -> None:
    cluster = run(Cut(2, at=5.0, seconds=30.0), Stubborn(2, at=0.0, seconds=60.0), coordinator=coordinator)

    (ended,) = [record for record in cluster.history if isinstance(record, WorkersEnded) and record.how == "killed"]
    second = [record.at for record in cluster.history if isinstance(record, Started) and record.round == 1]
    assert ended.at < min(second)


@BOTH
def test_a_node_that_loses_contact_after_its_success_has_its_results(coordinator: str) -> None:
    """The invariants look at whose results are returned; here that it is a success, for all."""
    cluster = run(Pause(1, at=55.0, seconds=9.0), Cut(2, at=61.0, seconds=9.0), coordinator=coordinator)

    assert 1 == len(rounds(cluster))
    assert "n2" in {record.node.partition("/")[0] for record in cluster.history if isinstance(record, Fenced)}
    assert ["succeeded"] * 3 == kinds(cluster)


def test_work_that_ended_beside_a_frozen_agent_is_not_waited_for() -> None:
    rules = Rules(1, 1, heartbeat=10.0)

    cluster = run(Pause(0, at=14.125, seconds=13.0, what="agent"), rules=rules, nodes=1, work=20.0)

    assert "-" not in kinds(cluster)


def test_frozen_agent_starts_no_workers_on_ranks_that_others_have() -> None:
    rules = Rules(1, 1, last_call=0.0, heartbeat=10.0)

    cluster = run(Pause(0, at=0.001, seconds=15.0, what="agent"), rules=rules, nodes=2, work=20.0)

    assert [] == [record for record in cluster.history if isinstance(record, Started) and record.node.startswith("n0")
                  and record.round == 0]  # fmt: skip


@BOTH
def test_a_newcomer_is_in_within_a_second(coordinator: str) -> None:
    rules = Rules(1, 2, heartbeat=10.0)  # the default last call

    cluster = run(Join(1, at=40.0), rules=rules, nodes=1, coordinator=coordinator)

    second = [record.at for record in cluster.history if isinstance(record, Started) and record.round == 1]
    assert 2 == len(second)
    assert max(second) < 41.0


@BOTH
def test_message_that_is_sent_again_takes_effect_once(coordinator: str) -> None:
    """The connections break while the failure is on its way: however often it arrives, it costs one restart."""
    for thousandth in range(8):
        breaks = (Break(node, at=5.0 + thousandth / 2000) for node in range(3))

        cluster = run(FailWorker(1, at=5.0), *breaks, coordinator=coordinator)

        assert cluster.state is not None and 1 == cluster.state.restarts


def test_too_few_nodes_fail_after_their_patience() -> None:
    cluster = run(nodes=1, rules=evolve(RULES, join_timeout=20.0))

    (outcome,) = cluster.outcomes.values()
    assert "timeout" == outcome.kind
    assert "1 of at least 2 nodes" in outcome.why


@BOTH
def test_rules_without_a_heartbeat_get_that_of_real_jobs(coordinator: str) -> None:
    """Without one a dead machine would be waited for without end, and the invariants would be broken."""
    cluster = run(Kill(2, at=5.0), rules=Rules(2, 3, 3), coordinator=coordinator)

    assert 10.0 == cluster.rules.heartbeat
    assert ["succeeded", "succeeded", "-"] == kinds(cluster)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SimulatedCluster(3), "rules=3: give Rules"),
        (lambda: SimulatedCluster(RULES, plan=[Kill(2, at=5.0)]), "plan=[Kill(2, 5.0)]: give FaultPlan"),
        (lambda: SimulatedCluster(RULES, nodes=0), "nodes=0: give a whole number, 1 or more"),
        (lambda: SimulatedCluster(RULES, slots=1.5), "slots=1.5: give a whole number, 1 or more"),
        (lambda: SimulatedCluster(RULES, work="long"), "work='long': give a number of seconds, 0 or more"),
        (lambda: SimulatedCluster(RULES, coordinator="any"), "coordinator='any': give one of fixed, elected"),
        (lambda: Rules(0, 3), "min_nodes=0: give a whole number, 1 or more"),
        (lambda: Rules("2", 3), "min_nodes='2': give a whole number, 1 or more"),
        (lambda: Rules(2, None), "max_nodes=None: give a whole number, 1 or more"),
        (lambda: Rules(2, 3, -1), "max_restarts=-1: give a whole number, 0 or more"),
        (lambda: Rules(2, 3, heartbeat="10"), "heartbeat='10': give a number of seconds, 0.1 or more, or 0 for none"),
        (lambda: Rules(2, 3, wait_for="all"), "wait_for='all': give 'quiet', 'min' or 'max'"),
    ],
)
def test_a_cluster_that_cannot_be_names_the_value_and_what_to_give(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        make()


# Clocks.


@settings(max_examples=FEWER)
@given(cluster=clusters, node=st.integers(0, 3), seconds=st.sampled_from((60.0, -60.0, 86400.0)))
def test_a_clock_that_is_a_minute_ahead_changes_nothing(cluster: SimulatedCluster, node: int, seconds: float) -> None:
    plan = FaultPlan(fault for fault in cluster.plan if not isinstance(fault, Skew))

    def history(plan: FaultPlan) -> list[Record]:
        one = CheckedCluster(cluster.rules, cluster.nodes, plan, cluster.coordinator, cluster.seed, cluster.work)
        return one.run().history

    assert history(plan) == history(FaultPlan((Skew(node, seconds), *plan)))


def test_the_same_arguments_give_the_same_history() -> None:
    first, second = (run(Cut(1, at=3.0, seconds=20.0), FailWorker(0, at=9.0), seed=7) for _ in range(2))

    assert first.history == second.history


# A machine that sleeps, and whose clock sleeps with it.


def test_node_that_is_stopped_while_a_round_starts_gets_no_ranks() -> None:
    """It would be lost before its workers have started, and these would run on for a while beside the next round."""
    rules = Rules(1, 2, 2, last_call=2.0, join_timeout=60.0, heartbeat=10.0)
    faults = (
        Suspend(2, 9.125, 13.25),
        Stubborn(2, 0.272, 0.5),
        Flap(1, 19.75, 26.75, after=0.1),
        Suspend(0, 0.399, 15.5),
    )
    cluster = CheckedCluster(rules, 4, FaultPlan(faults), "elected", seed=5, work=60.0, token="secret")
    cluster.run()

    assert ["n1", "n3"] == rounds(cluster)[1]


@BOTH
@pytest.mark.parametrize("cut", [0.02, 0.2, 1.0, 5.0])
def test_workers_of_a_leaving_node_that_is_cut_off_go_before_others_start(cut: float, coordinator: str) -> None:
    """It was told at once that its part is over, while its workers take their time to stop."""
    plan = FaultPlan((Stubborn(2, 15.0, 60.0), Leave(2, 20.0), Cut(2, 20.0 + cut, 60.0)))
    cluster = CheckedCluster(Rules(2, 3, last_call=0.0, heartbeat=10.0), 3, plan, coordinator, seed=1, work=100.0)
    cluster.run()

    [ended] = [each for each in cluster.history if isinstance(each, WorkersEnded) and each.node.startswith("n2/")]
    assert ("killed", True) == (ended.how, ended.at < 20.0 + cut + 9.5)
    assert ["succeeded", "succeeded", "left"] == kinds(cluster)


@BOTH
def test_workers_of_leaving_node_get_their_time_while_heartbeats_last(coordinator: str) -> None:
    plan = FaultPlan((Stubborn(2, 15.0, 60.0), Leave(2, 20.0)))
    cluster = CheckedCluster(Rules(2, 3, last_call=0.0, heartbeat=10.0), 3, plan, coordinator, seed=1, work=100.0)
    cluster.run()

    [ended] = [each for each in cluster.history if isinstance(each, WorkersEnded) and each.node.startswith("n2/")]
    assert ended.at == pytest.approx(50.0, abs=0.5)


@pytest.mark.parametrize(("heartbeat", "absent"), [(1.0, 18.0), (1.0, 40.0), (3.0, 62.0)])
def test_nobody_is_cut_off_while_no_node_coordinates_for_long(heartbeat: float, absent: float) -> None:
    """A new coordinator reads the nodes' heartbeats before it sends any message."""
    rules = Rules(3, 3, last_call=0.0, heartbeat=heartbeat)
    cluster = CheckedCluster(rules, 3, FaultPlan(()), "elected", seed=3, work=100.0, token="secret")
    cluster.timeline.at(10.0, None, lambda: cluster.store is not None and cluster.store.steal_lease(absent))
    cluster.run()

    assert ["succeeded"] * 3 == kinds(cluster)
    assert [] == [record for record in cluster.history if isinstance(record, Fenced)]


@pytest.mark.parametrize("delay", [0.08, 0.12])
def test_a_coordinator_that_is_slow_to_look_is_not_taken_for_none(delay: float) -> None:
    """Each look takes it more than half of the heartbeat time: it has time for the rounds that follow from that."""
    rules = Rules(3, 3, last_call=0.0, heartbeat=1.0)
    plan = FaultPlan(tuple(Slow(number, 0.0, 1e4, delay=delay) for number in range(3)))
    cluster = CheckedCluster(rules, 3, plan, "elected", seed=3, work=5.0).run(until=200.0)

    lost = [node.outcome.why for node in cluster.members if node.outcome is not None and node.outcome.kind == "lost"]
    assert [] == lost


@pytest.mark.parametrize("seconds", [8.0, 12.0])
def test_an_old_memory_that_is_put_back_ends_the_job_and_repeats_no_round(seconds: float) -> None:
    """A round was failed and another joined since: the restart was spent, and the round has been."""
    plan = (FailWorker(1, at=6.0), Join(2, at=10.0), SetBack(at=15.0, seconds=seconds), Kill(0, at=15.0))
    cluster = run(*plan, rules=evolve(RULES, min_nodes=1), nodes=2, coordinator="elected")

    begun = [record.round for record in cluster.history if isinstance(record, Finalized)]
    assert [0, 1, 2] == begun
    assert 2 == len(cluster.outcomes)
    assert all(
        "the job's saved state was replaced by an older one" in outcome.why for outcome in cluster.outcomes.values()
    )


def test_document_changed_under_a_live_coordinator_ends_the_job() -> None:
    cluster = run(FailWorker(1, at=6.0), SetBack(at=8.0, seconds=5.0), FailWorker(1, at=10.0), coordinator="elected")

    assert {"closed"} == set(kinds(cluster))
    assert all("changed by another writer" in outcome.why for outcome in cluster.outcomes.values())


@BOTH
@pytest.mark.parametrize("after", [0.5, 1.0, 15.0])
def test_node_that_keeps_leaving_ends_few_rounds_and_others_continue(coordinator: str, after: float) -> None:
    """Its scheduler starts it again however it ended, for as long as the job runs."""
    rules = evolve(RULES, min_nodes=1)
    cluster = run(Flap(2, at=1.0, seconds=300.0, after=after), rules=rules, coordinator=coordinator, work=400.0)

    agents = [node.outcome.kind for node in cluster.machines[2].nodes if node.outcome]
    assert ["succeeded"] * 2 == [outcome and outcome.kind for outcome in verdicts_of_steady_nodes(cluster)]
    assert (["left"] * MOST, {"refused"}) == (agents[:MOST], set(agents[MOST:]))
    assert len(rounds(cluster)) <= 2 * MOST
    assert most_starts_in_a_minute(cluster, "n0") <= 6
    assert {0} == {record.restarts for record in cluster.history if isinstance(record, Finalized)}


@BOTH
def test_timeout_names_the_node_that_kept_leaving_if_too_few_are_left(coordinator: str) -> None:
    rules = evolve(RULES, min_nodes=3, join_timeout=90.0)
    cluster = run(Flap(2, at=1.0, seconds=300.0), rules=rules, coordinator=coordinator)

    ends = [outcome for outcome in verdicts_of_steady_nodes(cluster) if outcome is not None]
    assert ["timeout"] * 2 == [outcome.kind for outcome in ends]
    assert all("no more ranks for n2 (10.0.0.2), which joined and left 5 times" in each.why for each in ends)


# Some processes of a machine are stopped, while others and its workers run on.


@BOTH
@pytest.mark.parametrize(
    "parts", [("agent", "rendezvous"), ("agent", "spawner"), ("rendezvous", "spawner")], ids=" and ".join
)
def test_workers_end_before_others_get_their_ranks(coordinator: str, parts: tuple[str, ...]) -> None:
    cluster = run(*(Pause(2, at=5.0, seconds=40.0, what=what) for what in parts), coordinator=coordinator)

    (end,) = [
        record.at for record in cluster.history if isinstance(record, WorkersEnded) and record.node.startswith("n2/")
    ][:1]
    (anew,) = [record.at for record in cluster.history if isinstance(record, Started) and record.round == 1][:1]
    assert end < anew
    assert [["n0", "n1", "n2"], ["n0", "n1"], ["n0", "n1", "n2"]] == rounds(cluster)
