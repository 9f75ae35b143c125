"""Rows 166 to 168: worker specifications, states of a group, and agents that users write."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from tests.checklist.peers import Peer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]


@pytest.mark.row(166)
@pytest.mark.parametrize(
    "wrong",
    [
        {"local_world_size": 0},
        {"local_world_size": -1},
        {"monitor_interval": 0},
        {"monitor_interval": -0.1},
        {"entrypoint": None},
    ],
)
def test_a_number_or_an_entry_point_that_cannot_be_is_an_assertion_error(peer: Peer, wrong: dict[str, Any]) -> None:
    spec = peer.module("agent.server").WorkerSpec
    right = {"role": "trainer", "local_world_size": 1, "rdzv_handler": object(), "entrypoint": print}
    spec(**right)

    with pytest.raises(AssertionError):
        spec(**{**right, **wrong})


@pytest.mark.row(166)
def test_fn_is_the_entry_point_and_deprecated(peer: Peer) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = peer.module("agent.server").WorkerSpec("trainer", 1, object(), fn=print, args=(1, 2))

    assert [DeprecationWarning] == [each.category for each in caught]
    assert (print, (1, 2), "print", 3, 0.1) == (
        spec.entrypoint,
        spec.args,
        spec.get_entrypoint_name(),
        spec.max_restarts,
        spec.monitor_interval,
    )


@pytest.mark.row(167)
def test_a_group_runs_in_two_of_the_seven_states(peer: Peer) -> None:
    states = peer.module("agent.server").WorkerState

    running = {state.name: states.is_running(state) for state in states}

    assert {
        "UNKNOWN": False,
        "INIT": False,
        "HEALTHY": True,
        "UNHEALTHY": True,
        "STOPPED": False,
        "SUCCEEDED": False,
        "FAILED": False,
    } == running
    assert "HEALTHY" == states.HEALTHY, "a state is its own name"


AGENT = """
import json, sys
from {elastic}.agent.server import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from {elastic}.multiprocessing.errors import ProcessFailure
from {elastic}.rendezvous import RendezvousParameters
from {elastic}.rendezvous.registry import get_rendezvous_handler


class FakeAgent(SimpleElasticAgent):
    def __init__(self, spec, looks):
        super().__init__(spec, exit_barrier_timeout=20, shutdown_timeout=5)
        self.looks, self.seen = looks, []

    def _start_workers(self, worker_group):
        sizes = sorted({worker.world_size for worker in worker_group.workers})
        self.seen.append(["start", worker_group.state.name, worker_group.group_world_size, sizes])
        return {worker.local_rank: f"id{worker.global_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group):
        self.seen.append(["stop", worker_group.state.name])

    def _monitor_workers(self, worker_group):
        ids = {worker.global_rank: worker.id for worker in worker_group.workers}
        assert worker_group.state == WorkerState.HEALTHY and ids == {rank: f"id{rank}" for rank in ids}
        state = self.looks(worker_group)
        if state == WorkerState.SUCCEEDED:
            return RunResult(state, return_values={rank: rank * 10 for rank in ids})
        if state == WorkerState.FAILED:
            rank = min(ids)
            return RunResult(state, failures={rank: ProcessFailure(0, 7, 3, "no such file")})
        return RunResult(state)

    def _shutdown(self, death_sig=15, timeout=30):
        self.seen.append(["shutdown", int(death_sig)])


def agent(looks, restarts, endpoint="localhost:0", nodes=1, workers=2):
    parameters = RendezvousParameters("c10d", endpoint, "fake", 1, nodes, "localhost", last_call_timeout=1)
    handler = get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        "trainer", workers, handler, entrypoint="fake", max_restarts=restarts, monitor_interval=0.01
    )
    return FakeAgent(spec, looks)
"""

SCRIPTED = """
states = [WorkerState[name] for name in sys.argv[2].split(",")]
fake = agent(lambda group: states.pop(0), int(sys.argv[1]))
first = fake.get_worker_group().state.name
result = fake.run()
values = {str(rank): value for rank, value in result.return_values.items()}
codes = [[rank, failure.exitcode] for rank, failure in result.failures.items()]
print(json.dumps([first, fake.seen, fake.get_worker_group().state.name, result.state.name, values, codes]))
"""


def scripted(peer: Peer, restarts: int, *states: str) -> list[Any]:
    """Run a fake agent whose monitor returns these *states*; return its history."""
    done = peer.python(AGENT + SCRIPTED, str(restarts), ",".join(states))
    assert done.returncode == 0, done.err
    found: list[Any] = json.loads(done.out)
    return found


@pytest.mark.row(168)
def test_workers_that_are_made_up_succeed(peer: Peer) -> None:
    first, seen, last, result, values, codes = scripted(peer, 0, "HEALTHY", "HEALTHY", "SUCCEEDED")

    assert [["start", "INIT", 1, [2]], ["shutdown", 15]] == seen
    assert ("INIT", "SUCCEEDED", "SUCCEEDED", {"0": 0, "1": 10}, []) == (first, last, result, values, codes)


@pytest.mark.row(168)
@pytest.mark.parametrize("trouble", ["FAILED", "UNHEALTHY"])
def test_workers_that_are_made_up_are_restarted_while_restarts_are_left(peer: Peer, trouble: str) -> None:
    _, seen, last, result, values, _ = scripted(peer, 2, "HEALTHY", trouble, trouble, "HEALTHY", "SUCCEEDED")

    again = [["stop", trouble], ["start", "STOPPED", 1, [2]]]
    assert [["start", "INIT", 1, [2]], *again, *again, ["shutdown", 15]] == seen
    assert ("SUCCEEDED", "SUCCEEDED", {"0": 0, "1": 10}) == (last, result, values)


@pytest.mark.row(168)
def test_workers_that_are_made_up_fail_when_no_restart_is_left(peer: Peer) -> None:
    _, seen, last, result, values, codes = scripted(peer, 1, "FAILED", "FAILED")

    again = [["stop", "FAILED"], ["start", "STOPPED", 1, [2]]]
    assert [["start", "INIT", 1, [2]], *again, ["stop", "FAILED"], ["shutdown", 15]] == seen
    assert ("FAILED", "FAILED", {}, [[0, 3]]) == (last, result, values, codes)


JOINED = """
import subprocess
endpoint, name = sys.argv[1], sys.argv[2]

def looks(group):
    if group.group_world_size == 2:
        return WorkerState.SUCCEEDED
    if len(fake.seen) == 1 and name == "first":
        fake.seen.append("alone")
        peers.append(subprocess.Popen([sys.executable, __file__, endpoint, "second"]))
    return WorkerState.HEALTHY

peers = []
fake = agent(looks, 0, endpoint, nodes=2, workers=1 if name == "first" else 2)
result = fake.run()
for peer in peers:
    peer.wait(30)
with open(f"{name}.json", "w") as file:
    json.dump([fake.seen, sorted(result.return_values.values())], file)
"""


@pytest.mark.row(168)
def test_an_arrival_restarts_made_up_workers_and_spends_no_restart(peer: Peer) -> None:
    # torch's agents share a store by default, and then wait for ever for each other's keys.
    own_stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    peer.python(AGENT + JOINED, f"localhost:{free_port()}", "first", env=own_stores)
    first, second = (json.loads((peer.folder / f"{name}.json").read_text()) for name in ("first", "second"))

    assert [
        ["start", "INIT", 1, [1]],
        "alone",
        ["stop", "HEALTHY"],
        ["start", "STOPPED", 2, [3]],
        ["shutdown", 15],
    ] == first[0]
    assert [["start", "INIT", 2, [3]], ["shutdown", 15]] == second[0]
    assert [0, 10, 20] == sorted(first[1] + second[1])
