"""The wiring of a launch: refused before anything starts, and what becomes of its result."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib import launch, metrics
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    LogDirError,
    ProcessFailure,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    StartError,
)
from elasticlib.launch import elastic_launch, launch_agent
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.metrics import _metric_streams
from elasticlib.numa import AffinityMode, BindingError, NumaOptions
from elasticlib.preload._key import ForkServerKey
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers import _registry
from elasticlib.spec import LaunchConfig, Std, WorkerSpec
from elasticlib.state import RunResult, WorkerState
from tests.patching import replace_everywhere


def config(**options: Any) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=2, **options)


class Agent:
    """Stands in for the agent: it starts nothing, and ends as `result` says."""

    result: RunResult | BaseException
    cause: BaseException | None
    made: list[Agent]
    leaves: str = ""
    """Contents of the error file of rank 0."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, start_method: str, **options: Any) -> None:
        self.spec, self.logs, self.start_method, self.options = spec, logs, start_method, options
        self.concluded: list[BaseException | None] = []
        Agent.made.append(self)

    def run(self) -> RunResult:
        dest = self.logs.reify({0: {"TORCHELASTIC_RUN_ID": "job"}})
        if Agent.leaves:
            Path(dest.error_files[0]).write_text(Agent.leaves)
        if isinstance(Agent.result, BaseException):
            raise Agent.result
        return Agent.result

    def conclude(self, error: BaseException | None = None) -> None:
        self.concluded.append(error)

    def lost_hosts(self) -> tuple[str, ...]:
        return ("n2",)

    def get_worker_group(self) -> SimpleNamespace:
        return SimpleNamespace(workers=[SimpleNamespace(world_size=2)] * 2)

    def original_exception(self, rank: int) -> BaseException | None:
        return Agent.cause if rank == 1 else None


def prepared(*_: object) -> SimpleNamespace:
    """Nothing, and no fork server."""
    return SimpleNamespace(
        signals_to_handle="", job=SimpleNamespace(fork_server=None, common=SimpleNamespace(env={}), search_path=())
    )


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    monkeypatch.setattr("elasticlib.agent.LocalElasticAgent", Agent)
    monkeypatch.setattr(launch, "prepare_workers", prepared)
    monkeypatch.setattr(Agent, "result", RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"}), raising=False)
    monkeypatch.setattr(Agent, "cause", None, raising=False)
    monkeypatch.setattr(Agent, "made", [], raising=False)
    return Agent


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Fails a test whose launch leaves a thread or a change of the environment behind."""
    threads, environment = set(threading.enumerate()), dict(os.environ)
    yield
    environment["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    begun = [thread for thread in threading.enumerate() if thread not in threads]
    assert ([], environment) == (begun, dict(os.environ))


def failures() -> dict[int, ProcessFailure]:
    return {
        0: ProcessFailure(0, 70, 1, "", message="lost", timestamp=1.0, rank=0, secondary=True),
        1: ProcessFailure(1, 71, 1, "", message="a bad value", timestamp=2.0, rank=1),
    }


# What is told of it.


@pytest.mark.parametrize(
    ("result", "kind", "concluded"),
    [
        (RunResult(WorkerState.SUCCEEDED), None, None),
        (RunResult(WorkerState.FAILED, {}, failures()), ChildFailedError, None),
        (NOBODY := RendezvousTimeoutError("nobody came"), RendezvousTimeoutError, NOBODY),
    ],
    ids=["success", "workers failed", "raised"],
)
def test_agent_concludes_with_its_own_error_only(
    agent: type[Agent], result: RunResult | BaseException, kind: type[Exception] | None, concluded: object
) -> None:
    Agent.result = result

    with pytest.raises(kind) if kind is not None else contextlib.nullcontext():
        launch_agent(config(), print)

    assert agent.made[0].concluded == [concluded]


@pytest.mark.parametrize(
    ("options", "handler"),
    [
        ({}, type(None)),
        ({"handler": "console"}, metrics.ConsoleMetricHandler),
        ({"handler": "null"}, metrics.NullMetricHandler),
    ],
)
def test_metrics_of_a_launch_go_to_the_configured_handler(
    agent: type[Agent], options: dict[str, str], handler: type
) -> None:
    launch_agent(config(metrics_cfg=options), print)

    assert type(agent.made[0].options["metric_handler"]) is handler


class Kept(metrics.MetricHandler):
    """Keeps the names of what it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.append(metric_data.name)


@pytest.mark.parametrize("name", ["console", "null"])
def test_metrics_cfg_takes_the_place_of_the_programs_handler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(_metric_streams, "_handlers", dict(_metric_streams._handlers))
    kept = Kept()
    metrics.configure(kept)

    with pytest.raises(StartError):  # the first to be measured is a failure, with neither fork server nor worker
        launch_agent(unstartable(monkeypatch, metrics_cfg={"handler": name}), print)

    assert kept.names == []
    assert capsys.readouterr().out.count(".run.failure=1\n") == (1 if name == "console" else 0)


def unstartable(monkeypatch: pytest.MonkeyPatch, **options: Any) -> LaunchConfig:
    """A launch whose agent runs as far as its first worker."""

    def start(*args: Any, **options: Any) -> dict[int, int]:
        raise StartError("no process")

    monkeypatch.setattr("elasticlib.workers._processes.Processes.start", start)
    return config(preload=(), **options)


def local_function() -> Any:
    def train() -> None:
        pass

    return train


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (local_function(), (), "train"),
        (functools.partial(local_function(), 1), (), "train"),
        (Path("dir/train.py"), ("--lr", 1), "train.py"),
        (sys.executable, ("-u", "dir/train.py", "other.py"), "train.py"),
        (sys.executable, ("-m", "pkg.train"), "pkg.train"),
        (sys.executable, (Path("dir/train.py"),), "train.py"),
        (sys.executable, ("-V", ""), os.path.basename(sys.executable)),
        ("dir/train.sh", ("x.py",), "train.sh"),
    ],
)
def test_a_launch_is_called_after_what_it_runs(
    agent: type[Agent],
    jobs: list[NodeJob],
    caplog: pytest.LogCaptureFixture,
    entrypoint: Any,
    args: tuple[Any, ...],
    name: str,
) -> None:
    agent.result = RunResult(WorkerState.FAILED, {}, failures())

    with caplog.at_level(logging.INFO, "elasticlib"), pytest.raises(ChildFailedError) as caught:
        launch_agent(config(**NODES), entrypoint, args)

    assert (name, [name]) == (caught.value.name, [job.work for job in jobs])
    assert f"launching {name}: " in caplog.text


# Refused before anything starts.


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose launch comes as far as its rendezvous, or counts devices, for which a process is started."""

    def started(*args: Any, **options: Any) -> None:
        raise AssertionError("something was started")

    for name in ("open_local", "open_remote"):
        monkeypatch.setattr(f"elasticlib.rendezvous.{name}", started)
    monkeypatch.setattr("elasticlib.rendezvous.handlers._registry.get_rendezvous_handler", started)
    monkeypatch.setattr("elasticlib.workers._devices._accelerators", started)
    monkeypatch.setattr(launch.fork_servers, "take", started)


@pytest.mark.parametrize(
    ("entrypoint", "options", "named"),
    [
        ("missing.py", {}, "'missing.py' was not found"),
        (7, {}, "entrypoint=7, a int, is not a callable"),
        (Path("/"), {}, "without a __main__.py"),
        (functools.partial(print, threading.Lock()), {}, "bound argument 0 of print, a lock, cannot be sent"),
        (print, {"virtual_local_rank": True}, "CUDA_VISIBLE_DEVICES"),
        (print, {"module": True}, "cannot be used with a callable"),
        (print, {"preload": ("numpy",), "start_method": "spawn"}, "preload='numpy'"),
        (print, {"signals_to_handle": "SIGKILL"}, "SIGKILL cannot be caught"),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_launch_meets_nobody_before_all_of_it_is_checked(
    nothing_opens: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: int,
    entrypoint: Any,
    options: dict[str, Any],
    named: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    with caplog.at_level(logging.INFO, "elasticlib"), pytest.raises(ConfigError, match=named):
        launch_agent(config(**(NODES if nodes == 2 else {}), **options), entrypoint)

    assert caplog.messages == []


def test_a_binding_that_cannot_be_is_refused_before_anyone_is_met(
    nothing_opens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.workers._devices.gpu_addresses", lambda *args: [])

    with pytest.raises(BindingError):
        launch_agent(config(**NODES, numa_options=NumaOptions(AffinityMode.NODE)), print)


@pytest.mark.parametrize("given", [7, None, "train.py", {"nproc_per_node": 2, "token": "s3cret"}, LaunchConfig])
def test_object_that_is_not_a_configuration_is_refused_at_once_by_name(nothing_opens: None, given: Any) -> None:
    for call in (elastic_launch, launch_agent):
        with pytest.raises(ConfigError, match="not a LaunchConfig: give one, such as") as caught:
            call(given, print)

        assert "s3cret" not in str(caught.value)


def test_a_rendezvous_that_cannot_be_is_refused_before_devices_are_counted(nothing_opens: None) -> None:
    with pytest.raises(ConfigError, match="rdzv_endpoint=':1'"):
        launch_agent(LaunchConfig(max_nodes=2, rdzv_endpoint=":1"), print)


class Health:
    """Stands in for a health check that the caller has started."""

    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(
    ("entrypoint", "given"),
    [
        (print, 7),
        (print, LaunchConfig(event_log_handler="nowhere")),
        (print, LaunchConfig(max_nodes=2, rdzv_endpoint=":1")),
        ("missing.py", LaunchConfig(nproc_per_node=2)),
    ],
)
def test_a_callers_health_check_is_stopped_by_a_refusal_too(nothing_opens: None, entrypoint: Any, given: Any) -> None:
    health: Any = Health()

    with pytest.raises(ConfigError):
        launch_agent(given, entrypoint, (), health)

    assert health.stopped == 1


def test_a_callers_health_check_is_stopped_where_nobody_could_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    health: Any = Health()

    def open_remote(job: NodeJob, requests: object) -> None:
        raise RendezvousConnectionError("node0 refused")

    monkeypatch.setattr("elasticlib.rendezvous.open_remote", open_remote)
    monkeypatch.setattr(launch, "prepare_workers", prepared)

    with pytest.raises(RendezvousConnectionError):
        launch_agent(config(**NODES), print, (), health)

    assert health.stopped == 1


def test_a_callers_health_check_is_stopped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    health: Any = Health()

    with pytest.raises(StartError):
        launch_agent(unstartable(monkeypatch), print, (), health)

    assert health.stopped == 1


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        (
            {"local_ranks_filter": [7]},
            ["local_ranks_filter names local rank 7, but this node has only local ranks 0-1"],
        ),
        (
            {"local_ranks_filter": [1, 7]},
            ["local_ranks_filter names local rank 7, but this node has only local ranks 0-1"],
        ),
        (
            {"redirects": {5: Std.OUT, 1: Std.OUT}},
            ["redirects names local rank 5, but this node has only local ranks 0-1"],
        ),
        ({"tee": {5: Std.OUT, 3: Std.OUT}}, ["tee names local ranks 3, 5, but this node has only local ranks 0-1"]),
        (
            {"tee": {5: Std.OUT}, "redirects": {-1: Std.ALL}},
            [
                "redirects names local rank -1, but this node has only local ranks 0-1",
                "tee names local rank 5, but this node has only local ranks 0-1",
            ],
        ),
        ({"redirects": {0: Std.OUT}, "tee": Std.ALL, "local_ranks_filter": [0, 1]}, []),
        ({}, []),
    ],
)
def test_local_ranks_that_this_node_does_not_have_are_warned_of(
    agent: type[Agent], caplog: pytest.LogCaptureFixture, tmp_path: Path, options: dict[str, Any], warnings: list[str]
) -> None:
    launch_agent(config(logs_specs=DefaultLogsSpecs(tmp_path, **options)), print)

    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [text.partition(":")[0] for text in warned]
    hidden = options.get("local_ranks_filter") == [7]
    assert hidden == any("no worker of this node is shown" in text for text in warned)


@pytest.mark.parametrize("endpoint", ["", "localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_private_endpoint_does_not_request_other_nodes(agent: type[Agent], endpoint: str) -> None:
    assert launch_agent(config(rdzv_endpoint=endpoint, rdzv_timeout=60), print) == {0: "a", 1: "b"}


def refuse(*_: object, **__: object) -> None:
    raise ConnectionRefusedError("nobody listens")


NOWHERE = DefaultLogsSpecs(os.devnull)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_nodes": 2, "rdzv_backend": "static"}, "rdzv_endpoint='': 2 nodes need a common endpoint"),
        (
            {"rdzv_backend": "etcd"},
            "rdzv_endpoint='': rdzv_backend='etcd' needs an etcd server, .*localhost:2379",
        ),
        ({"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": "node0:29400"}, "run_id=''"),
        ({"rdzv_configs": {"heartbeat_timeout": 0}}, "heartbeat_timeout must be a number of seconds, 0.1 or more"),
        ({"rdzv_backend": "nonsense"}, "'nonsense'.*c10d"),
        ({"rdzv_backend": "static", "node_rank": 1}, "node_rank=1 is out of range"),
        ({"event_log_handler": "nowhere"}, "event_log_handler='nowhere'.*console, dynamic_rendezvous, null"),
        (
            {"logs_specs": NOWHERE, "duplicate_stdout_filters": ["loss"]},
            "duplicate_stdout_.*'loss'.* needs a file for the filtered lines",
        ),
        (
            {"logs_specs": NOWHERE, "duplicate_stderr_filters": ["loss"]},
            "duplicate_stderr_.*'loss'.* needs a file for the filtered lines",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    agent: type[Agent], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    """Rows 026, 033 and 034."""
    monkeypatch.setattr(socket, "create_connection", refuse)

    with pytest.raises(ValueError, match=named):
        launch_agent(config(**options), print)
    assert agent.made == []


def test_a_log_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(LogDirError, match="is not a folder"):
        launch_agent(config(logs_specs=DefaultLogsSpecs(str(tmp_path / "file"))), print)


@pytest.mark.parametrize("value", ["soon", "1.5", ""])
def test_a_stop_time_that_is_none_is_refused(agent: type[Agent], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)

    with pytest.raises(ConfigError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT="):
        launch_agent(config(), print)


# What the agent is told.


@pytest.mark.parametrize(
    ("configured", "variable", "seconds"),
    [(None, None, 30), (None, "7", 7), (3, "7", 3), (0, "7", 0), (3, "soon", 3), (None, " 7 ", 7), (None, "-1", 0)],
)
def test_the_stop_time_is_the_configs_else_the_environments_else_30_s(
    agent: type[Agent], configured: int | None, variable: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)

    launch_agent(config(shutdown_timeout=configured), print)

    assert agent.made[0].options["shutdown_timeout"] == seconds


def test_agent_gets_all_requested_options(agent: type[Agent]) -> None:
    launch_config = config(
        role="trainer",
        max_restarts=5,
        monitor_interval=0.5,
        preload=("numpy",),
        start_method="spawn",
        signals_to_handle="SIGTERM",
        log_line_prefix_template="${rank}: ",
        run_id="job-7",
        numa_options=NumaOptions(AffinityMode.SOCKET),
        virtual_local_rank=True,
        event_log_handler="console",
        duplicate_stdout_filters=["loss"],
        duplicate_stderr_filters=["error"],
    )

    elastic_launch(launch_config, print)(1, 2, sep="-")

    (made,) = agent.made
    spec = made.spec
    assert (spec.role, spec.local_world_size, spec.max_restarts, spec.monitor_interval) == ("trainer", 2, 5, 0.5)
    assert (spec.entrypoint, spec.args, spec.kwargs, spec.preload) == (print, (1, 2), {"sep": "-"}, ("numpy",))
    assert (spec.numa_options, spec.virtual_local_rank) == (NumaOptions(AffinityMode.SOCKET), True)
    assert made.start_method == "spawn"
    assert spec.event_log_handler == "console"
    assert (["loss"], ["error"]) == (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
    assert made.options["signals_to_handle"] == "SIGTERM"
    assert made.options["log_line_prefix_template"] == "${rank}: "
    assert spec.rdzv_handler.run_id == "job-7"  # type: ignore[attr-defined]


def test_a_launch_without_a_name_gets_one_of_its_own(agent: type[Agent]) -> None:
    for _ in range(2):
        launch_agent(config(), print)

    one, other = (made.spec.rdzv_handler.run_id for made in agent.made)  # type: ignore[attr-defined]
    assert one and other and one != other


def test_a_config_is_not_changed_by_its_launch(agent: type[Agent]) -> None:
    launch_config = config(logs_specs=DefaultLogsSpecs())

    launch_agent(launch_config, print)

    assert launch_config == config(logs_specs=DefaultLogsSpecs())
    assert launch_config.logs_specs is not None and launch_config.logs_specs.root_log_dir == ""


# Who it meets.


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[NodeJob]:
    """The jobs that a launch wanted a place in; nothing is contacted."""
    wanted: list[NodeJob] = []

    @contextlib.contextmanager
    def open_remote(job: NodeJob, requests: object) -> Iterator[object]:
        wanted.append(job)
        yield job

    monkeypatch.setattr("elasticlib.rendezvous.open_remote", open_remote)
    return wanted


NODES: dict[str, Any] = {"max_nodes": 2, "rdzv_endpoint": "node0:29400", "run_id": "job7"}


def test_a_launch_among_others_opens_its_place_in_the_job(agent: type[Agent], jobs: list[NodeJob]) -> None:
    assert launch_agent(config(**NODES, max_restarts=7), print) == {0: "a", 1: "b"}

    (job,) = jobs
    assert ("job7", "c10d", "node0:29400", 2, 7) == (
        job.run_id,
        job.backend,
        job.endpoint,
        job.max_nodes,
        job.max_restarts,
    )
    assert agent.made[0].spec.rdzv_handler is job


def test_the_fork_server_is_at_its_imports_while_the_nodes_meet(
    agent: type[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule: whoever waits for other nodes need not wait for imports after that."""
    steps: list[str] = []

    @contextlib.contextmanager
    def open_remote(job: NodeJob, requests: object) -> Iterator[object]:
        steps.append("meet")
        yield job

    job = prepared().job
    job.fork_server = ForkServerKey("python")
    monkeypatch.setattr(launch, "prepare_workers", lambda *_: SimpleNamespace(signals_to_handle="", job=job))
    monkeypatch.setattr("elasticlib.rendezvous.open_remote", open_remote)
    monkeypatch.setattr(launch.fork_servers, "take", lambda *_: steps.append("warm"))

    launch_agent(config(**NODES), print)

    assert ["warm", "meet"] == steps


@pytest.mark.parametrize(("local_addr", "host"), [(None, os.uname().nodename), ("10.0.0.7", "10.0.0.7")])
def test_a_node_is_named_after_its_host_and_unlike_any_other(
    agent: type[Agent], jobs: list[NodeJob], local_addr: str | None, host: str
) -> None:
    for _ in range(2):
        launch_agent(config(**NODES, local_addr=local_addr), print)

    one, other = (job.node for job in jobs)
    assert re.fullmatch(rf"{re.escape(host)}/{os.getpid()}-[0-9a-f]{{8}}", one)
    assert one != other


@pytest.mark.parametrize(
    ("configured", "variable", "token"),
    [(None, None, None), (None, "", None), (None, "theirs", "theirs"), ("mine", "theirs", "mine")],
)
def test_a_token_is_the_configs_else_the_environments(
    agent: type[Agent],
    jobs: list[NodeJob],
    monkeypatch: pytest.MonkeyPatch,
    configured: str | None,
    variable: str | None,
    token: str | None,
) -> None:
    monkeypatch.delenv("ELASTICLIB_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("ELASTICLIB_TOKEN", variable)

    launch_agent(config(**NODES, token=configured), print)

    assert [token] == [job.token for job in jobs]


def test_a_scheduler_orders_the_nodes(agent: type[Agent], jobs: list[NodeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")

    launch_agent(config(**NODES), print)

    assert [1] == [job.node_rank for job in jobs]


def test_rendezvous_warnings_for_the_user_are_logged(
    agent: type[Agent], jobs: list[NodeJob], caplog: pytest.LogCaptureFixture
) -> None:
    launch_agent(config(**{**NODES, "run_id": "none"}), print)

    assert "give each job its own id" in caplog.text


class Handler:
    """Someone else's rendezvous handler, as the agent would get it."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def get_backend(self) -> str:
        return str(self.params.backend)


def test_third_party_back_end_gets_all_requested_parameters(
    agent: type[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _registry.RendezvousHandlerRegistry()
    own.register("mine", Handler)  # type: ignore[arg-type]
    replace_everywhere(monkeypatch, _registry, "rendezvous_handler_registry", own)

    launch_agent(
        config(rdzv_backend="mine", rdzv_endpoint="x", run_id="job7", max_nodes=3, rdzv_configs={"a": "1"}), print
    )

    handler = agent.made[0].spec.rdzv_handler
    assert isinstance(handler, Handler)
    params = handler.params
    assert ("mine", "x", "job7", 1, 3) == (
        params.backend,
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
    )
    assert "1" == params.get("a")


@pytest.mark.parametrize(
    "error", [RendezvousTimeoutError("1 of 2 came"), RendezvousConnectionError("node0 refused")], ids=type
)
def test_trouble_between_the_nodes_passes_through(
    agent: type[Agent], jobs: list[NodeJob], error: RendezvousError
) -> None:
    agent.result = error

    with pytest.raises(type(error), match=str(error)):
        launch_agent(config(**NODES), print)


def test_a_spare_that_was_not_needed_has_no_results(agent: type[Agent], jobs: list[NodeJob]) -> None:
    """Row 133."""
    agent.result = RunResult(WorkerState.SUCCEEDED)

    assert launch_agent(config(**NODES), print) == {}


# What becomes of the result.


def test_a_launch_may_be_called_again(agent: type[Agent]) -> None:
    call = elastic_launch(config(), print)

    assert call() == call() == {0: "a", 1: "b"}
    assert len(agent.made) == 2


def test_a_failure_is_raised_from_the_exception_of_its_root_cause(agent: type[Agent]) -> None:
    agent.result = RunResult(WorkerState.FAILED, {}, failures())
    agent.cause = ValueError("a bad value")

    with pytest.raises(ChildFailedError) as caught:
        launch_agent(config(), "train.sh")

    assert caught.value.name == "train.sh"
    assert caught.value.failures == agent.result.failures
    assert caught.value.__cause__ is agent.cause


@pytest.mark.parametrize("end", ["success", "failure", "error"])
def test_the_rendezvous_is_closed_however_the_agent_ended(agent: type[Agent], end: str) -> None:
    before = set(threading.enumerate())
    if end != "success":
        failed = RunResult(WorkerState.FAILED, {}, failures())
        agent.result = failed if end == "failure" else KeyboardInterrupt()
        with pytest.raises((ChildFailedError, KeyboardInterrupt)):
            launch_agent(config(), print)
    else:
        launch_agent(config(), print)

    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("elasticlib") for name in names), names


def test_temporary_logs_are_removed_after_a_success(agent: type[Agent]) -> None:
    launch_agent(config(), print)

    assert agent.made[0].logs.root_log_dir == ""


def test_temporary_logs_are_kept_after_a_failure_and_their_path_logged(
    fails_with_logs: type[Agent], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "elasticlib"), pytest.raises(ChildFailedError):
        launch_agent(config(), print)

    (folder,) = tmp_path.iterdir()
    assert f"logs and error files are kept in {folder}" in caplog.text


@pytest.fixture
def fails_with_logs(agent: type[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    """The agent of a launch that leaves an error file in a temporary folder below *tmp_path*."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(agent, "leaves", "{}")
    agent.result = RunResult(WorkerState.FAILED, {}, failures())
    return agent


def test_an_error_names_the_hosts_that_were_lost(fails_with_logs: type[Agent]) -> None:
    with pytest.raises(ChildFailedError) as caught:
        launch_agent(config(), print)

    assert ("n2",) == caught.value.lost_hosts


def test_callers_logs_specs_name_the_folder_of_the_last_launch(fails_with_logs: type[Agent], tmp_path: Path) -> None:
    mine = DefaultLogsSpecs()
    kept = []
    for _ in range(2):
        with pytest.raises(ChildFailedError):
            launch_agent(config(logs_specs=mine), print)
        kept.append(mine.root_log_dir)
        assert mine == DefaultLogsSpecs()
    fails_with_logs.result = RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"})
    launch_agent(config(logs_specs=mine), print)

    assert sorted(kept) == sorted(str(each) for each in tmp_path.iterdir())
    assert (2, "") == (len(set(kept)), mine.root_log_dir)


def test_temporary_logs_that_hold_nothing_go_however_the_launch_ends(
    agent: type[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent.result = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        launch_agent(config(), print)

    assert list(tmp_path.iterdir()) == []


def test_a_log_folder_of_the_users_stays_after_a_success(agent: type[Agent], tmp_path: Path) -> None:
    launch_agent(config(logs_specs=DefaultLogsSpecs(str(tmp_path))), print)

    assert list(tmp_path.iterdir()) != []
