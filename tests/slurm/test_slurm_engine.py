"""Calls of `elastic_launch` as jobs and steps of a real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.job import environment
from tests.slurm._cluster import Cluster, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

LIMIT = 120.0
CLIENT = """
import json, os, sys, time
import elasticlib
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.engines import Slurm

class Point:
    def __init__(self, rank): self.rank = rank

def train(what, folder):
    rank, restarts = int(os.environ["RANK"]), os.environ.get("SLURM_RESTART_COUNT", "0")
    elasticlib.should_stop()
    elasticlib.progress(7, loss=rank)
    with open(f"{folder}/up.{restarts}.{rank}", "w") as file: file.write(str(os.getpid()))
    if what == "raise" and rank == 3: raise ValueError("bad batch")
    while what == "save":
        if elasticlib.should_stop():
            print("saves", flush=True)
            time.sleep(60)
    while what in ("wait", "leave", "watch") and not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
        if elasticlib.should_stop(): return
    print(f"rank {rank} works")
    return Point(rank), int(os.environ["WORLD_SIZE"]), restarts

if __name__ == "__main__":
    what, folder, settings, attached = json.loads(sys.argv[1])
    try:
        if attached:
            job = Slurm.attach(attached)
        else:
            engine = Slurm(**settings, folder=f"{folder}/shared")
            job = elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), train, on=engine).start(what, folder)
        if what == "go": sys.exit()
        while not job.done() and "job_id" not in job.status().engine: time.sleep(0.02)
        with open(f"{folder}/number", "w") as file: file.write(job.status().engine.get("job_id", "-"))
        if what == "leave": sys.exit()
        while what == "watch" and [7] * 4 != [each.step for each in job.status().ranks]: time.sleep(0.05)
        seen = [job.status()]
        if what == "watch": open(f"{folder}/go", "w").close()
        if attached: open(f"{folder}/attached", "w").close()
        results = job.result()
    except Exception as error:
        print(json.dumps([[each.__name__ for each in type(error).__mro__], str(error)]))
    else:
        for each in [*seen, job.status()]:
            print(each.state, each.round, each.nodes, [[one.rank, one.state, one.metrics] for one in each.ranks])
        print(json.dumps({rank: [value[0].rank, *value[1:]] for rank, value in results.items()}))
"""
ALL = {str(rank): [rank, 4, "0"] for rank in range(4)}


class Clients:
    """Clients on the machine of slurmctld, in one folder."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "client.py").write_text(CLIENT)
        (folder / "home").mkdir()

    def command(self, what: str, settings: dict[str, Any], attached: str = "") -> list[str]:
        order = json.dumps([what, str(self.folder), {"nodes": 2, **settings}, attached])
        return [sys.executable, str(self.folder / "client.py"), order]

    def variables(self) -> dict[str, str]:
        more = {"OMP_NUM_THREADS": "1", "HOME": str(self.folder / "home")}
        return environment(self.folder, {**self.slurm.environment(), **more})

    def start(self, what: str = "work", attached: str = "", **settings: Any) -> subprocess.Popen[str]:
        """Start a client that submits a call, or attaches to the job *attached*."""
        return self.slurm.head.popen(
            self.command(what, settings, attached),
            cwd=self.folder,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_workers(self, client: subprocess.Popen[str] | None = None, run: int = 0) -> Job:
        """Wait until all four workers of a run have begun, and return the job."""
        ready = [self.folder / f"up.{run}.{rank}" for rank in range(4)]
        wait_until(
            lambda: (client is not None and client.poll() is not None) or all(each.exists() for each in ready), LIMIT
        )
        assert client is None or client.poll() is None, client.communicate()
        return Job(self.slurm, (self.folder / "number").read_text(), self.folder / "none")

    def go(self) -> None:
        (self.folder / "go").touch()

    def calls(self) -> list[str]:
        """The folders of calls."""
        shared = self.folder / "shared"
        return os.listdir(shared) if shared.exists() else []


@pytest.fixture
def clients(slurm: Cluster, tmp_path: Path) -> Clients:
    return Clients(slurm, tmp_path)


def outcome(client: subprocess.Popen[str]) -> tuple[Any, str]:
    """The last line of a client that has ended, and all of its output."""
    stdout, stderr = client.communicate(timeout=LIMIT)
    lines = stdout.splitlines()
    assert lines, stderr
    return json.loads(lines[-1]), stdout + stderr


def test_one_call_returns_the_results_of_all_nodes(clients: Clients) -> None:
    last, text = outcome(clients.start(sbatch={"comment": 'a "b" # c \\d'}, time=5))

    assert last == ALL, text
    assert [f"[{rank}] rank {rank} works" for rank in range(4)] == sorted(
        line for line in text.splitlines() if "works" in line
    )
    assert [] == clients.calls()
    number = (clients.folder / "number").read_text()
    assert 'Comment=a "b" # c \\d' in clients.slurm.run("scontrol", "show", "job", number)


def test_status_has_the_ranks_of_all_nodes(clients: Clients) -> None:
    _, text = outcome(clients.start("watch"))

    for state in ("running", "succeeded"):
        ranks = [[rank, state, {"loss": float(rank)}] for rank in range(4)]
        assert f"{state} 0 2 {ranks}" in text.splitlines(), text


def test_exception_of_a_worker_is_raised_in_the_client(clients: Clients) -> None:
    (classes, message), text = outcome(clients.start("raise"))

    assert {"ChildFailedError", "ValueError"} <= set(classes), text
    assert message.startswith("rank 3: ValueError: bad batch (client.py:")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"partition": "no-such"}, "the job was refused: invalid partition specified: no-such"),
        ({"nodes": 9}, "nodes=9 is more than the default partition has: give 4 or less"),
        ({"sbatch": {"no-such-option": 1}}, "the job was refused: unrecognized option '--no-such-option=1'"),
    ],
)
def test_job_that_slurm_refuses_is_one_error(clients: Clients, settings: dict[str, Any], complaint: str) -> None:
    (classes, message), text = outcome(clients.start(**settings))

    assert {"StartError", "ConfigError"} & set(classes), text
    assert message.startswith(complaint)
    assert "\n" not in message
    assert [] == clients.calls()


def test_nothing_runs_after_an_interrupt_of_the_client(clients: Clients) -> None:
    client = clients.start("wait")
    job = clients.wait_for_workers(client)

    client.send_signal(signal.SIGINT)
    client.communicate(timeout=LIMIT)

    assert "CANCELLED" == job.facts()["JobState"]
    assert [] == list(job.processes())


def test_second_interrupt_of_the_client_kills_workers_that_save(clients: Clients) -> None:
    """Slurm refuses signals to a job that it has begun to end, and would wait for KillWait."""
    client = clients.start("save")
    job = clients.wait_for_workers(client)

    client.send_signal(signal.SIGINT)
    [call] = clients.calls()
    output = clients.folder / "shared" / call / "output"
    wait_until(lambda: output.read_text().count("saves") == 4)
    client.send_signal(signal.SIGINT)
    stdout, _ = client.communicate(timeout=LIMIT)

    assert "CANCELLED" == job.facts()["JobState"]
    assert [] == list(job.processes())
    assert 4 == stdout.count("saves"), stdout


@pytest.mark.parametrize("what", ["wait", "leave"])
def test_another_program_gets_the_results_after_the_end_of_the_client(clients: Clients, what: str) -> None:
    client = clients.start(what)
    job = clients.wait_for_workers(client if what == "wait" else None)

    if what == "wait":
        client.kill()
    client.communicate()
    clients.go()
    last, text = outcome(clients.start(attached=job.number))
    again, _ = outcome(clients.start(attached=job.number))

    assert last == again == ALL, text
    assert "COMPLETED" == job.ends()


def with_attached(clients: Clients) -> tuple[subprocess.Popen[str], Job, subprocess.Popen[str]]:
    """Return a client, its job whose workers wait, and a program that has attached to it."""
    client = clients.start("wait")
    job = clients.wait_for_workers(client)
    attached = clients.start(attached=job.number)
    wait_until(lambda: (clients.folder / "attached").exists())
    return client, job, attached


def test_interrupt_of_a_client_that_has_attached_leaves_the_job_running(clients: Clients) -> None:
    client, job, attached = with_attached(clients)

    attached.send_signal(signal.SIGINT)
    (classes, message), _ = outcome(attached)

    assert "KeyboardInterrupt" in classes and f"`scancel {job.number}`" in message
    assert "RUNNING" == job.facts()["JobState"]
    clients.go()
    assert ALL == outcome(client)[0]


def test_late_attached_program_names_the_program_that_has_the_results(clients: Clients) -> None:
    client, job, attached = with_attached(clients)

    attached.send_signal(signal.SIGSTOP)
    clients.go()
    assert ALL == outcome(client)[0]
    attached.send_signal(signal.SIGCONT)
    (classes, message), _ = outcome(attached)

    assert "StartError" in classes
    assert message.startswith(f"the program that submitted Slurm job {job.number} has its results")


def test_program_that_ends_at_once_has_submitted_its_job(clients: Clients) -> None:
    client = clients.start("go")
    _, stderr = client.communicate(timeout=LIMIT)

    [number] = re.findall(r"slurm job (\d+)\)> continues after the end of its program", stderr)
    assert ALL == outcome(clients.start(attached=number))[0]


def test_program_whose_job_is_refused_reports_that_at_its_end(clients: Clients) -> None:
    client = clients.start("go", partition="no-such")
    _, stderr = client.communicate(timeout=LIMIT)

    assert "was not submitted before its program ended: the job was refused: invalid partition" in stderr


def test_results_are_those_of_the_run_after_a_requeue(clients: Clients) -> None:
    client = clients.start("wait", requeue=1)
    job = clients.wait_for_workers(client)
    client.kill()
    client.communicate()

    job.cancel("--signal=TERM")
    wait_until(lambda: job.facts()["JobState"] == "PENDING")
    wait_until(lambda: set(clients.slurm.run("sinfo", "--noheader", "--format=%T").split()) == {"idle"})
    attached = clients.start(attached=job.number)
    job.start_again()
    clients.wait_for_workers(attached, run=1)
    clients.go()
    last, text = outcome(attached)

    assert last == {str(rank): [rank, 4, "1"] for rank in range(4)}, text


def test_call_in_an_allocation_is_a_step_of_it(clients: Clients) -> None:
    outer = clients.folder / "outer.py"
    outer.write_text(
        "import os, subprocess, sys\n"
        f"os.environ.update({clients.variables()!r})\n"
        f"sys.exit(subprocess.call({clients.command('work', {})!r}))\n"
    )
    job = clients.slurm.start(clients.folder, "", f"{sys.executable} {outer}")

    assert "COMPLETED" == job.ends(), job.output
    assert json.dumps(ALL) in job.output
    assert job.number == (clients.folder / "number").read_text()
    assert [] == clients.calls()


def test_interrupt_in_an_allocation_ends_the_step_alone(clients: Clients) -> None:
    outer = clients.folder / "outer.py"
    outer.write_text(
        "import os, signal, subprocess, time\n"
        f"os.environ.update({clients.variables()!r})\n"
        f"client = subprocess.Popen({clients.command('wait', {})!r})\n"
        f"while not os.path.exists({str(clients.folder / 'go')!r}): time.sleep(0.05)\n"
        "client.send_signal(signal.SIGINT)\n"
        "print('ended', client.wait(), flush=True)\n"
        "steps = subprocess.run(['squeue', '--steps', '--noheader', '--format=%j'], capture_output=True, text=True)\n"
        "print('steps', [each for each in steps.stdout.split() if each.startswith('train-')], flush=True)\n"
    )
    job = clients.slurm.start(clients.folder, "", f"{sys.executable} {outer}")
    clients.wait_for_workers()
    clients.go()

    assert "COMPLETED" == job.ends(), job.output
    assert "steps []" in job.output


def test_submitted_script_trains_on_its_nodes(clients: Clients) -> None:
    (clients.folder / "train.py").write_text("import os; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])")
    command = [str(Path(sys.executable).with_name("elasticrun")), "submit", "--nodes", "2", "--time", "5"]
    done = subprocess.run(
        clients.slurm.head.entered("env", f"--chdir={clients.folder}", *command, "--", "train.py"),
        env=clients.variables(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().isdecimal(), done.stderr
    number = done.stdout.strip()
    job = Job(clients.slurm, number, clients.folder / f"slurm-{number}.out")

    assert "COMPLETED" == job.ends(), job.output
    assert ["rank 0 2", "rank 1 2"] == sorted(re.findall(r"rank \d \d", job.output)), job.output
