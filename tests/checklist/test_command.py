"""Rows 035 to 045: what a worker runs."""

from __future__ import annotations

import os
import sys

import pytest

from tests.checklist.peers import Peer

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
def test_run_path_runs_the_file_as_main_whatever_no_python_says(peer: Peer) -> None:
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
