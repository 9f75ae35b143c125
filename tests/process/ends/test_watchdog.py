"""Timers between processes, torch's ends and ours; the agent that runs a watchdog, a health check, debug servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib import DefaultLogsSpecs, LaunchConfig, LocalElasticAgent, WorkerSpec, elastic_launch, records
from elasticlib.agent._worker_watch import Watch
from elasticlib.elastic.agent.server.health_check_server import HealthCheckServer
from elasticlib.errors import ChildFailedError
from elasticlib.rendezvous import Rules, open_local
from elasticlib.timer import FileTimerServer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]
LIMIT = 60.0
ENDS = {"ours": "elasticlib.timer", "torch's": "torch.distributed.elastic.timer"}
WORKER = """
import sys, time
from {timer} import FileTimerClient, expires
client = FileTimerClient(sys.argv[1])
with expires(after=1000, scope="fine", client=client):
    pass
with expires(after=0.1, scope="stuck", client=client):
    time.sleep(1000)
"""
SERVER = """
import sys
from {timer} import FileTimerServer
def print_event(name, timer):
    print(name, "-" if timer is None else timer.scope_id, flush=True)
# Torch's server sends its own process the same signal: it is the last thing that this one does.
FileTimerServer(sys.argv[1], "job", 0.1, log_event=print_event).start()
sys.stdin.read()
"""


@contextlib.contextmanager
def program(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("client", ENDS)
def test_our_server_kills_the_process_whose_timer_expired_and_no_other(client: str, tmp_path: pathlib.Path) -> None:
    path, events = str(tmp_path / "timers"), list[tuple[str, str]]()
    server = FileTimerServer(path, "job", 60, log_event=lambda name, timer: events.append((name, timer_name(timer))))
    server.start()
    bystander = "import sys, time\nprint('up', flush=True)\ntime.sleep(1000)"

    with program(WORKER.replace("{timer}", ENDS[client]), path) as worker, program(bystander) as other:
        exitcode = worker.wait(LIMIT)
        assert other.stdout is not None
        assert ("up\n", None) == (other.stdout.readline(), other.poll())
        server.stop()

    assert -signal.SIGKILL == exitcode
    assert [
        ("watchdog started", ""),
        ("timer expired", "stuck"),
        ("kill worker process", "stuck"),
        ("watchdog stopped", ""),
    ] == events


def timer_name(timer: Any) -> str:
    return "" if timer is None else str(timer.scope_id)


def test_torchs_server_kills_the_process_whose_timer_expired_by_our_client(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "timers")
    with program(SERVER.replace("{timer}", ENDS["torch's"]), path) as server:
        assert server.stdout is not None
        assert "watchdog started -\n" == server.stdout.readline()
        with program(WORKER.replace("{timer}", ENDS["ours"]), path) as worker:
            assert -signal.SIGKILL == worker.wait(LIMIT)
        assert "timer expired stuck\n" == server.stdout.readline()


# The agent.


def hang(folder: str) -> str:
    """A worker that hangs in its first round."""
    import os
    import time

    from elasticlib import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.1, scope="all_reduce"):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            time.sleep(1000)
    return os.environ["TORCHELASTIC_TIMER_FILE"]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_function_that_hangs_is_killed_and_started_again(
    method: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    config = LaunchConfig(nproc_per_node=2, max_restarts=1, start_method=method, preload=(), monitor_interval=30)

    results = elastic_launch(config, hang)(str(tmp_path))

    assert results[0] == results[1]
    assert not os.path.exists(os.path.dirname(results[0]))


def test_the_failure_of_a_killed_function_names_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, preload=())

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, hang)("")

    rank, failure = caught.value.get_first_failure()
    assert (1, -signal.SIGKILL) == (rank, failure.exitcode)
    assert f"timer 'all_reduce' expired: the watchdog sent SIGKILL to PID {failure.pid}" == failure.message


def sleep(folder: str) -> None:
    """A worker that says that it runs."""
    import os
    import time

    with open(os.path.join(folder, f"up{os.environ['RANK']}"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)


def test_a_worker_in_uninterruptible_sleep_ends_the_job_without_a_restart(tmp_path: pathlib.Path) -> None:
    """No worker can be put into that state here: the states are told by the test."""
    recorded: list[records.Record] = []
    with open_local("job", Rules(max_restarts=3)) as rendezvous:
        spec = WorkerSpec(
            "trainer",
            2,
            rendezvous,
            entrypoint=sleep,
            args=(str(tmp_path),),
            max_restarts=3,
            monitor_interval=0.02,
            preload=(),
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(), sink=recorded.append)

        def state(pid: int) -> str:
            return "D" if pid == agent.get_worker_group().workers[1].id else "S"

        agent._watch = Watch({}, "job", recorded.append, uninterruptible_state_timeout=0.1, read_state=state)
        result = agent.run()

    (rank, failure), *others = result.failures.items()
    ends = [record for record in recorded if isinstance(record, records.RoundEnded)]
    assert (True, 1, [], True) == (result.is_failed(), rank, others, failure.fatal)
    assert "was in uninterruptible sleep (state D) for 0 s" in failure.message
    assert [False] == [end.restart for end in ends]
    assert "a restart would fail again" in ends[0].why


def health(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.request("GET", "/")
    answer = connection.getresponse()
    facts: dict[str, Any] = json.loads(answer.read())
    connection.close()
    return {**facts, "status": answer.status}


def wait_for_file(path: str) -> None:
    """A worker that ends when the test says so."""
    import os
    import time

    with open(f"{path}.up", "w"):
        pass
    while not os.path.exists(path):
        time.sleep(0.01)


def while_running(config: LaunchConfig, folder: pathlib.Path, look: Callable[[], Any], **options: Any) -> Any:
    """Return the result of *look*, called while a worker of *config* runs."""
    go = str(folder / "go")
    thread = threading.Thread(target=lambda: elastic_launch(config, wait_for_file, **options)(go))
    thread.start()
    try:
        while thread.is_alive() and not os.path.exists(f"{go}.up"):
            thread.join(0.01)
        return look()
    finally:
        pathlib.Path(go).touch()
        thread.join(LIMIT)


def test_health_check_port_answers_that_the_job_is_alive(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")

    found = while_running(LaunchConfig(nproc_per_node=1, preload=()), tmp_path, lambda: health(port))

    assert (200, True, 60) == (found["status"], found["alive"], found["timeout"])
    with pytest.raises(ConnectionError):
        health(port)


CROWDED = """
import os, resource, socket, sys
from elasticlib import LaunchConfig, elastic_launch

def work():
    import os, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open("up", "w").close()
        while not os.path.exists("die"):
            time.sleep(0.01)
        os._exit(3)
    return "again"

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    print(elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=1, preload=()), work)())
"""


@contextlib.contextmanager
def dripping(clients: list[socket.socket]) -> Iterator[None]:
    """A byte from each of them now and then, for as long as somebody listens."""
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.5):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(b"x")

    for client in clients:
        client.send(b"GET / HT")
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(LIMIT)


def test_crowd_at_the_health_check_leaves_descriptors_for_a_restart(tmp_path: pathlib.Path) -> None:
    """More connections that never finish their question than the launcher may have files, and a worker that dies."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    (tmp_path / "crowded.py").write_text(CROWDED)
    environment = {**os.environ, "TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}
    root = pathlib.Path(__file__).resolve().parents[3]
    with (
        contextlib.ExitStack() as crowd,
        subprocess.Popen(
            [sys.executable, "crowded.py"],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        try:
            while process.poll() is None and not (tmp_path / "up").exists():
                time.sleep(0.01)
            clients = [crowd.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT)) for _ in range(200)]
            crowd.enter_context(dripping(clients))
            (tmp_path / "die").touch()
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()

    assert 0 == process.returncode, output
    assert "{0: 'again'}" == output.splitlines()[-1]


def test_job_continues_without_its_health_check_when_the_port_is_taken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(other.getsockname()[1]))
        (tmp_path / "go").touch()

        elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), wait_for_file)(str(tmp_path / "go"))

    assert "; the health check is off" in caplog.text


def test_a_health_check_server_of_the_callers_is_stopped_with_the_job(tmp_path: pathlib.Path) -> None:
    server = HealthCheckServer(lambda: 0, 0, 60)
    server.start()

    found = while_running(
        LaunchConfig(nproc_per_node=1, preload=()), tmp_path, lambda: health(server.port), health_check_server=server
    )

    assert 503 == found["status"]
    with pytest.raises(ConnectionError):
        health(server.port)


# Debug servers.


def ping(imports: bool) -> tuple[str | None, str | None, str | None]:
    """Return the response of the worker's own socket, and the two variables about it."""
    import http.client
    import os
    import socket

    if imports:
        import torch  # noqa: F401
    served = os.environ.get("ELASTICLIB_WORKER_SERVER_SOCKET")
    if served is None:
        return None, served, os.environ.get("TORCH_WORKER_SERVER_SOCKET")
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(served)
    connection.request("POST", "/handler/ping")
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer, served, os.environ.get("TORCH_WORKER_SERVER_SOCKET")


@pytest.mark.parametrize("preload", [("torch",), ()])
def test_a_worker_that_has_loaded_torch_answers_on_a_socket_of_its_own(preload: tuple[str, ...]) -> None:
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, worker_server=True, preload=preload)

    results = elastic_launch(config, ping)(True)

    assert [("pong", None)] * 2 == [(answer, free) for answer, _, free in results.values()]
    paths = [served for _, served, _ in results.values()]
    assert ["0", "1"] == [os.path.basename(path) for path in paths if path is not None]
    assert not os.path.exists(os.path.dirname(str(paths[0])))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_worker_without_torch_or_without_the_option_has_no_debug_server(enabled: bool) -> None:
    """Without torch the variable of torch's own names a socket that is free."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, worker_server=enabled, preload=())

    ((answer, served, free),) = elastic_launch(config, ping)(not enabled).values()

    assert (None, None, "0" if enabled else None) == (answer, served, free and os.path.basename(free))


SCRIPT = """
import os, sys
from {control_plane} import worker_main

@worker_main()
def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)

main()
"""


@pytest.mark.parametrize("package", ["elasticlib.elastic", "torch.distributed.elastic"])
def test_decorated_script_and_restart_run_with_debug_servers(package: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("{control_plane}", f"{package}.control_plane"))

    assert {0: None} == elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=1, worker_server=True), path)()
