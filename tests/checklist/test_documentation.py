"""The command lines of torchrun's own documentation, run as they are written there."""

from __future__ import annotations

import pytest

from tests.checklist._workers import NEWCOMERS, QUICK, came, listens, names, script
from tests.checklist.peers import LIMIT, Peer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

SCRIPT = "YOUR_TRAINING_SCRIPT.py"
ARGUMENTS = ("--arg1", "--train-script-args=x y")
TELL = "note(f'rank{RANK}.of{WORLD}', sys.argv[1:])\n"


def told(peer: Peer, world: int) -> list[str]:
    """What the workers of that world found as their arguments."""
    return [(peer.folder / name).read_text() for name in names(peer, f"rank*.of{world}")]


@pytest.mark.parametrize(
    "options",
    [
        ("--standalone", "--nnodes=1", "--nproc-per-node=2"),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "--nproc-per-node=2"),
    ],
    ids=["single-node", "stacked"],
)
def test_a_job_of_one_node(peer: Peer, options: tuple[str, ...]) -> None:
    done = peer.run(*options, script(peer, TELL, SCRIPT), *ARGUMENTS, env=QUICK)

    assert 0 == done.returncode, done.err
    assert [str(list(ARGUMENTS))] * 2 == told(peer, 2)


def test_two_stacked_jobs_at_the_same_time(peer: Peer) -> None:
    """Each has a port of its own; each waits for the other's workers, so that they do meet."""
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "--nproc-per-node=2")
    path = script(peer, "note(f'{sys.argv[1]}{RANK}', WORLD)\nwait_for('a0', 'a1', 'b0', 'b1')", SCRIPT)

    jobs = [peer.start(*options, path, name, env=QUICK) for name in "ab"]

    assert [0, 0] == [peer.finish(each).returncode for each in jobs]
    assert ["2", "2", "2", "2"] == [(peer.folder / name).read_text() for name in names(peer, "[ab][01]")]


def test_a_fault_tolerant_job(peer: Peer) -> None:
    """A worker fails once; the variables of the text are the shell's."""
    job, host = "job7", f"localhost:{free_port()}"
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", f"--rdzv-id={job}", "--rdzv-backend=c10d")
    once = (
        "if not os.path.exists('failed'):\n"
        "    if RANK == 0:\n        idle()\n"
        "    wait_for('up0')\n    note('failed')\n    sys.exit(1)\n"
    )
    path = script(peer, once + TELL, SCRIPT)

    nodes = [peer.start(*options, f"--rdzv-endpoint={host}", path, *ARGUMENTS, env=QUICK) for _ in range(2)]

    assert [0, 0] == [peer.finish(each).returncode for each in nodes]
    assert [str(list(ARGUMENTS))] * 2 == told(peer, 2)


def test_an_elastic_job_that_a_node_joins_later(peer: Peer) -> None:
    """A variable shortens the time in which more nodes are waited for."""
    port = free_port()
    options = ("--nnodes=1:4", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=job7", "--rdzv-backend=c10d")
    place = f"--rdzv-endpoint=localhost:{port}"
    path = script(peer, TELL + "while WORLD == 2:\n    signal.pause()", SCRIPT)
    env = {**NEWCOMERS, "PET_RDZV_CONF": "last_call_timeout=2"}

    first = peer.start(*options, place, path, *ARGUMENTS, env=env)
    assert peer.wait_until(lambda: listens(port) or first.poll() is not None, LIMIT)
    came(peer, "rank0.of2", "rank1.of2", of=first)
    second = peer.start(*options, place, path, *ARGUMENTS, env=env)

    assert [0, 0] == [peer.finish(each).returncode for each in (first, second)]
    assert [str(list(ARGUMENTS))] * 4 == told(peer, 4)


def test_a_training_command_with_filters_and_options_of_its_own(peer: Peer) -> None:
    options = ("--nproc_per_node=2", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0")
    shown = ("--local-ranks-filter", "0", "--role", "rank", "--tee", "3")
    path = script(peer, TELL + "print(f'loss of {RANK}')\nprint(f'warning of {RANK}', file=sys.stderr)", "train.py")

    done = peer.run(*options, *shown, path, "--job.config_file", "x.toml", env=QUICK)

    assert 0 == done.returncode, done.err
    assert ["['--job.config_file', 'x.toml']"] * 2 == told(peer, 2)
    assert ["[rank0]:loss of 0"] == [line for line in done.out.splitlines() if "loss" in line]
    assert ["[rank0]:warning of 0"] == [line for line in done.err.splitlines() if "warning of" in line]
