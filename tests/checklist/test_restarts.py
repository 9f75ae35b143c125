"""Rows 117 to 125: restarts, whose budget they use, and nodes that had finished when others failed."""

from __future__ import annotations

import itertools
import json
import subprocess

import pytest

from tests.checklist._workers import NEWCOMERS, QUICK, Team, names, script, summary, wait_for_files
from tests.checklist.peers import REPORT, Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

TWO = "--nproc-per-node=2"
PROMPTLY = 40.0
"""Seconds in which a loaded machine does what takes none: far below the 300 s of torch's barrier at the end."""


@pytest.mark.row(117)
def test_worker_that_fails_twice_is_started_again_with_two_restarts(peer: Peer) -> None:
    path = script(peer, "note(f'attempt{RESTART}')\nsys.exit(RESTART < 2)")

    done = peer.run("--max-restarts=2", path, env=QUICK)

    assert (0, ["attempt0", "attempt1", "attempt2"]) == (done.returncode, names(peer, "attempt*"))


@pytest.mark.row(118)
def test_a_job_whose_restarts_are_used_up_exits_with_1(peer: Peer) -> None:
    done = peer.run("--max-restarts=2", script(peer, "note(f'attempt{RESTART}')\nsys.exit(3)"), env=QUICK)

    assert (1, ["attempt0", "attempt1", "attempt2"]) == (done.returncode, names(peer, "attempt*"))
    assert 3 == summary(done.err).root.exitcode


@pytest.mark.row(119)
def test_all_workers_of_the_node_are_restarted_and_not_only_the_failed_one(peer: Peer) -> None:
    code = "\nif RESTART == 0:\n    wait_for('report0.0.json', 'report1.0.json')\n    sys.exit(1) if RANK else idle()"

    done = peer.run(TWO, "--max-restarts=1", script(peer, REPORT + code), env=QUICK)

    seen = peer.reports()
    assert 0 == done.returncode, done.err
    assert [(0, 0), (0, 1), (1, 0), (1, 1)] == [(each.restart, each.rank) for each in seen]
    assert 4 == len({each.pid for each in seen})


RECOVERY = """
victim, late = map(int, sys.argv[1:])
if RESTART == 1 and RANK == late:
    wait_for("early")  # and only then does this import begin, which takes long
import torch
import torch.distributed as dist

if RESTART == 1:
    note("late" if RANK == late else "early")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if RESTART == 0:
    if RANK == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(total)
assert total.item() == dist.get_world_size() == WORLD
dist.destroy_process_group()
note(f"done{RANK}")
"""


@pytest.mark.row(120, improvement=True)
def test_gloo_connects_again_after_a_restart_for_any_dead_or_late_rank(peer: Peer) -> None:
    """
    Torch's workers read in the second attempt the addresses that were written in the first, when they are early.

    The campaign of many jobs is ``python -m tests.benchmarks.recoveries``.
    """
    path = script(peer, RECOVERY)

    for victim, late in itertools.product((1, 0), (0, 1)):
        done = peer.run(TWO, "--max-restarts=1", path, str(victim), str(late))

        assert (0, ["done0", "done1"]) == (done.returncode, names(peer, "done*")), done.err
        for name in ("early", "late", "done0", "done1"):
            (peer.folder / name).unlink()


@pytest.mark.row(121, improvement=True)
def test_keys_stored_in_one_attempt_are_missing_in_the_next(peer: Peer) -> None:
    """Torch keeps the store, with all that is in it."""
    path = script(
        peer,
        "from torch.distributed import TCPStore\n"
        "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "note(f'found{RESTART}', store.check(['key']))\n"
        "store.set('key', 'value')\n"
        "note(f'stored{RESTART}', store.check(['key']))\n"
        "sys.exit(RESTART == 0)",
    )

    done = peer.run("--max-restarts=1", path)

    written = {name: (peer.folder / name).read_text() for name in names(peer, "*ed[01]") + names(peer, "found*")}
    assert 0 == done.returncode, done.err
    assert {"found0": "False", "stored0": "True", "found1": "False", "stored1": "True"} == written


@pytest.mark.row(122, improvement=True)
def test_failure_on_one_node_restarts_all_workers_and_counts_once(peer: Peer) -> None:
    """In torch every node counts the failures of its own."""
    path = script(
        peer,
        "node = sys.argv[1]\n"
        "life = 'second' if os.path.exists('failed') else 'first'\n"
        "note(f'{node}.{life}', json.dumps([RESTART, os.getpid()]))\n"
        "wait_for(f'a.{life}', f'b.{life}')\n"
        "if life == 'first':\n"
        "    if node == 'b':\n        note('failed')\n        sys.exit(1)\n"
        "    idle()",
    )
    team = Team(peer, ("--nnodes=2", "--max-restarts=1", path))
    nodes = [team.node("a"), team.node("b")]

    assert [0, 0] == [peer.finish(each).returncode for each in nodes]
    lives = {name: json.loads((peer.folder / name).read_text()) for name in names(peer, "[ab].*")}
    assert {"a.first": 0, "b.first": 0, "a.second": 1, "b.second": 1} == {name: lives[name][0] for name in lives}
    assert lives["a.first"][1] != lives["a.second"][1]


@pytest.mark.row(123)
def test_a_node_that_joins_uses_no_restart(peer: Peer) -> None:
    """The job has none."""
    path = script(
        peer,
        "note(f'{sys.argv[1]}.of{WORLD}', RESTART)\nwhile WORLD == 1:\n    signal.pause()\nwait_for('a.of2', 'b.of2')",
    )
    team = Team(peer, ("--nnodes=1:2", "--max-restarts=0", path), NEWCOMERS, "last_call_timeout=1")
    first = team.node("a")
    wait_for_files(peer, "a.of1", of=first)
    second = team.node("b")

    assert [0, 0] == [peer.finish(each).returncode for each in (first, second)]
    assert {"a.of1": "0", "a.of2": "0", "b.of2": "0"} == {
        name: (peer.folder / name).read_text() for name in names(peer, "[ab].*")
    }


def one_finished(peer: Peer, code: str, *options: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """The agents of two nodes, of which the first has workers that ended well; the other's run *code* after that."""
    path = script(
        peer,
        "node = sys.argv[1]\nnote(f'{node}.at-work', os.getpid())\nwait_for('a.at-work', 'b.at-work')\n"
        f"if node == 'b':\n    wait_for('go')\n    {code}",
    )
    team = Team(peer, ("--nnodes=2", *options, path))
    finished, other = team.node("a"), team.node("b")
    wait_for_files(peer, "a.at-work", "b.at-work", of=other)
    worker = int((peer.folder / "a.at-work").read_text())
    assert peer.wait_until(lambda: not runs(worker))
    return finished, other


def runs(pid: int) -> bool:
    """Return whether the process still runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.row(124, improvement=True)
def test_a_failure_is_not_hidden_from_a_node_that_had_finished(peer: Peer) -> None:
    """In torch that node waits for 300 s, and exits with 0."""
    finished, other = one_finished(peer, "sys.exit(3)", "--max-restarts=0")
    (peer.folder / "go").touch()

    ends = [peer.finish(each, PROMPTLY) for each in (other, finished)]

    assert [(1, 3), (1, 3)] == [(end.returncode, summary(end.err).root.exitcode) for end in ends]
    assert 1 == len({summary(end.err).root.rank for end in ends})


@pytest.mark.row(125, improvement=True)
def test_node_that_had_finished_takes_part_in_a_restart_at_once(peer: Peer) -> None:
    """There is no barrier in which it could block the others; in torch it does, for 300 s."""
    finished, other = one_finished(peer, "note(f'ran{RESTART}')\n    sys.exit(RESTART == 0)", "--max-restarts=1")
    (peer.folder / "go").touch()

    ends = [peer.finish(each, PROMPTLY) for each in (other, finished)]

    assert [0, 0] == [each.returncode for each in ends]
    assert ["ran0", "ran1"] == names(peer, "ran*")
