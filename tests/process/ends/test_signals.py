"""Signals to the launcher: each reaches the workers, ends the job in time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib import LaunchConfig, LaunchInterrupted, SignalException, elastic_launch
from elasticlib.processes import _reaper
from elasticlib.workers.spawner._stuck import STUCK
from tests.process import duties
from tests.process.launches import hold_second_start

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = Path(__file__).parents[3]
AT_ONCE = 8.0
"""Seconds in which a loaded machine still does what takes none; far below the time-outs under test."""
NEVER = "600"
"""A shutdown time-out that no test waits for."""


class Job:
    """A launcher of its own whose two workers note the signals they get."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher: subprocess.Popen[str] | None = None

    def start(self, duty: str, *options: str, command: list[str] | None = None, **environment: str) -> None:
        """Launch a script, or run *command*, that runs *duty*, a call with ``here`` for the job's folder."""
        script = self.folder / "script.py"
        script.write_text(
            f"from pathlib import Path\nfrom tests.process.duties import *\nhere = Path({str(self.folder)!r})\n{duty}\n"
        )
        launch = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", "--preload", "", *options]
        self.launcher = subprocess.Popen(
            [*launch, str(script)] if command is None else command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to the test's group must not end it
        )

    def wait_for(self, *names: str) -> None:
        """Wait until the workers have made files of these names (or patterns)."""
        duties.wait_until(lambda: all(any(self.folder.glob(name)) for name in names) or self.ended())
        assert not self.ended(), self.end()[1]

    def ended(self) -> bool:
        assert self.launcher is not None
        return self.launcher.poll() is not None

    def send(self, signum: int) -> None:
        assert self.launcher is not None
        self.launcher.send_signal(signum)

    def read_until(self, text: str) -> str:
        """The next line of the launcher's stderr that has *text*."""
        assert self.launcher is not None and self.launcher.stderr is not None
        return next(line for line in self.launcher.stderr if text in line)

    def end(self, limit: float = AT_ONCE) -> tuple[int, str]:
        """The launcher's exit status and stderr, at most *limit* seconds from now."""
        assert self.launcher is not None
        _, stderr = self.launcher.communicate(timeout=limit)
        return self.launcher.returncode, stderr

    def pids(self) -> set[int]:
        """Every process that said it was at work, with the chain above it and its grandchildren."""
        files = [*self.folder.glob("round*"), *self.folder.glob("pids*")]
        return {int(pid) for file in files for pid in file.read_text().split()}

    def made(self, *patterns: str) -> list[str]:
        """The names of files that workers have made, of those that fit *patterns*."""
        return sorted(file.name for pattern in patterns for file in self.folder.glob(pattern))

    def noted(self) -> list[str]:
        """Which rank got which signal."""
        return self.made("rank*")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of which nothing may be left when the test ends."""
    job = Job(tmp_path)
    yield job
    launcher = job.launcher
    assert launcher is not None
    if launcher.poll() is None:
        launcher.kill()
        launcher.communicate()
    assert job.pids()
    deadline = time.monotonic() + AT_ONCE
    while (left := {pid for pid in job.pids() if duties.lives(pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert set() == left


ALL_AT_WORK = ("round0.rank0", "round0.rank1")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_handled_signal_reaches_the_workers_as_the_same_signal(name: str, method: str, job: Job) -> None:
    """Rows 103 to 105; SIGQUIT and SIGUSR1 where they were asked for. An end that takes no time is no news."""
    listed = ["--signals-to-handle", f"SIGTERM,{name}"] if name in ("SIGQUIT", "SIGUSR1") else []
    job.start("note_signals(here)", "--shutdown-timeout", NEVER, "--start-method", method, *listed)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.Signals[name])

    status, stderr = job.end()

    assert (1, True) == (status, f"got {name}: its workers were stopped" in stderr)
    assert [f"rank0.{name}", f"rank1.{name}"] == job.noted()
    assert "waiting for" not in stderr


def shell_script(job: Job, text: str) -> str:
    """Write the executable shell script *text* and return its path."""
    program = job.folder / "program"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def duty_in_shell(job: Job, duty: str) -> str:
    """Write a shell script that runs *duty* in Python, and return its path; ``here`` is the job's folder."""
    code = f"from tests.process.duties import *; here = Path({str(job.folder)!r}); {duty}"
    return shell_script(job, f'{sys.executable} -c "{code}"\necho done')


def test_a_program_without_python_gets_the_signal_too(job: Job) -> None:
    program = shell_script(
        job,
        f"trap 'touch {job.folder}/rank$RANK.SIGHUP; exit 0' HUP\n"
        f"echo $$ > {job.folder}/pids$RANK\nmv {job.folder}/pids$RANK {job.folder}/round0.rank$RANK\n"
        "while :; do sleep 0.02; done",
    )
    job.start("", "--shutdown-timeout", NEVER, "--no-python", program)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGHUP)

    status, _ = job.end()

    assert (1, ["rank0.SIGHUP", "rank1.SIGHUP"]) == (status, job.noted())


def test_a_signal_that_is_not_listed_ends_the_launcher_and_nothing_is_left(job: Job) -> None:
    """It acts as on any program; the workers, which get none, are killed with it."""
    job.start("note_signals(here)", "--signals-to-handle", "SIGINT")
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGTERM)

    status, _ = job.end()

    assert (-signal.SIGTERM, []) == (status, job.noted())


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--shutdown-timeout", "1"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": NEVER}),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}),
    ],
    ids=["option", "variable"],
)
def test_worker_that_ignores_the_signal_is_killed_after_the_timeout(
    options: list[str], environment: dict[str, str], job: Job
) -> None:
    """Rows 107 and 109, with a grandchild in a session of its own that ignores all signals."""
    job.start("note_signals(here, ignores=True)", *options, **environment)
    job.wait_for(*ALL_AT_WORK)
    begin = time.monotonic()
    job.send(signal.SIGTERM)

    status, _ = job.end()

    assert 1 == status
    assert 1 <= time.monotonic() - begin
    assert ["rank0.SIGTERM", "rank1.SIGTERM"] == job.noted()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_job_at_once_if_it_is_an_interrupt(first: signal.Signals, job: Job) -> None:
    """The first one is passed on and ignored; Ctrl-C after it means SIGKILL now."""
    job.start("note_signals(here, ignores=True)", "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    job.send(first)
    job.wait_for(f"rank0.{first.name}", f"rank1.{first.name}")
    job.send(signal.SIGINT)

    status, stderr = job.end()

    assert 1 == status
    assert f"got {first.name}: its workers were stopped" in stderr
    assert [f"rank0.{first.name}", f"rank1.{first.name}"] == job.noted()


@pytest.mark.parametrize("repeated", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_that_repeats_its_signal_costs_no_checkpoint(repeated: signal.Signals, job: Job) -> None:
    """The first one's deadline holds: workers that save go on, and hear of no second signal."""
    job.start("saves_until(here / 'go', here)", "--shutdown-timeout", NEVER, LOGLEVEL="INFO")
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGTERM)
    job.wait_for("saving0", "saving1")
    job.send(repeated)
    seen = job.read_until(f"signal {int(repeated)} came while the workers were being stopped")
    (job.folder / "go").touch()

    status, _ = job.end()

    assert 1 == status
    assert "they still have" in seen
    assert ["saved0", "saved1"] == job.made("saved*")


# Signals that announce the end of the time, and end nothing.


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_notice_reaches_the_worker_that_handles_it_and_ends_nothing(name: str, method: str, job: Job) -> None:
    """Rank 0 has a handler, which its forked child inherits; rank 1 has none, and would die of it."""
    duty = f"works_and_notes(here, signal.{name}, handles=os.environ['RANK'] == '0')"
    job.start(duty, "--start-method", method)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.Signals[name])
    job.wait_for(f"rank0.{name}")
    (job.folder / "go").touch()

    status, stderr = job.end()

    assert (0, [f"rank0.{name}"]) == (status, job.noted()), stderr


def test_notice_reaches_the_program_that_a_shell_script_runs(job: Job) -> None:
    """The shell has no handler, and must not die of it."""
    job.start("", "--no-python", duty_in_shell(job, "works_and_notes(here, signal.SIGUSR1, handles=True)"))
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGUSR1)
    job.wait_for("rank0.SIGUSR1", "rank1.SIGUSR1")
    (job.folder / "go").touch()

    status, stderr = job.end()

    assert 0 == status, stderr


BACKGROUND = """
{command} --nproc-per-node 1 {script} &
echo $! > {folder}/draft
mv {folder}/draft {folder}/launcher
wait $!
"""


def test_a_background_job_of_a_shell_script_obeys_an_interrupt(job: Job) -> None:
    """The shell starts it with SIGINT ignored."""
    shell = job.folder / "job.sh"
    command = f"{sys.executable} -m elasticlib.run --preload ''"
    shell.write_text(BACKGROUND.format(command=command, script=job.folder / "script.py", folder=job.folder))
    job.start("note_signals(here)", command=["sh", str(shell)])
    job.wait_for("launcher", "round0.rank0")
    os.kill(int((job.folder / "launcher").read_text()), signal.SIGINT)

    status, _ = job.end()

    assert (1, ["rank0.SIGINT"]) == (status, job.noted())


@pytest.mark.parametrize("handler", ["lambda *_: received.append(1)", "signal.SIG_IGN"])
def test_program_keeps_its_own_handler_of_a_notice_during_a_launch(handler: str, tmp_path: Path) -> None:
    code = (
        "import signal, os\nfrom elasticlib import LaunchConfig, elastic_launch\nfrom tests.process import duties\n"
        f"received = []\nsignal.signal(signal.SIGUSR1, {handler})\nbefore = signal.getsignal(signal.SIGUSR1)\n"
        "job = elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), duties.sends_its_launcher)\n"
        "print(job(os.getpid(), int(signal.SIGUSR1)), signal.getsignal(signal.SIGUSR1) is before, received)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip

    expected = "[1]" if "received" in handler else "[]"
    assert (0, f"{{0: None}} True {expected}\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_a_burst_of_signals_leaves_nothing(pause: float, job: Job) -> None:
    """Row 110: also when they come while the launcher takes leave; its status is then its own or the signal's."""
    job.start("note_signals(here)", "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    while not job.ended():
        job.send(signal.SIGINT)
        time.sleep(pause)  # how fast they come is what is tested

    status, _ = job.end()

    assert status in (1, -signal.SIGINT)


def test_stopped_worker_is_continued_to_receive_the_signal(job: Job) -> None:
    job.start("note_signals(here)", "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    os.kill(int((job.folder / "round0.rank1").read_text().split()[0]), signal.SIGSTOP)
    job.send(signal.SIGTERM)

    status, _ = job.end()

    assert (1, ["rank0.SIGTERM", "rank1.SIGTERM"]) == (status, job.noted())


# Ranks that wait for each other in native code.


def in_native_code(pid: int) -> bool:
    """Return whether a worker that has reported that it runs is waiting now."""
    facts = _reaper.process_facts(pid)
    return facts is not None and facts[0] == b"S"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks_in_native_code_but_the_last_are_killed_early_and_named(method: str, job: Job) -> None:
    job.start("sits_in_native_code(here)", "--shutdown-timeout", NEVER, "--start-method", method)
    job.wait_for(*ALL_AT_WORK)
    workers = [int((job.folder / name).read_text().split()[0]) for name in ALL_AT_WORK]
    duties.wait_until(lambda: all(map(in_native_code, workers)))
    job.send(signal.SIGINT)

    waits = job.read_until("waiting for ranks")
    frees = job.read_until("is in native code")
    job.send(signal.SIGINT)
    status, _ = job.end()

    assert 1 == status
    assert f"waiting for ranks 0-1 (processes {workers[0]}, {workers[1]}) to exit on SIGINT: SIGKILL follows" in waits
    assert "or at once with another Ctrl-C" in waits
    assert f"rank 1 (process {workers[1]}) is in native code" in frees


@pytest.mark.parametrize("where", ["another collective", "a C call", "a lock", "a sleep"])
@pytest.mark.parametrize("count", ["2", "4"])
def test_one_interrupt_ends_a_collective_that_never_completes(where: str, count: str, job: Job) -> None:
    """Check that ranks that receive the signal exit and free the others; else one rank is killed."""
    duty = f"waits_in_a_collective(here, {where!r})"
    job.start(duty, "--shutdown-timeout", NEVER, "--nproc-per-node", count, "--preload", "torch")
    job.wait_for(*(f"round0.rank{rank}" for rank in range(int(count))))
    job.send(signal.SIGINT)

    status, stderr = job.end(STUCK + AT_ONCE)

    assert 1 == status
    assert "got SIGINT: its workers were stopped" in stderr


@pytest.mark.parametrize(
    ("duty", "mark"),
    [
        ("note_signals(here, cleans_up_for={seconds})", "rank0.SIGINT"),
        ("saves_when_interrupted(here, {seconds})", "saved0"),
    ],
    ids=["a handler", "an exception"],
)
def test_saving_rank_keeps_its_time_beside_one_in_native_code(duty: str, mark: str, job: Job) -> None:
    longer = duty.format(seconds=STUCK + 1)
    job.start(f"sits_in_native_code(here) if os.environ['RANK'] == '1' else {longer}", "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGINT)
    job.wait_for(mark)
    job.send(signal.SIGINT)

    status, _ = job.end()

    assert 1 == status


def test_a_checkpoint_that_native_code_writes_is_written_to_its_end(job: Job) -> None:
    """For longer than others are waited for; rank 1 waits for it meanwhile."""
    job.start(f"writes_in_native_code(here, {STUCK + 1:.0f})", "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGINT)
    job.wait_for("saved0")
    job.send(signal.SIGINT)

    status, _ = job.end()

    assert 1 == status
    assert b"whole" == (job.folder / "checkpoint").read_bytes()


def test_a_rank_that_has_taken_note_of_the_signal_may_go_on_in_native_code(job: Job) -> None:
    """Its handler asks it to stop at the end of its step, which takes longer than the others' patience."""
    code = (
        "import ctypes\nrequests = []\nsignal.signal(signal.SIGTERM, lambda *_: requests.append(1))\nat_work(here)\n"
        "while not requests:\n    time.sleep(0.01)\n"
        f"clock = time.monotonic()\nwhile time.monotonic() < clock + {STUCK + 1}:\n    ctypes.CDLL(None).sleep(1)\n"
        "write_whole(here / f\"saved{os.environ['RANK']}\", '')"
    )
    job.start(code, "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGTERM)

    status, stderr = job.end(STUCK + 1 + AT_ONCE)

    assert (1, True) == (status, "got SIGTERM" in stderr)
    assert ["saved0", "saved1"] == job.made("saved*")


# What a worker has started.


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_children_of_a_worker_get_the_signal_when_it_has_ended(method: str, job: Job) -> None:
    """While it saves, they serve it; then they have the rest of the time for what they have to save themselves."""
    job.start("saves_with_a_child(here)", "--shutdown-timeout", NEVER, "--start-method", method)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGTERM)

    status, stderr = job.end()

    assert 1 == status
    assert ["child0", "child1", "saved0", "saved1"] == job.made("saved*", "child*"), stderr


def test_children_get_the_signal_when_half_of_the_time_is_over(job: Job) -> None:
    """A worker that only waits for its child, which is to be asked."""
    job.start("leaves_the_end_to_a_child(here)", "--shutdown-timeout", "4")
    job.wait_for(*ALL_AT_WORK)
    begin = time.monotonic()
    job.send(signal.SIGTERM)

    job.end()

    assert 2 <= time.monotonic() - begin
    assert ["child0", "child1"] == job.made("child*")


def test_program_of_a_shell_script_may_save_after_the_shell_has_died(job: Job) -> None:
    """The whole group gets the signal at once; the shell, which has no trap, dies of it."""
    program = duty_in_shell(job, "saves_until(here / 'go', here)")
    job.start("", "--no-python", program, "--shutdown-timeout", NEVER)
    job.wait_for(*ALL_AT_WORK)
    job.send(signal.SIGTERM)
    job.wait_for("saving0", "saving1")
    (job.folder / "go").touch()

    job.end()

    assert ["saved0", "saved1"] == job.made("saved*")


# Signals at awkward moments.


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_signal_before_the_workers_begin_ends_the_launcher_quickly(
    signum: signal.Signals, method: str, job: Job
) -> None:
    """Rows 111 and 112: while the fork server, or a worker's interpreter, is at its first imports."""
    (job.folder / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if not any('elasticlib.run' in arg or '_reaper' in arg for arg in sys.orig_argv):\n"
        f"    with open({str(job.folder)!r} + f'/pids{{os.getpid()}}', 'w') as file:\n"
        "        file.write(f'{os.getpid()} {os.getppid()}')\n"
        f"    open({str(job.folder / 'importing')!r}, 'w').close()\n"
        "    time.sleep(60)\n"
    )
    path = f"{job.folder}:{ROOT}"
    job.start("", "--shutdown-timeout", NEVER, "--start-method", method, PYTHONPATH=path)
    job.wait_for("importing")
    job.send(signum)

    status, stderr = job.end()

    assert 1 == status
    assert f"got {signum.name}: its workers were stopped" in stderr


def test_a_signal_while_a_round_is_stopped_ends_the_job_at_once(job: Job) -> None:
    """Rank 1 failed and rank 0 takes its time to end: the signal cuts that short and no round follows."""
    duty = (
        "if os.environ['RANK'] == '0':\n    note_signals(here, ignores=True)\n"
        "at_work(here)\nwait_for((here / 'round0.rank0').exists)\nfails()"
    )
    job.start(duty, "--shutdown-timeout", NEVER, "--max-restarts", "3")
    job.wait_for("rank0.SIGTERM")
    job.send(signal.SIGINT)

    status, stderr = job.end()

    assert 1 == status
    assert "got SIGINT: its workers were stopped" in stderr
    assert not (job.folder / "round1.rank0").exists()


@pytest.mark.parametrize("moment", range(6))
def test_signal_ends_a_job_that_restarts_all_the_time(moment: int, job: Job) -> None:
    """Rounds last a few milliseconds: the moments fall into starts, stops and what is between them."""
    job.start("at_work(here)\nfails()", "--max-restarts", "1000000", LOGLEVEL="ERROR")
    job.wait_for("round2.rank?")  # the other one may have been stopped before it could tell
    time.sleep(moment * 0.007)  # which moment it is is what is tested
    job.send(signal.SIGTERM)

    status, stderr = job.end()

    assert 1 == status
    assert "got SIGTERM: its workers were stopped" in stderr


# The same through the API.


@contextlib.contextmanager
def soon(condition: Callable[[], object], signum: signal.Signals) -> Iterator[None]:
    """Send this process *signum* as soon as *condition* holds."""

    def send() -> None:
        duties.wait_until(condition)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGINT, LaunchInterrupted), (signal.SIGTERM, SignalException)], ids=["int", "term"]
)
def test_a_call_that_a_signal_ends_raises_an_error_that_names_it(
    signum: signal.Signals, kind: type[SignalException], method: str, tmp_path: Path
) -> None:
    """SIGINT raises what is a KeyboardInterrupt too; the handlers are the caller's again, and the next call works."""
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    settings = LaunchConfig(nproc_per_node=1, max_restarts=3, preload=(), start_method=method)  # type: ignore[arg-type]

    with soon((tmp_path / "round0.rank0").exists, signum), pytest.raises(SignalException) as caught:
        elastic_launch(settings, duties.note_signals)(tmp_path)

    assert kind is type(caught.value)
    assert (signum is signal.SIGINT) == isinstance(caught.value, KeyboardInterrupt)
    assert signum == caught.value.sigval
    assert (tmp_path / f"rank0.{signum.name}").exists()
    assert handlers == [signal.getsignal(each) for each in signal.valid_signals()]
    assert 0 in elastic_launch(settings, duties.chain)()


def test_stop_during_the_start_leaves_the_first_worker_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method="fork")
    starts = tmp_path / "starts the second worker"
    hold_second_start(monkeypatch, starts, seconds=0.5)

    with pytest.raises(SignalException):
        elastic_launch(settings, duties.stops_its_job_at_once)(os.getpid(), starts, tmp_path / "saved")

    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_restarts_wake_a_stopped_worker_to_end_it(method: str, tmp_path: Path) -> None:
    """One worker is stopped, the other fails: the next round starts although nobody continued the first."""
    settings = LaunchConfig(nproc_per_node=2, max_restarts=1, preload=(), start_method=method)  # type: ignore[arg-type]

    results = elastic_launch(settings, duties.fails_beside_a_stopped_one)(tmp_path)

    assert {0: "1", 1: "1"} == results
