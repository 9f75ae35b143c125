"""Rows 103 to 116: what signals do to a job, and that none leaves a process behind."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.checklist._workers import NEWCOMERS, QUICK, Team, came, names, script
from tests.checklist.peers import LIMIT, Finished, Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

TWO = "--nproc-per-node=2"
NEVER = "--shutdown-timeout=600"
OBEYS = "heed(sys.exit)\nidle()"
IGNORES = "heed(ignore)\nidle()"
AT_ONCE = 20.0
"""Seconds in which a loaded machine does what takes none, below all time-outs that are not under test."""


def started(peer: Peer, code: str, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A job of two workers that are all at work."""
    process = peer.start(TWO, *options, script(peer, code), env={**QUICK, **(env or {})})
    came(peer, "up0", "up1", of=process)
    return process


def ended_by(peer: Peer, process: subprocess.Popen[str], signum: int, limit: float = AT_ONCE) -> Finished:
    """How the command ends when it gets the signal."""
    process.send_signal(signum)
    return peer.finish(process, limit)


def leaves_nothing(peer: Peer) -> bool:
    """Whether all that descends from the row's commands is gone; what is told to die may take a moment for that."""
    return peer.wait_until(lambda: not peer.alive(), 5)


@pytest.mark.row(103)
def test_sigterm_reaches_the_workers_and_ends_the_job(peer: Peer) -> None:
    process = started(peer, OBEYS, NEVER)

    done = ended_by(peer, process, signal.SIGTERM)

    assert 1 == done.returncode, done.err
    assert ["told0.SIGTERM", "told1.SIGTERM"] == names(peer, "told*")
    assert leaves_nothing(peer)


@pytest.mark.row(104)
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT"])
def test_the_workers_get_the_same_signal_as_the_launcher(peer: Peer, name: str) -> None:
    asked = ["--signals-to-handle=SIGQUIT"] if name == "SIGQUIT" else []  # else it shows stacks here
    process = started(peer, OBEYS, NEVER, *asked)

    done = ended_by(peer, process, signal.Signals[name])

    assert 1 == done.returncode, done.err
    assert [f"told0.{name}", f"told1.{name}"] == names(peer, "told*")
    assert leaves_nothing(peer)


@pytest.mark.row(105)
def test_a_listed_signal_is_passed_on_and_ends_the_job(peer: Peer) -> None:
    process = started(peer, OBEYS, NEVER, "--signals-to-handle=SIGTERM,SIGUSR1")

    done = ended_by(peer, process, signal.SIGUSR1)

    assert 1 == done.returncode, done.err
    assert ["told0.SIGUSR1", "told1.SIGUSR1"] == names(peer, "told*"), done.err


@pytest.mark.row(106)
def test_a_name_that_is_no_signal_is_warned_of_and_the_others_are_handled(peer: Peer) -> None:
    process = started(peer, OBEYS, NEVER, "--signals-to-handle=SIGWHAT,SIGTERM")

    done = ended_by(peer, process, signal.SIGTERM)

    assert (1, True) == (done.returncode, "SIGWHAT" in done.err)
    assert ["told0.SIGTERM", "told1.SIGTERM"] == names(peer, "told*")


@pytest.mark.row(107)
def test_a_worker_that_ignores_the_signal_is_killed_after_the_shutdown_timeout(peer: Peer) -> None:
    process = started(peer, IGNORES, "--shutdown-timeout=2")

    done = ended_by(peer, process, signal.SIGTERM)

    assert 1 == done.returncode, done.err
    assert ["told0.SIGTERM", "told1.SIGTERM"] == names(peer, "told*")
    assert 2 <= done.seconds
    assert leaves_nothing(peer)


@pytest.mark.row(108, improvement=True)
def test_the_shutdown_timeout_holds_also_when_a_peer_failed(peer: Peer) -> None:
    """Torch takes 30 s there."""
    path = script(peer, "if RANK == 1:\n    wait_for('up0')\n    sys.exit(1)\n" + IGNORES)

    done = peer.run(TWO, "--shutdown-timeout=1", path, env=QUICK, limit=AT_ONCE)

    assert (1, ["told0.SIGTERM"]) == (done.returncode, names(peer, "told*"))
    assert leaves_nothing(peer)


@pytest.mark.row(109)
def test_a_variable_gives_the_shutdown_timeout_when_the_option_is_absent(peer: Peer) -> None:
    """Without it the timeout would be 30 s, and the row's limit is less."""
    process = started(peer, IGNORES, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})

    done = ended_by(peer, process, signal.SIGTERM)

    assert (1, True) == (done.returncode, 2 <= done.seconds)
    assert leaves_nothing(peer)


@pytest.mark.row(110, improvement=True)
def test_three_rapid_interrupts_leave_no_orphan(peer: Peer) -> None:
    process = started(peer, IGNORES, NEVER)
    process.send_signal(signal.SIGINT)
    came(peer, "told0.SIGINT", "told1.SIGINT")
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
def test_the_grandchildren_of_a_crashed_worker_are_gone_with_the_job(peer: Peer) -> None:
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
    came(peer, "lost.last", "stays.of2", of=lost)
    ended = ended_by(peer, lost, signal.SIGTERM)
    new = team.node("new")

    assert 1 == ended.returncode
    assert [0, 0] == [peer.finish(each).returncode for each in (new, stays)]
    assert ["new.last", "stays.last"] == names(peer, "[ns]*.last")
