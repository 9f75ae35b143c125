"""Rows 087 to 102: exit codes, the summary, error files, and the error recorder."""

from __future__ import annotations

import json
import pathlib
import platform
import re
import signal
import sys
import time

import pytest

from tests.checklist._workers import QUICK, names, script, summary, wait_for_files
from tests.checklist.peers import Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

TWO = "--nproc-per-node=2"


@pytest.mark.row(87)
def test_a_job_whose_workers_all_exit_with_0_exits_with_0(peer: Peer) -> None:
    done = peer.run(TWO, script(peer, "note(f'done{RANK}')\nsys.exit(0)"), env=QUICK)

    assert (0, ["done0", "done1"]) == (done.returncode, names(peer, "done*"))


@pytest.mark.row(88)
def test_workers_exit_code_is_in_the_summary_and_the_launchers_is_1(peer: Peer) -> None:
    done = peer.run(script(peer, "sys.exit(3)"), env=QUICK)

    assert (1, 3) == (done.returncode, summary(done.err).root.exitcode)


@pytest.mark.row(89)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_summary_names_the_signal_that_ended_a_worker(peer: Peer, signum: signal.Signals) -> None:
    done = peer.run(script(peer, f"os.kill(os.getpid(), {int(signum)})"), env=QUICK)

    root = summary(done.err).root
    assert (1, -signum) == (done.returncode, root.exitcode)
    assert signum.name in root.text


@pytest.mark.row(90)
def test_peers_of_a_failed_worker_are_terminated_then_killed(peer: Peer) -> None:
    """Rank 0 ignores SIGTERM, rank 1 ends by it."""
    path = script(
        peer,
        "note(f'pid{RANK}', os.getpid())\n"
        "if RANK == 2:\n    wait_for('up0', 'up1')\n    sys.exit(1)\n"
        "heed(ignore if RANK == 0 else sys.exit)\n"
        "idle()",
    )

    done = peer.run("--nproc-per-node=3", "--shutdown-timeout=1", path, env=QUICK)

    assert (1, 2) == (done.returncode, summary(done.err).root.rank)
    assert ["got0.SIGTERM", "got1.SIGTERM"] == names(peer, "got*")
    assert not peer.alive()


@pytest.mark.row(91)
def test_summary_shows_every_known_detail_of_each_failure(peer: Peer) -> None:
    """Rank 1 fails; rank 0, told to end for that, fails too."""
    path = script(
        peer,
        "note(f'pid{RANK}', os.getpid())\n"
        "def fail(code=5):\n    leave_error(f'ValueError: bad value {RANK}', 1700000001 - RANK)\n    os._exit(code)\n"
        "if RANK == 0:\n    heed(fail)\n    idle()\n"
        "wait_for('up0')\n"
        "fail(4)",
    )

    done = peer.run(TWO, path, env=QUICK)

    reported = summary(done.err)
    (other,), root = reported.others, reported.root
    assert "script.py FAILED" == reported.title
    for each, rank, code in ((other, 0, 5), (root, 1, 4)):
        assert (rank, rank, code) == (each.rank, each.local_rank, each.exitcode)
        assert (peer.folder / f"pid{rank}").read_text() == str(each.pid)
        seconds = time.strptime(each.time.partition(".")[0], "%Y-%m-%d_%H:%M:%S")
        assert 1700000001 - rank == time.mktime(seconds)
        assert each.host in (platform.node(), "localhost")
        assert each.error_file.endswith(f"/attempt_0/{rank}/error.json")
        assert re.search(rf"traceback : Traceback .*\n +ValueError: bad value {rank}$", each.text, re.MULTILINE)


@pytest.mark.row(92)
def test_summary_has_the_traceback_of_a_recorded_worker_if_not_shown(peer: Peer) -> None:
    """Our summary only refers to a traceback that is on the console."""
    code = (
        "from {elastic}.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('a bad value')\nmain()"
    )

    done = peer.run("--redirects", "3", peer.script(code), env=QUICK)

    text = summary(done.err).root.text
    assert 1 == done.returncode
    assert re.search(r'File ".*script\.py", line 4, in main\n +raise ValueError\(.a bad value.\)', text)
    assert re.search(r"^ +ValueError: a bad value$", text, re.MULTILINE)


@pytest.mark.row(93, improvement=True)
def test_without_record_the_summary_has_the_traceback_too(peer: Peer) -> None:
    """Torch hints at its decorator there. Where stderr is on the console, the summary refers to it."""
    script = peer.script("def main():\n    raise ValueError('a bad value')\nmain()")

    shown = peer.run(script, env=QUICK)
    logged = peer.run("--redirects", "3", script, env=QUICK)

    assert (1, 1) == (shown.returncode, logged.returncode)
    for text in (shown.err, summary(logged.err).root.text):
        assert re.search(r'File ".*script\.py", line 2, in main\n +raise ValueError\(.a bad value.\)', text)
        assert re.search(r"^ *ValueError: a bad value$", text, re.MULTILINE)
    assert re.search(r"traceback : ValueError: a bad value \(.*\): see above$", shown.err, re.MULTILINE)


@pytest.mark.row(93)
def test_summary_shows_error_file_as_not_available_if_nothing_is_known(peer: Peer) -> None:
    done = peer.run("--no-python", "sh", "-c", "exit 7")

    root = summary(done.err).root
    assert (1, 7, "<N/A>") == (done.returncode, root.exitcode, root.error_file)


@pytest.mark.row(94)
def test_error_file_of_torchs_own_record_is_understood(peer: Peer) -> None:
    """Run as a program: its error file is all that is known."""
    code = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('a bad value')\nmain()"
    )

    done = peer.run("--no-python", sys.executable, peer.script(code))

    text = summary(done.err).root.text
    assert 1 == done.returncode
    assert re.search(r'File ".*script\.py", line 4, in main\n +raise ValueError\(.a bad value.\)', text)
    assert re.search(r"^ +ValueError: a bad value$", text, re.MULTILINE)


@pytest.mark.row(95)
def test_a_plain_message_in_an_error_file_is_understood(peer: Peer) -> None:
    path = script(
        peer,
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': 'told by a library in C++', 'timestamp': 1700000000}, file)\n"
        "os._exit(7)",
    )

    done = peer.run(path, env=QUICK)

    root = summary(done.err).root
    assert (1, 7) == (done.returncode, root.exitcode)
    assert "told by a library in C++" in root.text


@pytest.mark.row(96, improvement=True)
def test_truncated_error_file_hides_no_failure_and_prevents_no_restart(peer: Peer) -> None:
    path = script(
        peer,
        "note(f'attempt{RESTART}')\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        '    file.write(\'{"message": {"mess\')\n'
        "os._exit(7)",
    )

    done = peer.run("--max-restarts=1", path, env=QUICK)

    assert (1, 7) == (done.returncode, summary(done.err).root.exitcode)
    assert ["attempt0", "attempt1"] == names(peer, "attempt*")


@pytest.mark.row(97)
def test_the_root_cause_is_the_failure_with_the_earliest_time(peer: Peer) -> None:
    """Rank 1 failed first, and rank 0 was the first to end."""
    path = script(
        peer,
        "if RANK == 1:\n"
        "    heed(lambda: os._exit(1))\n"
        "    leave_error('ValueError: first', time.time())\n"
        "    note('first', int(time.time()))\n"
        "    idle()\n"
        "wait_for('up1')\n"
        "while int(time.time()) <= int(open('first').read()):\n    time.sleep(0.01)\n"
        "leave_error('ValueError: second', time.time())\n"
        "os._exit(1)",
    )

    done = peer.run(TWO, path, env=QUICK)

    reported = summary(done.err)
    assert (1, 1, [0]) == (done.returncode, reported.root.rank, [each.rank for each in reported.others])
    assert "ValueError: first" in reported.root.text


@pytest.mark.row(98)
def test_launchers_own_error_file_gets_the_root_error_and_exit_code(peer: Peer) -> None:
    """Rank 0 fails because it was told to end."""
    path = script(
        peer,
        "def fail(code=5):\n    leave_error(f'ValueError: bad value {RANK}', 1700000001 - RANK)\n    os._exit(code)\n"
        "if RANK == 0:\n    heed(fail)\n    idle()\n"
        "wait_for('up0')\n"
        "fail(4)",
    )
    mine = peer.folder / "mine.json"

    peer.run(TWO, path, env={**QUICK, "TORCHELASTIC_ERROR_FILE": str(mine)})

    entry = json.loads(mine.read_text())["message"]
    assert ("ValueError: bad value 1", 4) == (entry["message"], entry["errorCode"])


@pytest.mark.row(102, improvement=True)
def test_job_with_a_worker_in_uninterruptible_sleep_ends_with_an_error(peer: Peer) -> None:
    """The worker is the parent in a vfork whose child never calls exec: the kernel has it wait in state D."""
    path = script(
        peer,
        "import ctypes\n"
        "note('pid', os.getpid())\n"
        "CLONE, CLONE_VFORK = {'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x4000\n"
        "if ctypes.PyDLL(None).syscall(CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:\n"
        "    note('asleep')\n"
        "    while True:\n        signal.pause()",
    )
    variables = {**QUICK, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}

    process = peer.start("--shutdown-timeout=1", "--max-restarts=3", path, env=variables)
    wait_for_files(peer, "asleep", of=process)
    pid = (peer.folder / "pid").read_text()
    assert "D" == pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    done = peer.finish(process, limit=30)

    assert 1 == done.returncode, done.err


@pytest.mark.row(99)
def test_an_exit_is_not_recorded_and_keeps_its_code(peer: Peer) -> None:
    """An exception, for comparison, is recorded."""
    done = peer.python(
        "import os, sys\n"
        "from {elastic}.multiprocessing.errors import record\n"
        "def fails():\n"
        "    raise ValueError('bad')\n"
        "os.environ['TORCHELASTIC_ERROR_FILE'] = 'exception.json'\n"
        "try:\n"
        "    record(fails)()\n"
        "except ValueError:\n"
        "    print('raised')\n"
        "os.environ['TORCHELASTIC_ERROR_FILE'] = 'exit.json'\n"
        "record(sys.exit)(0)\n"
        "print('went on')\n"
        "record(sys.exit)(3)\n"
        "print('never')\n"
    )

    assert (3, "raised\nwent on\n") == (done.returncode, done.out)
    assert ["exception.json", "program0.py"] == sorted(path.name for path in peer.folder.iterdir())


@pytest.mark.row(100)
def test_record_writes_nothing_and_reraises_without_a_named_error_file(peer: Peer) -> None:
    done = peer.python(
        "import os\n"
        "from {elastic}.multiprocessing.errors import record\n"
        "def fails():\n"
        "    raise ValueError('bad')\n"
        "for value in (None, ''):\n"
        "    if value is not None:\n"
        "        os.environ['TORCHELASTIC_ERROR_FILE'] = value\n"
        "    try:\n"
        "        record(fails)()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )

    assert (0, "bad\nbad\n") == (done.returncode, done.out)
    assert ["program0.py"] == [path.name for path in peer.folder.iterdir()]


@pytest.mark.row(101)
def test_an_error_of_failed_workers_without_a_failure_is_refused(peer: Peer) -> None:
    errors = peer.module("multiprocessing.errors")

    with pytest.raises(AssertionError):
        errors.ChildFailedError("train.py", {})
