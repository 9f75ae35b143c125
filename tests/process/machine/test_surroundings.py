"""Launchers in odd surroundings: closed streams, nohup, background jobs, limits, inherited descriptors."""

from __future__ import annotations

import asyncio
import functools
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib import EntrypointError, LaunchConfig, elastic_launch
from tests.shims import built

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

ROOT = Path(__file__).parents[3]
RUN = f"{sys.executable} -m elasticlib.run --nproc-per-node 1 --preload ''"


def shell(command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a shell command line from the repository's root."""
    return subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that writes what its streams are, and which signals it ignores, beside itself."""
    path = tmp_path / "job.py"
    path.write_text(
        "import os, signal\n"
        "streams = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]\n"
        "ignored = [s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN]\n"
        "open(__file__ + '.txt', 'w').write(repr((streams, ignored)))\n"
    )
    return path


def noted(script: Path) -> tuple[list[str], list[str]]:
    """Return the streams and the ignored signals that the script wrote."""
    streams, ignored = eval(Path(f"{script}.txt").read_text())
    return streams, ignored


CALLS_SCRIPT = "from elasticlib import *; elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), {script!r})()"


@pytest.mark.parametrize("start", ["forkserver", "spawn", "call"])
def test_streams_that_the_launcher_was_started_without_are_nothing(start: str, script: Path) -> None:
    """Never a descriptor of the launcher's own that got the number."""
    call = f'{sys.executable} -c "{CALLS_SCRIPT.format(script=str(script))}"'
    command = call if start == "call" else f"{RUN} --start-method {start} {script}"

    done = shell(f"{command} <&- >&- 2>&-")

    assert 0 == done.returncode
    assert ["/dev/null"] * 3 == noted(script)[0]


def test_signal_ignored_by_nohup_stays_ignored(script: Path) -> None:
    """By the launcher, which would else end the job with the terminal, and by its workers."""
    done = shell(f"trap '' HUP; {RUN} {script}")
    ignored_then = noted(script)[1]
    shell(f"{RUN} {script}")

    assert 0 == done.returncode
    assert ["SIGHUP"] == [name for name in ignored_then if name not in noted(script)[1]]


def test_a_hangup_does_not_end_a_launcher_that_ignores_it(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import os, signal; os.kill(int(os.environ['LAUNCHER']), signal.SIGHUP); print('went on')\n")

    done = shell(f"trap '' HUP; export LAUNCHER=$$; exec {RUN} {script}")

    assert (0, "went on\n") == (done.returncode, done.stdout)


def test_a_background_job_leaves_the_terminals_input_alone(script: Path) -> None:
    """A worker, in a session of its own, would not be stopped by the terminal: it would take the shell's input."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvp("bash", ["bash", "--norc", "-i", "-c", f"set -m; {RUN} {script} & wait"])
    while True:
        try:
            if not os.read(terminal, 4096):
                break
        except OSError:
            break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)

    assert 0 == os.waitstatus_to_exitcode(status)
    assert "/dev/null" == noted(script)[0][0]


def nothing() -> None:
    """Does it."""


def test_inheritable_descriptor_of_the_caller_is_not_kept_open() -> None:
    """Neither by the fork server, for the life of the program, nor by its reaper."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    elastic_launch(LaunchConfig(nproc_per_node=1, preload=("json",)), nothing)()
    os.close(writer)
    os.set_blocking(reader, False)

    assert b"" == os.read(reader, 1)
    os.close(reader)


def test_a_very_high_limit_of_open_files_costs_nothing(script: Path, tmp_path: Path) -> None:
    """Check that only open files are closed: a thousand million system calls would take minutes."""
    shim = {**built("open_files", tmp_path), "OPEN_FILES": "1000000000"}

    done = shell(f"{RUN} {script}", env={**os.environ, **shim})

    assert (0, "") == (done.returncode, done.stderr)
    assert noted(script)[0]


MANY_FILES = """
import os, resource, sys
from elasticlib import LaunchConfig, elastic_launch
from tests.process import duties
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
kept = [open(os.devnull) for _ in range(1100)]
place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"} if sys.argv[2:] else {}
config = LaunchConfig(nproc_per_node=2, preload=(), max_restarts=1, start_method=sys.argv[1], **place)
print(elastic_launch(config, duties.fails_once)())
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork", "forkserver c10d"])
def test_a_caller_may_have_many_files_open(method: str) -> None:
    """More than any call that counts descriptors in bits can name; rounds, restarts and results are as ever."""
    command = [sys.executable, "-c", MANY_FILES, *method.split()]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert "{0: '1', 1: '1'}\n" == done.stdout, done.stderr


FULL = """
import os, resource, sys, threading
from pathlib import Path
from elasticlib import DefaultLogsSpecs, LaunchConfig, Std, elastic_launch
from tests.process import duties

here = Path(sys.argv[1])
kept = []

def fill():
    "Take all descriptors that there are, once the workers are at work."
    duties.wait_until(lambda: all((here / f"round0.rank{rank}").exists() for rank in (0, 1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        while True:
            kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        (here / "begin").rename(here / "go")

(here / "begin").touch()
threading.Thread(target=fill).start()
logs = DefaultLogsSpecs(log_dir=str(here / "logs"), redirects=Std.ALL, tee=Std.ALL)
config = LaunchConfig(nproc_per_node=2, preload=(), max_restarts=1, logs_specs=logs)
results = elastic_launch(config, duties.works_and_fails_once)(here / "go", here)
print(results, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_program_that_fills_its_limit_of_open_files_hinders_no_job(tmp_path: Path) -> None:
    """The launcher lifts its own soft limit for what it needs (reports, a restart with logs) and puts it back."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert "{0: '1', 1: '1'} 64" == done.stdout.splitlines()[-1], done.stderr


def test_a_limit_that_leaves_no_room_is_named(script: Path) -> None:
    """Rule and mend, and an end: no hang."""
    done = shell(f"ulimit -n 40; {RUN.replace('--nproc-per-node 1', '--nproc-per-node 64')} {script}")

    assert 1 == done.returncode
    assert "ulimit" in done.stderr


async def coroutine() -> None:
    """Would only be made, not run."""


def generator() -> object:
    """Would only be made, not run."""
    yield


class Makes:
    """Calls make what would have to be run."""

    async def __call__(self) -> None:
        """Would only be made, not run."""


class Works:
    """Has a coroutine function, and runs it."""

    func = staticmethod(coroutine)

    def __call__(self) -> str:
        asyncio.run(self.func())
        return "done"


@pytest.mark.parametrize(
    "function",
    [
        coroutine,
        generator,
        Makes(),
        Makes().__call__,
        functools.partial(Makes()),
        functools.partial(functools.lru_cache(coroutine)),
        functools.lru_cache(functools.partial(generator)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_that_only_makes_a_coroutine_or_generator_is_refused(function: object) -> None:
    with pytest.raises(EntrypointError, match="only creates a coroutine or generator"):
        elastic_launch(LaunchConfig(nproc_per_node=1), function)()  # type: ignore[arg-type]


def test_an_object_that_runs_a_coroutine_when_it_is_called_is_not_refused() -> None:
    assert {0: "done"} == elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), Works())()


def test_a_nul_character_is_refused_before_anything_starts(script: Path) -> None:
    with pytest.raises(EntrypointError, match="NUL"):
        elastic_launch(LaunchConfig(nproc_per_node=1), script)("a\0b")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_preload_that_would_be_ignored_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="leave preload out"):
        elastic_launch(LaunchConfig(nproc_per_node=1, preload=("json",), start_method=method), nothing)()  # type: ignore[arg-type]


def has_torch() -> str:
    """Which torch a worker gets."""
    import torch

    return str(torch.__file__)


def test_a_torch_that_cannot_be_imported_ahead_is_imported_by_the_workers(tmp_path: Path) -> None:
    """The default serves most; where it does not, it must not stand in the way."""
    fake = tmp_path / "torch.py"
    fake.write_text("import os\nos.environ.get('RANK')\n")
    program = tmp_path / "program.py"
    program.write_text(
        "from elasticlib import LaunchConfig, elastic_launch\n"
        "from tests.process.machine.test_surroundings import has_torch\n"
        "print(elastic_launch(LaunchConfig(nproc_per_node=1), has_torch)())\n"
    )

    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert f"{ {0: str(fake)} }\n" == done.stdout
    assert done.stderr == ""  # a project's own module is never imported ahead


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_functions_run_under_the_callers_interpreter_options(method: str) -> None:
    """``-O`` removes asserts in the workers as it does in the program."""
    code = (
        "import sys\nfrom elasticlib import LaunchConfig, elastic_launch\n"
        "def seen():\n    import sys\n    return sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions\n"
        f"config = LaunchConfig(nproc_per_node=1, preload=(), start_method={method!r})\n"
        "sys.exit(0 if elastic_launch(config, seen)()[0] == seen() else 4)\n"
    )

    done = subprocess.run(
        [sys.executable, "-O", "-X", "dev", "-W", "ignore", "-c", code], cwd=ROOT, timeout=60, check=False
    )

    assert 0 == done.returncode


CALL = "import elasticlib as e; e.elastic_launch(e.LaunchConfig(nproc_per_node=1, start_method={method!r}), print)()"
WITHOUT = {"/proc": "mount --bind {empty} /proc", "/dev/null": "mount --bind {empty} /dev"}
"""Commands that hide a path of the machine, each for a mount namespace of its own."""


def shell_without(missing: str, empty: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run *command* where a part of the machine is *missing*; *empty* is a folder that takes its place."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    return shell(f"unshare --mount sh -c '{WITHOUT[missing].format(empty=empty)} && exec \"$@\"' sh {command}")


@pytest.mark.parametrize("missing", WITHOUT)
@pytest.mark.parametrize("start", ["command", "forkserver", "spawn", "fork"])
def test_machine_without_proc_or_dev_null_is_an_error_of_one_line(start: str, missing: str, tmp_path: Path) -> None:
    """As in a container or chroot whose maker forgot them."""
    run = f"{RUN} job.py" if start == "command" else f'{sys.executable} -c "{CALL.format(method=start)}"'

    done = shell_without(missing, tmp_path, run)

    *before, last = done.stderr.splitlines()
    assert 1 == done.returncode
    assert "" == done.stdout
    assert f"elasticlib needs {missing}" in last
    if start == "command":
        assert [] == before and last.startswith("elasticrun: ")
    else:
        assert last.startswith("elasticlib.errors.StartError: ")


@pytest.mark.parametrize("missing", WITHOUT)
def test_help_is_given_on_any_machine(missing: str, tmp_path: Path) -> None:
    done = shell_without(missing, tmp_path, f"{sys.executable} -m elasticlib.run --help")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("usage: elasticrun ")
