"""Rows 046 to 064: what a worker finds in its environment, and whether torch can work with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.checklist.peers import REPORT, Peer, Seen, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

LOOPBACK = "127.0.0.1"
GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item():g}\\n".encode())
dist.destroy_process_group()
"""


def numbers(seen: Sequence[Seen], name: str) -> list[int]:
    return [int(each.env[name]) for each in seen]


def two_nodes(peer: Peer, first: Sequence[str], second: Sequence[str], code: str = REPORT) -> None:
    """Run two agents of one c10d job on this machine to their good end."""
    script, port = peer.script(code), free_port()
    common = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOOPBACK}:{port}", "--rdzv-id", "job")
    started = [peer.start(*common, *options, script) for options in (first, second)]
    for process in started:
        done = peer.finish(process)
        assert 0 == done.returncode, done.err


@pytest.mark.row(46)
def test_local_ranks_count_from_0_to_their_number(peer: Peer) -> None:
    seen = peer.report("--nproc-per-node", "3")

    assert [0, 1, 2] == sorted(numbers(seen, "LOCAL_RANK"))
    assert [3, 3, 3] == numbers(seen, "LOCAL_WORLD_SIZE")


@pytest.mark.row(47, 48, 49, 51, 52)
def test_ranks_of_two_nodes_of_different_size_are_one_row(peer: Peer) -> None:
    here = ("--local-addr", LOOPBACK)

    two_nodes(peer, ("--nproc-per-node", "2", *here), ("--nproc-per-node", "3", *here))

    seen = peer.reports()
    assert [0, 1, 2, 3, 4] == numbers(seen, "RANK")
    assert [5] * 5 == numbers(seen, "WORLD_SIZE")
    by_node = [[each for each in seen if each.env["GROUP_RANK"] == node] for node in ("0", "1")]
    assert [2, 3] == sorted(len(node) for node in by_node)
    for node in by_node:
        (base,) = {rank - local for rank, local in zip(numbers(node, "RANK"), numbers(node, "LOCAL_RANK"), strict=True)}
        assert base == int(node[0].env["RANK"])
        assert [len(node)] * len(node) == numbers(node, "LOCAL_WORLD_SIZE")
    assert [2] * 5 == numbers(seen, "GROUP_WORLD_SIZE")
    assert 1 == len({(each.env["MASTER_ADDR"], each.env["MASTER_PORT"]) for each in seen})


@pytest.mark.row(50)
def test_role_ranks_count_within_a_role(peer: Peer) -> None:
    here = ("--local-addr", LOOPBACK)

    two_nodes(
        peer,
        ("--role", "reader", "--nproc-per-node", "1", *here),
        ("--role", "trainer", "--nproc-per-node", "2", *here),
    )

    by_role = {
        role: [each for each in peer.reports() if each.env["ROLE_NAME"] == role] for role in ("reader", "trainer")
    }
    assert [0] == numbers(by_role["reader"], "ROLE_RANK")
    assert [1] == numbers(by_role["reader"], "ROLE_WORLD_SIZE")
    assert [0, 1] == numbers(by_role["trainer"], "ROLE_RANK")
    assert [2, 2] == numbers(by_role["trainer"], "ROLE_WORLD_SIZE")


@pytest.mark.row(53)
def test_the_masters_address_is_the_local_address_of_node_0(peer: Peer) -> None:
    here = ("--local-addr", "localhost")

    two_nodes(peer, here, here)

    assert ["localhost", "localhost"] == [each.env["MASTER_ADDR"] for each in peer.reports()]


@pytest.mark.row(54, improvement=True)
def test_the_restart_count_is_the_jobs(peer: Peer) -> None:
    """A failure on one node counts on the other one too: workers can use it as the number of the attempt."""
    fails_once = REPORT + (
        "import time\n"
        "if os.environ['RANK'] == '1' and not os.path.exists('failed'):\n"
        "    while not os.path.exists('report0.0.json'): time.sleep(0.01)\n"
        "    open('failed', 'w').close(); sys.exit(1)\n"
        "while not os.path.exists('failed'): time.sleep(0.01)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(9)\n"
    )
    here = ("--local-addr", LOOPBACK, "--max-restarts", "2")

    two_nodes(peer, here, here, fails_once)

    assert [(0, 0), (1, 0), (0, 1), (1, 1)] == [(each.rank, each.restart) for each in peer.reports()]


@pytest.mark.row(55)
def test_the_run_id_is_the_rendezvous_id(peer: Peer) -> None:
    code = "import os, torch.distributed as d; print(os.environ['TORCHELASTIC_RUN_ID'], d.is_torchelastic_launched())"
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job7")

    assert "job7 True\n" == peer.run(*options, peer.script(code)).out


@pytest.mark.row(56)
def test_workers_see_in_environment_whether_agent_hosts_the_store(peer: Peer) -> None:
    """The address answers before any worker has opened a store, or it does not."""
    code = """
import os, socket
try:
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5).close()
    answers = True
except OSError:
    answers = False
print(os.environ["TORCHELASTIC_USE_AGENT_STORE"], answers)
"""

    assert "True True\n" == peer.run(peer.script(code)).out


@pytest.mark.row(57)
def test_the_error_file_is_in_the_workers_log_folder(peer: Peer) -> None:
    seen = peer.report("--nproc-per-node", "2", "--log-dir", "logs")

    assert 2 == len(seen)
    for each in seen:
        path = (peer.folder / each.env["TORCHELASTIC_ERROR_FILE"]).relative_to(peer.folder).parts
        assert ("logs", "attempt_0", str(each.rank), "error.json") == (path[0], *path[2:])


@pytest.mark.row(58)
@pytest.mark.parametrize(("inherited", "value"), [({}, "1"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")])
def test_async_error_handling_of_nccl_is_on_unless_set(peer: Peer, inherited: dict[str, str], value: str) -> None:
    done = peer.run(peer.script(REPORT), env=inherited)

    assert 0 == done.returncode
    assert value == peer.reports()[0].env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]


@pytest.mark.row(59, improvement=True)
def test_threads_are_the_cpus_divided_by_the_workers_unless_set(peer: Peer) -> None:
    cpus = len(os.sched_getaffinity(0))

    (alone,) = peer.report()
    assert str(cpus) == alone.env["OMP_NUM_THREADS"]
    assert ["3", "3"] == [
        each.env["OMP_NUM_THREADS"] for each in peer.report("--nproc-per-node", "2", env={"OMP_NUM_THREADS": "3"})
    ]


@pytest.mark.row(62)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gloo_forms_a_group_by_the_environment(peer: Peer, workers: int) -> None:
    done = peer.run("--nproc-per-node", str(workers), peer.script(GLOO))

    assert [f"rank {rank} of {workers} sum {workers}" for rank in range(workers)] == sorted(done.out.splitlines())


@pytest.mark.row(63)
def test_gloo_forms_a_group_over_two_agents(peer: Peer) -> None:
    code = GLOO.replace("os.write(1, ", "open(f'out{dist.get_rank()}', 'wb').write(")
    here = ("--local-addr", LOOPBACK)

    two_nodes(peer, here, here, code)

    found = [(peer.folder / f"out{rank}").read_text() for rank in (0, 1)]
    assert [f"rank {rank} of 2 sum 2\n" for rank in (0, 1)] == found


@pytest.mark.row(64)
def test_workers_host_their_own_store_when_agents_store_is_not_shared(peer: Peer) -> None:
    code = "import os; assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'False'\n" + GLOO

    done = peer.run("--nproc-per-node", "2", peer.script(code), env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    assert ["rank 0 of 2 sum 2", "rank 1 of 2 sum 2"] == sorted(done.out.splitlines())


@pytest.mark.row(60)
@pytest.mark.sampled(1.0)
@pytest.mark.parametrize(("listed", "devices"), [("4, GPU-6f ,7", ["4", "GPU-6f"]), (None, ["0", "1"])])
def test_each_worker_is_alone_with_its_entry_of_the_list(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, listed: str | None, devices: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    seen = peer.report("--virtual-local-rank", "--nproc-per-node", "2", env=env)

    assert [(rank, "0", device) for rank, device in enumerate(devices)] == [
        (each.rank, each.env["LOCAL_RANK"], each.env["CUDA_VISIBLE_DEVICES"]) for each in seen
    ]


@pytest.mark.row(61)
@pytest.mark.sampled(1.0)
def test_list_with_fewer_entries_than_workers_starts_none(peer: Peer) -> None:
    done = peer.python(
        "from {distributed}.launcher.api import LaunchConfig, elastic_launch\n"
        "settings = dict(rdzv_backend='c10d', rdzv_endpoint='localhost:0', run_id='job', max_restarts=0)\n"
        "config = LaunchConfig(1, 1, 3, virtual_local_rank=True, **settings)\n"
        "try:\n"
        "    elastic_launch(config, 'touch')('ran${local_rank}')\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n",
        env={"CUDA_VISIBLE_DEVICES": "0,1"},
    )

    assert "refused: " in done.out, done.err
    assert "CUDA_VISIBLE_DEVICES" in done.out
    assert [] == list(peer.folder.glob("ran*"))
