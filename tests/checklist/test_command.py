"""Rows 035 to 045: what a worker runs; and the command lines of torchrun's own documentation, as they are there."""

from __future__ import annotations

import os
import sys

import pytest

from tests.checklist._workers import NEWCOMERS, QUICK, listens, names, script, wait_for_files
from tests.checklist.peers import LIMIT, Peer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

COMMAND_LINE = "print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'))"


@pytest.mark.row(35)
def test_the_command_is_interpreter_u_script_and_arguments(peer: Peer) -> None:
    done = peer.run(peer.script(COMMAND_LINE), "--lr", "1")

    assert f"{[sys.executable, '-u', 'script.py', '--lr', '1']}\n" == done.out


@pytest.mark.row(36)
def test_python_exec_replaces_the_interpreter(peer: Peer) -> None:
    python = peer.folder / "python"
    python.symlink_to(sys.executable)

    done = peer.run(peer.script(COMMAND_LINE), env={"PYTHON_EXEC": str(python), "VIRTUAL_ENV": sys.prefix})

    assert f"{[str(python), '-u', 'script.py']}\n" == done.out


@pytest.mark.row(37)
def test_a_module_runs_with_its_arguments(peer: Peer) -> None:
    peer.script("", "pkg/__init__.py")
    peer.script("import sys; print(__name__, __package__, sys.argv[1:])", "pkg/mod.py")

    done = peer.run("-m", "pkg.mod", "a", "-m")

    assert "__main__ pkg ['a', '-m']\n" == done.out


@pytest.mark.row(38)
def test_no_python_runs_the_program_itself(peer: Peer) -> None:
    done = peer.run("--no-python", "/bin/sh", "-c", 'echo "$0 $1 of $WORLD_SIZE"', "a", "b")

    assert "a b of 1\n" == done.out


@pytest.mark.row(40)
def test_run_path_runs_the_file_as_main_even_with_no_python(peer: Peer) -> None:
    script = peer.script("import sys; print(__name__, sys.argv, flush=True)", "data")

    done = peer.run("--run-path", "--no-python", script, "a")

    assert "__main__ ['data', 'a']\n" == done.out


@pytest.mark.row(41)
def test_run_path_counts_an_exit_with_0_as_success(peer: Peer) -> None:
    done = peer.run("--run-path", peer.script("import sys; print('here', flush=True); sys.exit(0)"))

    assert (0, "here\n") == (done.returncode, done.out)


@pytest.mark.row(42)
def test_local_rank_in_arguments_is_each_workers_own(peer: Peer) -> None:
    script = peer.script("import sys; sys.stdout.write(f'{sys.argv[1:]}\\n')")  # in one piece, unlike print

    done = peer.run("--nproc-per-node", "2", script, "a${local_rank}", "$local_rank.b", "${other}")

    assert [f"{[f'a{rank}', f'{rank}.b', '${other}']}" for rank in (0, 1)] == sorted(done.out.splitlines())


@pytest.mark.row(43)
def test_workers_have_the_launchers_streams_unless_redirected(peer: Peer) -> None:
    script = peer.script("import os; print(*(os.readlink(f'/proc/self/fd/{number}') for number in (0, 1, 2)))")

    process = peer.start(script)
    streams = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)]

    assert streams == peer.finish(process).out.split()


@pytest.mark.row(44)
@pytest.mark.parametrize(("options", "first"), [((), ["--local-rank=0"]), (("--use-env",), [])])
def test_legacy_command_puts_local_rank_before_the_scripts_arguments(
    peer: Peer, options: tuple[str, ...], first: list[str]
) -> None:
    script = peer.script("import os, sys; print(sys.argv[1:], os.environ['LOCAL_RANK'])")

    done = peer.run(*options, script, "--lr", "1", legacy=True)

    assert f"{[*first, '--lr', '1']} 0\n" == done.out
    assert "deprecated" in done.err


@pytest.mark.row(45)
def test_the_legacy_command_has_no_local_rank_for_a_program(peer: Peer) -> None:
    done = peer.run("--no-python", "echo", "ran", legacy=True)

    assert 0 != done.returncode
    assert "" == done.out
    assert "--use-env" in done.err


SCRIPT = "YOUR_TRAINING_SCRIPT.py"
ARGUMENTS = ("--arg1", "--train-script-args=x y")
NOTE_ARGUMENTS = "note(f'rank{RANK}.of{WORLD}', sys.argv[1:])\n"


def arguments_of(peer: Peer, world: int) -> list[str]:
    """Return the arguments that the workers of that world received."""
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
    done = peer.run(*options, script(peer, NOTE_ARGUMENTS, SCRIPT), *ARGUMENTS, env=QUICK)

    assert 0 == done.returncode, done.err
    assert [str(list(ARGUMENTS))] * 2 == arguments_of(peer, 2)


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
    path = script(peer, once + NOTE_ARGUMENTS, SCRIPT)

    nodes = [peer.start(*options, f"--rdzv-endpoint={host}", path, *ARGUMENTS, env=QUICK) for _ in range(2)]

    assert [0, 0] == [peer.finish(each).returncode for each in nodes]
    assert [str(list(ARGUMENTS))] * 2 == arguments_of(peer, 2)


def test_an_elastic_job_that_a_node_joins_later(peer: Peer) -> None:
    """A variable shortens the time in which more nodes are waited for."""
    port = free_port()
    options = ("--nnodes=1:4", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=job7", "--rdzv-backend=c10d")
    place = f"--rdzv-endpoint=localhost:{port}"
    path = script(peer, NOTE_ARGUMENTS + "while WORLD == 2:\n    signal.pause()", SCRIPT)
    env = {**NEWCOMERS, "PET_RDZV_CONF": "last_call_timeout=2"}

    first = peer.start(*options, place, path, *ARGUMENTS, env=env)
    assert peer.wait_until(lambda: listens(port) or first.poll() is not None, LIMIT)
    wait_for_files(peer, "rank0.of2", "rank1.of2", of=first)
    second = peer.start(*options, place, path, *ARGUMENTS, env=env)

    assert [0, 0] == [peer.finish(each).returncode for each in (first, second)]
    assert [str(list(ARGUMENTS))] * 4 == arguments_of(peer, 4)


def test_a_training_command_with_filters_and_options_of_its_own(peer: Peer) -> None:
    options = ("--nproc_per_node=2", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0")
    shown = ("--local-ranks-filter", "0", "--role", "rank", "--tee", "3")
    path = script(
        peer, NOTE_ARGUMENTS + "print(f'loss of {RANK}')\nprint(f'warning of {RANK}', file=sys.stderr)", "train.py"
    )

    done = peer.run(*options, *shown, path, "--job.config_file", "x.toml", env=QUICK)

    assert 0 == done.returncode, done.err
    assert ["['--job.config_file', 'x.toml']"] * 2 == arguments_of(peer, 2)
    assert ["[rank0]:loss of 0"] == [line for line in done.out.splitlines() if "loss" in line]
    assert ["[rank0]:warning of 0"] == [line for line in done.err.splitlines() if "warning of" in line]
