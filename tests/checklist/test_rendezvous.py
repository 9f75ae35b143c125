"""Rows 126 to 145: how nodes meet, by handlers in programs of their own and by agents."""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import time
from typing import Any

import pytest

from tests.benchmarks import sockets, tree
from tests.benchmarks.forming import form
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.launchers import LAUNCHERS as MEASURED
from tests.checklist.nodes import LOOPBACK, Cluster, Node, Refused, let_in, meet, seconds_until
from tests.checklist.peers import Peer, free_port
from tests.hosts._netns import missing, shifted
from tests.process.launches import children

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

AT_ONCE = 30.0
"""Seconds within which nodes that need not wait for anything have met, on a loaded machine too."""
KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
RUNS_TO_THE_END = "import os, time\nopen('runs', 'w').close()\nwhile not os.path.exists('end'): time.sleep(0.01)"
BACKWARDS = ("127.0.0.3", "127.0.0.2", "127.0.0.1")
"""Addresses with which a newcomer is sorted first: torch leaves it waiting else, for what its rank 0 does not say."""


def worlds(*nodes: Node) -> list[int]:
    """Let *nodes* meet; return the world size that each node received."""
    return [world for _, world, *_ in meet(*nodes)]


@pytest.mark.row(126)
def test_a_round_of_fixed_size_is_complete_when_all_have_joined(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        first, second = (cluster.node("2", last_call_timeout=300) for _ in range(2))
        first.send("next")
        time.sleep(0.5)
        assert not first.has_answered()

        second.send("next")

        assert [2, 2] == [node.answer(AT_ONCE)[1] for node in (first, second)]


@pytest.mark.row(127, improvement=True)
def test_the_quiet_time_counts_from_the_last_join(peer: Peer) -> None:
    """A comes, B 5 s later, C 5 s after that: with 8 s of quiet nobody is left out."""
    with Cluster(peer) as cluster:
        nodes = [cluster.node("1:3", last_call_timeout=8) for _ in range(3)]
        for node in nodes[:2]:
            node.send("next")
            time.sleep(5)
        nodes[2].send("next")

        assert [3, 3, 3] == [node.answer(AT_ONCE)[1] for node in nodes]


@pytest.mark.row(128)
def test_a_round_is_complete_at_once_with_the_most_nodes(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        nodes = [cluster.node("1:2", last_call_timeout=300) for _ in range(2)]

        assert [2, 2] == worlds(*nodes)


@pytest.mark.row(129)
def test_all_nodes_have_the_same_view_of_their_ranks(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        answers = meet(*(cluster.node("3") for _ in range(3)))

        assert [0, 1, 2] == sorted(rank for rank, *_ in answers)
        assert 1 == len({tuple(view) for _, *view in answers})


@pytest.mark.row(130)
def test_node_that_finds_no_others_in_time_fails_and_is_forgotten(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        cluster.node("2")  # holds the store, and asks for nothing
        for kinds in ({"RendezvousTimeoutError"}, {"RendezvousTimeoutError", "RendezvousClosedError"}):
            with pytest.raises(Refused) as refused:  # were the first still there, the second would find it
                cluster.node("2", join_timeout=3).request("next")
            assert kinds & set(refused.value.kinds)


@pytest.mark.row(131)
def test_a_late_node_is_let_in_where_there_is_room(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        first, late = (cluster.node("1:2", local_addr=where, last_call_timeout=3) for where in BACKWARDS[:2])
        assert 1 == first.request("next")[1]
        late.send("next")

        assert [2, 2] == [world for _, world, *_ in let_in(late, [first])]


@pytest.mark.row(132)
def test_a_late_node_of_a_full_job_waits_until_a_place_is_free(peer: Peer) -> None:
    options = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 3}
    with Cluster(peer) as cluster:
        first, second, spare = (cluster.node("1:2", local_addr=where, **options) for where in BACKWARDS)
        assert [2, 2] == worlds(first, second)
        spare.send("next")
        assert seconds_until(first, "num_nodes_waiting", 1, 3) is None
        assert not spare.has_answered()

        second.process.kill()

        assert [2, 2] == [world for _, world, *_ in let_in(spare, [first])]


@pytest.mark.row(133, improvement=True)
def test_a_spare_agent_ends_well_when_the_job_does(peer: Peer) -> None:
    script = peer.script(RUNS_TO_THE_END)
    options = ("--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:{free_port()}")
    first = peer.start(*options, "--rdzv-id", "job", script)
    assert peer.wait_until((peer.folder / "runs").exists)
    spare = peer.start(*options, "--rdzv-id", "job", script)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits: there is no other sign of it
        spare.wait(10)

    (peer.folder / "end").touch()

    assert [0, 0] == [peer.finish(process).returncode for process in (first, spare)]


@pytest.mark.row(134)
def test_a_closed_job_takes_no_newcomers(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        first = cluster.node("1:2", last_call_timeout=1)
        first.request("next")
        first.request("set_closed")

        with pytest.raises(Refused) as refused:
            cluster.node("1:2", last_call_timeout=1).request("next")
        assert "RendezvousClosedError" in refused.value.kinds


@pytest.mark.row(135, 139, improvement=True)
def test_silent_node_is_dropped_after_interval_times_attempts(peer: Peer) -> None:
    options = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 1}
    with Cluster(peer) as cluster:
        first, silent = (cluster.node("1:2", **options) for _ in range(2))
        assert [2, 2] == worlds(first, silent)
        for pid in tree_of(silent.process.pid):
            os.kill(pid, signal.SIGSTOP)

        seconds = seconds_until(first, "num_nodes_waiting", 1, 15)

        assert seconds is not None
        assert 2 <= seconds
        assert 1 == first.request("next")[1]


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


@pytest.mark.row(136, improvement=True)
def test_survivors_of_a_lost_node_go_on_without_it(peer: Peer) -> None:
    script = peer.script(
        "import os, time\nopen(f\"world{os.environ['WORLD_SIZE']}.{os.getpid()}\", 'w').close()\n"
        "while not (os.path.exists('end') and os.environ['WORLD_SIZE'] == '1'): time.sleep(0.01)"
    )
    options = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:{free_port()}")
    common = ("--rdzv-id", "job", "--rdzv-conf", "last_call_timeout=20", "--local-addr", LOOPBACK, script)
    first = peer.start(*options, *common)
    assert peer.wait_until(lambda: listens(options[-1]))
    second = peer.start(*options, *common)
    assert peer.wait_until(lambda: len(list(peer.folder.glob("world2.*"))) == 2)

    for pid in tree_of(second.pid):
        os.kill(pid, signal.SIGKILL)

    assert peer.wait_until(lambda: list(peer.folder.glob("world1.*")), 25)
    (peer.folder / "end").touch()
    assert 0 == peer.finish(first).returncode


def listens(endpoint: str) -> bool:
    """Return whether a server accepts connections at *endpoint*."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.row(137, improvement=True)
def test_after_a_node_was_replaced_all_have_one_and_the_same_new_address(peer: Peer) -> None:
    """Of three nodes the one is killed that torch's order makes rank 0, and another comes."""
    options = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 4}
    with Cluster(peer) as cluster:
        host, other, killed = (cluster.node("2:3", local_addr=f"127.0.0.{number}", **options) for number in (9, 8, 2))
        before = {tuple(where) for _, _, *where in meet(host, other, killed)}
        assert 1 == len(before)
        killed.process.kill()
        replacement = cluster.node("2:3", local_addr="127.0.0.3", **options)
        replacement.send("next")
        after = let_in(replacement, [host, other])

        assert [3, 3, 3] == [world for _, world, *_ in after]
        assert 1 == len({tuple(where) for _, _, *where in after})
        assert before.isdisjoint({tuple(where) for _, _, *where in after})


@pytest.mark.row(138, improvement=True)
def test_a_newcomer_that_is_sorted_first_has_the_same_master_as_the_others(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        first, newcomer = (cluster.node("1:2", local_addr=where, last_call_timeout=3) for where in BACKWARDS[:2])
        first.request("next")
        newcomer.send("next")

        answers = let_in(newcomer, [first])

        assert [2, 2] == [world for _, world, *_ in answers]
        assert 1 == len({tuple(where) for _, _, *where in answers})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.row(139, improvement=name.startswith("keep_alive")))
        for name in ("last_call_timeout", "close_timeout", "heartbeat_timeout", *KEEP_ALIVE)
    ],
)
def test_times_that_are_not_above_0_are_refused(peer: Peer, name: str) -> None:
    rendezvous, registry = (peer.module(module) for module in ("rendezvous", "rendezvous.registry"))
    options = {name: -1, "is_host": "1"}
    with pytest.raises(ValueError, match=r"-1|(?i:positive)"):
        registry.get_rendezvous_handler(
            rendezvous.RendezvousParameters("c10d", f"{LOOPBACK}:{free_port()}", "job", 1, 1, LOOPBACK, **options)
        )


@pytest.mark.row(140)
def test_closing_is_seen_by_all_nodes_and_shutdown_returns_its_success(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        host, client = (cluster.node("2") for _ in range(2))
        assert [2, 2] == worlds(host, client)
        assert [False, False] == [node.request("is_closed") for node in (host, client)]
        client.request("set_closed")
        assert seconds_until(host, "is_closed", True, 10) is not None
        assert host.request("shutdown") is True

        other = Cluster(peer)
        host, client = other.node("2"), other.node("2")
        assert [2, 2] == worlds(host, client)
        for pid in tree_of(host.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert client.request("shutdown") is False


@pytest.mark.row(141)
def test_only_nodes_that_wait_for_a_place_are_counted(peer: Peer) -> None:
    with Cluster(peer) as cluster:
        first = cluster.node("1:2", last_call_timeout=1)
        first.request("next")
        assert 0 == first.request("num_nodes_waiting")
        cluster.node("1:2", last_call_timeout=1).send("next")

        assert seconds_until(first, "num_nodes_waiting", 1, 20) is not None


@pytest.mark.row(142, improvement=True)
def test_a_clock_that_is_off_by_a_minute_does_no_harm(peer: Peer, tmp_path: pathlib.Path) -> None:
    """The node whose clock is behind is not taken for dead, however long the round lasts."""
    options = {"last_call_timeout": 3}
    with Cluster(peer) as cluster:
        host, late = (cluster.node("1:3", local_addr=where, **options) for where in BACKWARDS[::2])
        behind = cluster.node("1:3", variables=shifted(-60, tmp_path), local_addr=BACKWARDS[1], **options)
        assert [2, 2] == worlds(host, behind)

        late.send("next")

        assert [3, 3, 3] == [world for _, world, *_ in let_in(late, [host, behind])]


@pytest.mark.row(143, improvement=True)
def test_256_nodes_meet_within_a_few_seconds(peer: Peer) -> None:
    if why := missing():
        pytest.skip(why)
    launcher = MEASURED.get(peer.launcher.name)
    assert launcher is not None
    if launcher.most_nodes is not None:
        raise BenchmarkError(f"{launcher.most_nodes} nodes are the most that were ever seen to meet in minutes")

    found = form(launcher, 256)

    assert found.first is not None
    assert found.first < 20


@pytest.mark.row(144, improvement=True)
def test_pickles_written_to_the_store_cannot_run_code(peer: Peer) -> None:
    """A stranger who reaches the store writes a pickle that makes a file, in each form, over every key."""
    trap = peer.folder / "trap"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(trap), "w")

    bomb = pickle.dumps(Bomb())
    with Cluster(peer) as cluster:
        host = cluster.node("1:2", last_call_timeout=1)
        newcomer = cluster.node("1:2", join_timeout=4)
        host.request("next")
        name, port = cluster.endpoint.split(":")
        stranger = importlib.import_module("torch.distributed").TCPStore(name, int(port), wait_for_workers=False)
        keys = stranger.list_keys()
        assert keys
        for payload in (bomb, base64.b64encode(bomb)):
            for key in keys:
                stranger.set(key, payload)
            stranger.check(keys)  # acknowledges what was written
            host.send("num_nodes_waiting")
            newcomer.send("next")
            for node in (host, newcomer):
                with contextlib.suppress(Refused, TimeoutError):  # a ruined store may cost a job more time than this
                    node.answer(6)

    assert not trap.exists()


@pytest.mark.row(145, improvement=True)
def test_a_job_of_one_node_listens_on_loopback_only(peer: Peer) -> None:
    script = peer.script(RUNS_TO_THE_END)
    process = peer.start("--standalone", script)
    assert peer.wait_until((peer.folder / "runs").exists)

    listeners = sockets.listening(tree.of_job(process.pid, peer.folder))

    assert listeners
    assert [] == [each.address for each in listeners if not each.loopback]
