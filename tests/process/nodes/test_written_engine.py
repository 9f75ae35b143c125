"""The engine of the page *Write an engine* runs as its readers paste it, and has lost agents replaced."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import elasticlib
from tests.benchmarks import tree
from tests.benchmarks.job import environment
from tests.process.console.cells import executed, printed
from tests.process.launches import children
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

PAGE = Path(elasticlib.__file__).parent / "docs" / "engines.md"
LIMIT = 120.0
CLIENT = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch
from local import Local

def train(folder):
    rank = int(os.environ["RANK"])
    with open(f"{folder}/new.{rank}", "w") as file: file.write(str(os.getpid()))
    os.replace(f"{folder}/new.{rank}", f"{folder}/up.{rank}")
    while not os.path.exists(f"{folder}/go"): time.sleep(0.02)
    print(f"rank {rank} works")
    return os.getpid()

if __name__ == "__main__":
    config = LaunchConfig(2, 2, nproc_per_node=1, max_restarts=0)
    print(json.dumps(elastic_launch(config, train, on=Local(nodes=2))(sys.argv[1])))
"""


def file_of_page() -> str:
    """The Python file that the page shows."""
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def variables(folder: Path) -> dict[str, str]:
    return environment(folder, {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A client whose workers wait for a file ``go``."""
    (tmp_path / "local.py").write_text(file_of_page())
    (tmp_path / "client.py").write_text(getattr(request, "param", CLIENT))
    process = subprocess.Popen(
        [sys.executable, "client.py", str(tmp_path)],
        cwd=tmp_path,
        env=variables(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A client that has run *program* to its end, with *folder* and the *arguments*."""
    (folder / "local.py").write_text(file_of_page())
    (folder / "client.py").write_text(program)
    return subprocess.run(
        [sys.executable, "client.py", str(folder), *arguments],
        cwd=folder,
        env=variables(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def agents_of(client: subprocess.Popen[str]) -> list[int]:
    """The agents in the order of their starts."""
    return sorted(pid for pid in children(client.pid) if " -m elasticlib.remote._node" in tree.command(pid))


def wait_for_workers(client: subprocess.Popen[str], folder: Path, but: Collection[int] = ()) -> set[int]:
    """Wait for two workers that are none of *but*, and return their pids."""

    def found() -> set[int]:
        return {int(path.read_text()) for path in folder.glob("up.*")} - set(but)

    wait_until(lambda: client.poll() is not None or len(found()) == 2, LIMIT, "workers")
    assert client.poll() is None, client.communicate()
    return found()


def test_file_of_the_page_prints_the_results_of_two_agents(tmp_path: Path) -> None:
    text = file_of_page()
    (tmp_path / "local.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "local.py"],
        cwd=tmp_path,
        env=variables(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert "{0: 0.0, 1: 2.5}\n" == done.stdout, done.stderr
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("place", [0, 1])
def test_agent_that_was_killed_is_replaced(client: subprocess.Popen[str], tmp_path: Path, place: int) -> None:
    before = wait_for_workers(client, tmp_path)
    victim = agents_of(client)[place]

    os.kill(victim, signal.SIGKILL)
    after = wait_for_workers(client, tmp_path, before)
    replaced = agents_of(client)
    (tmp_path / "go").touch()
    stdout, stderr = client.communicate(timeout=LIMIT)

    *lines, results = stdout.splitlines()
    assert victim not in replaced
    assert after == set(json.loads(results).values()), stderr
    assert ["[0] rank 0 works", "[1] rank 1 works"] == sorted(lines)
    assert not tree.left_after(5.0, (), tmp_path)


def test_nothing_is_left_after_the_death_of_the_client(client: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for_workers(client, tmp_path)

    client.kill()
    client.communicate()

    assert not tree.left_after(10.0, (), tmp_path)


WATCHER = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch, progress
from local import Local

def train(folder):
    rank = int(os.environ["RANK"])
    print(f"rank {rank} begins")
    progress(7, loss=rank)
    while not os.path.exists(f"{folder}/go"): time.sleep(0.02)
    print(f"rank {rank} ends")
    return rank

if __name__ == "__main__":
    config = LaunchConfig(2, 2, nproc_per_node=1, max_restarts=0)
    with elastic_launch(config, train, on=Local(nodes=2)).start(sys.argv[1]) as job:
        while [7, 7] != [each.step for each in job.status().ranks]: time.sleep(0.05)
        seen = [job.status().state, [each.metrics["loss"] for each in job.status().ranks]]
        seen += [sorted(job.stacks(30.0)), ["in train" in text for text in job.stacks(30.0).values()]]
        seen += ["rank 1 begins" in job.logs(1)]
        open(f"{sys.argv[1]}/go", "w").close()
        job.result()
        seen += [job.status().state, [each.state for each in job.status().ranks], job.logs(1)]
    print("seen", json.dumps(seen))
"""


def test_status_stacks_and_output_of_all_nodes_are_the_clients(tmp_path: Path) -> None:
    done = ended(tmp_path, WATCHER)

    [seen] = [line.removeprefix("seen ") for line in done.stdout.splitlines() if line.startswith("seen ")] or [""]
    expected = ["running", [0.0, 1.0], [0, 1], [True, True], True]
    expected += ["succeeded", ["succeeded", "succeeded"], "rank 1 begins\nrank 1 ends\n"]
    assert expected == json.loads(seen or "0"), done.stderr


SAVER = """
import json, os, sys, time
from elasticlib import LaunchConfig, elastic_launch, should_stop
from local import Local

def train(folder):
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    should_stop()
    with open(f"{folder}/new.{rank}", "w") as file: file.write(str(os.getpid()))
    os.replace(f"{folder}/new.{rank}", f"{folder}/up.{rank}")
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.005)
        if stop := should_stop():
            with open(f"{folder}/saved.{rank}", "w") as file: file.write(stop.reason)
            return "saved"
    return restarts

if __name__ == "__main__":
    config = LaunchConfig(2, 2, nproc_per_node=1, max_restarts=0)
    print(json.dumps(elastic_launch(config, train, on=Local(nodes=2))(sys.argv[1])))
"""


@pytest.mark.parametrize("client", [SAVER], indirect=True)
def test_ranks_save_and_go_on_elsewhere_when_a_machine_is_about_to_end(
    client: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = wait_for_workers(client, tmp_path)

    os.kill(agents_of(client)[1], signal.SIGTERM)
    wait_for_workers(client, tmp_path, before)
    (tmp_path / "go").touch()
    stdout, stderr = client.communicate(timeout=LIMIT)

    assert {"0": "0", "1": "0"} == json.loads(stdout or "0"), stderr
    assert 2 == len(list(tmp_path.glob("saved.*")))
    assert all("is about to end" in path.read_text() for path in tmp_path.glob("saved.*"))


TALKER = """
import os, sys
from elasticlib import LaunchConfig, elastic_launch
from local import Local

def train():
    while True: print("x" * 200)

if __name__ == "__main__":
    config = LaunchConfig(nproc_per_node=1, shutdown_timeout=5)
    elastic_launch(config, train, on=Local(nodes=2))()
"""


def takes_nothing(client: subprocess.Popen[str]) -> bool:
    """Return whether the pipe of the client's stdout is full."""
    with open(f"/proc/{client.pid}/fd/1", "wb", buffering=0) as stream:
        return not select.select([], [stream], [], 0)[1]


def test_interrupts_end_a_call_whose_console_takes_no_output(tmp_path: Path) -> None:
    """As on one machine: the first one ends the workers, and the second one the wait for the console."""
    (tmp_path / "local.py").write_text(file_of_page())
    (tmp_path / "client.py").write_text(TALKER)
    client = subprocess.Popen(
        [sys.executable, "client.py"],
        cwd=tmp_path,
        env=variables(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: len(agents_of(client)) == 2 and takes_nothing(client), LIMIT)
        client.send_signal(signal.SIGINT)
        wait_until(lambda: not agents_of(client), LIMIT)
        client.send_signal(signal.SIGINT)
        assert 1 == client.wait(LIMIT)
    finally:
        client.kill()
        client.communicate()
    assert not tree.left_after(5.0, (), tmp_path)


UNTIL_STOP = """
import json, os, sys, time
from elasticlib import LaunchConfig, PreemptedError, elastic_launch, should_stop
from local import Local

def train(folder):
    while not should_stop():
        open(f"{folder}/step.{os.environ['RANK']}", "w").close()
        time.sleep(0.02)
    open(f"{folder}/saved.{os.environ['RANK']}", "w").close()
    return int(os.environ["RANK"])

if __name__ == "__main__":
    folder, *seconds = sys.argv[1:]
    end_time = time.time() + float(seconds[0]) if seconds else None
    config = LaunchConfig(nproc_per_node=1, end_time=end_time, shutdown_timeout=5)
    try:
        elastic_launch(config, train, on=Local(nodes=2))(folder)
    except PreemptedError as error:
        print(json.dumps(error.results))
"""


def test_an_interrupt_of_the_terminal_lets_the_ranks_save(tmp_path: Path) -> None:
    """It reaches the agents, too: they are in the client's process group."""
    (tmp_path / "local.py").write_text(file_of_page())
    (tmp_path / "client.py").write_text(UNTIL_STOP)
    client = subprocess.Popen(
        [sys.executable, "client.py", str(tmp_path)],
        cwd=tmp_path,
        env=variables(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("step.*"))) == 2, LIMIT)
        os.killpg(client.pid, signal.SIGINT)
        _, stderr = client.communicate(timeout=LIMIT)
    finally:
        client.kill()
        client.communicate()

    assert 2 == len(list(tmp_path.glob("saved.*"))), stderr
    assert stderr.count("Traceback") == 1, stderr
    assert not tree.left_after(5.0, (), tmp_path)


def test_the_end_of_the_jobs_time_ends_the_call_with_all_results(tmp_path: Path) -> None:
    """Other agents would have no more time."""
    done = ended(tmp_path, UNTIL_STOP, "25")

    assert '{"0": 0, "1": 1}\n' == done.stdout, done.stderr
    assert "start again" not in done.stderr


NOTEBOOK = """
import os, re, sys
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch
from local import Local

def train(lines):
    for number in range(lines):
        print("line", number, "of", os.environ["RANK"])
    print("last of", os.environ["RANK"], file=sys.stderr)

def launch(**more):
    return elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=0, **more), train, on=Local(nodes=2))
"""


def shown_in_cells(folder: Path, *cells: str) -> list[str]:
    """The text that each of *cells* shows, after `NOTEBOOK`."""
    (folder / "local.py").write_text(file_of_page())
    texts = [printed(cell.outputs) for cell in executed(NOTEBOOK, *cells, folder=folder)[1:]]
    # On a busy machine the launcher has lines of its own.
    return [re.sub(r"^.* has waited 5 s .*\n", "", text, flags=re.MULTILINE) for text in texts]


def test_a_cell_shows_rank_0_of_all_nodes_or_the_ranks_of_show(tmp_path: Path) -> None:
    of_call, of_job, chosen = shown_in_cells(
        tmp_path,
        "launch()(2)",
        "launch().start(2).result()",
        "launch(show=[1])(2)",
    )

    assert "line 0 of 0\nline 1 of 0\nlast of 0\n" == of_call == of_job
    assert "line 0 of 1\nline 1 of 1\nlast of 1\n" == chosen


def test_a_cell_shows_the_ends_of_a_flood_and_names_the_file_with_all(tmp_path: Path) -> None:
    (tmp_path / "local.py").write_text(file_of_page())
    outputs = executed(NOTEBOOK, "launch()(50_000)", folder=tmp_path)[1].outputs
    [tail] = [each["data"]["text/plain"] for each in outputs if each.output_type == "display_data"]
    head = printed(outputs)

    # On a busy machine the launcher's own lines stand before it.
    assert "line 0 of 0\nline 1 of 0\n" in head
    assert 190_000 < len(head) <= 200_000
    assert tail.endswith("line 49999 of 0\nlast of 0")
    [path] = re.findall(r"the full output is in (.*?)\]", tail)
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith(("line", "last"))]
    assert [*(f"line {number} of 0" for number in range(50_000)), "last of 0"] == lines
    os.unlink(path)


def test_a_cell_shows_the_error_of_a_rank_once(tmp_path: Path) -> None:
    cell = (
        "def fails(): return 1 / int(os.environ['RANK'])\n"
        "try: elastic_launch(LaunchConfig(nproc_per_node=1), fails, on=Local(nodes=2))()\n"
        "except ZeroDivisionError: print('raised')"
    )
    [shown] = shown_in_cells(tmp_path, cell)

    assert "raised" in shown and "ZeroDivisionError" not in shown
