"""Rows 103 to 116: what signals do to a job, and that none leaves a process behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.checklist._workers import NEWCOMERS, QUICK, Team, names, script, wait_for_files
from tests.checklist.peers import LIMIT, Finished, Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.14)]

TWO = "--nproc-per-node=2"
NEVER = "--shutdown-timeout=600"
OBEYS = "heed(sys.exit)\nidle()"
IGNORES = "heed(ignore)\nidle()"
AT_ONCE = 20.0
"""Seconds in which a loaded machine does what takes none, below all time-outs that are not under test."""


def started(peer: Peer, code: str, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A job of two workers that are all at work."""
    process = peer.start(TWO, *options, script(peer, code), env={**QUICK, **(env or {})})
    wait_for_files(peer, "up0", "up1", of=process)
    return process


def ended_by(peer: Peer, process: subprocess.Popen[str], signum: int, limit: float = AT_ONCE) -> Finished:
    """Send the signal to the command; return the command's result."""
    process.send_signal(signum)
    return peer.finish(process, limit)


def leaves_nothing(peer: Peer) -> bool:
    """Return whether all descendants of the row's commands have ended or end within 5 s."""
    return peer.wait_until(lambda: not peer.alive(), 5)


def ends(number: int, name: str, code: str, *options: str, **facts: Any) -> Any:
    """A row: the launcher gets the signal *name*, its workers run *code*."""
    marker = pytest.mark.row(number)
    return pytest.param(name, code, options, facts, marks=marker, id=f"{number} {name} {' '.join(options)}")


@pytest.mark.parametrize(
    ("name", "code", "options", "facts"),
    [
        ends(103, "SIGTERM", OBEYS, NEVER),
        ends(104, "SIGINT", OBEYS, NEVER),
        ends(104, "SIGHUP", OBEYS, NEVER),
        ends(104, "SIGQUIT", OBEYS, NEVER, "--signals-to-handle=SIGQUIT"),  # else it shows stacks here
        ends(105, "SIGUSR1", OBEYS, NEVER, "--signals-to-handle=SIGTERM,SIGUSR1"),
        ends(106, "SIGTERM", OBEYS, NEVER, "--signals-to-handle=SIGWHAT,SIGTERM", warning="SIGWHAT"),
        ends(107, "SIGTERM", IGNORES, "--shutdown-timeout=2", least=2.0),
        # Without the variable the timeout would be 30 s, and the row's limit is less.
        ends(109, "SIGTERM", IGNORES, variables={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}, least=2.0),
    ],
)
def test_workers_get_the_launchers_signal_and_the_job_ends(
    peer: Peer, name: str, code: str, options: Sequence[str], facts: Mapping[str, Any]
) -> None:
    """Workers that ignore it are killed after the shutdown timeout; what is no signal is warned of."""
    process = started(peer, code, *options, env=facts.get("variables"))

    done = ended_by(peer, process, signal.Signals[name])

    assert 1 == done.returncode, done.err
    assert [f"got0.{name}", f"got1.{name}"] == names(peer, "got*"), done.err
    assert facts.get("warning", "") in done.err
    assert facts.get("least", 0.0) <= done.seconds
    assert leaves_nothing(peer)


@pytest.mark.row(108, improvement=True)
def test_the_shutdown_timeout_holds_also_when_a_peer_failed(peer: Peer) -> None:
    """Torch takes 30 s there."""
    path = script(peer, "if RANK == 1:\n    wait_for('up0')\n    sys.exit(1)\n" + IGNORES)

    done = peer.run(TWO, "--shutdown-timeout=1", path, env=QUICK, limit=AT_ONCE)

    assert (1, ["got0.SIGTERM"]) == (done.returncode, names(peer, "got*"))
    assert leaves_nothing(peer)


@pytest.mark.row(110, improvement=True)
def test_three_rapid_interrupts_leave_no_orphan(peer: Peer) -> None:
    process = started(peer, IGNORES, NEVER)
    process.send_signal(signal.SIGINT)
    wait_for_files(peer, "got0.SIGINT", "got1.SIGINT")
    for _ in range(2):
        if not peer.wait_until(lambda: process.poll() is not None, 0.3):  # as fast as one hits Ctrl-C
            process.send_signal(signal.SIGINT)

    assert peer.wait_until(lambda: process.poll() is not None, AT_ONCE)
    assert leaves_nothing(peer)


@pytest.mark.row(111)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_rendezvous_ends_the_launcher_quickly(peer: Peer, signum: signal.Signals) -> None:
    """The second node never comes."""
    process = Team(peer, ("--nnodes=2", NEVER, script(peer, "note('ran')"))).node()

    assert process.poll() is None
    assert 0 != ended_by(peer, process, signum).returncode
    assert leaves_nothing(peer)
    assert [] == names(peer, "ran")


@pytest.mark.row(112, improvement=True)
def test_a_signal_while_workers_are_being_started_leaves_no_orphan(peer: Peer) -> None:
    """There are many of them, and the first says at once that it is there."""
    path = peer.folder / "program"
    path.write_text("#!/bin/sh\n: > up$LOCAL_RANK\nexec sleep 600 > /dev/null 2>&1\n")
    path.chmod(0o755)
    process = peer.start("--nproc-per-node=200", "--shutdown-timeout=1", "--no-python", "./program")
    first, last = peer.folder / "up0", peer.folder / "up199"
    deadline = time.monotonic() + LIMIT
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        pass  # the moment is short

    assert first.exists() and not last.exists()
    assert 0 != ended_by(peer, process, signal.SIGTERM, LIMIT).returncode
    assert leaves_nothing(peer)


@pytest.mark.row(113, improvement=True)
def test_no_worker_outlives_a_launcher_that_was_killed(peer: Peer) -> None:
    process = started(peer, IGNORES)

    process.kill()

    assert leaves_nothing(peer)


GRANDCHILD = """
import subprocess
quiet = subprocess.DEVNULL
subprocess.Popen(["sh", "-c", {0!r} + "touch grandchild; while :; do sleep 600; done"], stdout=quiet, stderr=quiet)
wait_for("grandchild")
"""


@pytest.mark.row(114, improvement=True)
def test_grandchildren_of_a_crashed_worker_end_with_the_job(peer: Peer) -> None:
    path = script(peer, GRANDCHILD.format("") + "os.kill(os.getpid(), signal.SIGKILL)")

    done = peer.run(path, env=QUICK)

    assert (1, ["grandchild"]) == (done.returncode, names(peer, "grandchild"))
    assert leaves_nothing(peer)


@pytest.mark.row(115, improvement=True)
def test_grandchildren_that_ignore_the_signal_are_killed(peer: Peer) -> None:
    """The worker itself obeys."""
    process = started(peer, GRANDCHILD.format("trap '' TERM; ") + OBEYS, "--shutdown-timeout=1")

    done = ended_by(peer, process, signal.SIGTERM)

    assert 1 == done.returncode, done.err
    assert leaves_nothing(peer)


@pytest.mark.row(116)
def test_a_replacement_can_join_after_a_node_was_ended_by_a_signal(peer: Peer) -> None:
    """The rendezvous is not closed by it."""
    path = script(
        peer,
        "node = sys.argv[1]\nnote(f'{node}.of{WORLD}')\n"
        "while node != 'lost' and not (WORLD == 2 and os.path.exists('new.of2')):\n    time.sleep(0.01)\n"
        "note(f'{node}.last')\n"
        "if node == 'lost':\n    idle()",
    )
    conf = "keep_alive_interval=2,keep_alive_max_attempt=3"
    team = Team(peer, ("--nnodes=1:2", path), NEWCOMERS, conf)

    stays, lost = team.node("stays"), team.node("lost")
    wait_for_files(peer, "lost.last", "stays.of2", of=lost)
    ended = ended_by(peer, lost, signal.SIGTERM)
    new = team.node("new")

    assert 1 == ended.returncode
    assert [0, 0] == [peer.finish(each).returncode for each in (new, stays)]
    assert ["new.last", "stays.last"] == names(peer, "[ns]*.last")
