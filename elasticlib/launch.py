"""
`elastic_launch` and `launch_agent`: the only place that wires a launch together.

Rules of this file: everything is checked before anything is started; what the process had before the
launch (environment, signal handlers, folder) it has after it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, fields

from elasticlib import events, metrics, records
from elasticlib.agent import LocalElasticAgent
from elasticlib.agent._health import HealthCheckServer
from elasticlib.errors import ChildFailedError, ConfigError, root_cause
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.logs._streams import Duplicates
from elasticlib.rendezvous import Rules, _choice, open_local, open_remote
from elasticlib.rendezvous._choice import Choice, PlugIn, Private
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._names import host_name, node_name
from elasticlib.spec import TOKEN_VARIABLE, Entrypoint, LaunchConfig, LogsDest, WorkerSpec, entrypoint_name
from elasticlib.state import RunResult
from elasticlib.workers import _devices

_log = logging.getLogger("elasticlib")

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_SHUTDOWN_TIMEOUT = 30


class elastic_launch:  # noqa: N801 - torch's name
    """
    Runs *entrypoint* on every worker of *config* when called, and returns {global rank: result}.

    *entrypoint* is a callable, the path of a Python script (a ``pathlib.Path``, or text that ends in
    ``.py``), the name of a module with ``LaunchConfig(module=True)``, or any other program. The call's
    arguments are those of the callable, or the command line of the script or program; the results are the
    callable's return values, None for others. Calls may come from any thread and run side by side.

    Each node of a job makes the same call and gets the results of its own workers; a spare that was not
    needed gets {}.

    A *health_check_server* that the caller has started is stopped when a call ends.

    Raises `ConfigError` before anything is started when the call cannot work, `ChildFailedError`, from the
    worker's own exception, when workers failed and no restart was left, on every node of the job with the
    same root cause; `RendezvousError` and its kinds when the nodes could not meet or lost each other, and
    `SignalException` when a signal ended the launch. (torch: ``torch.distributed.launcher.elastic_launch``)
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Entrypoint, health_check_server: HealthCheckServer | None = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Run the workers to their end and return {global rank: result}."""
        return launch_agent(self._config, self._entrypoint, args, self._health_check_server, kwargs)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any] = (),
    health_check_server: HealthCheckServer | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[int, Any]:
    """What a call of `elastic_launch` does. (torch: ``torch.distributed.launcher.api.launch_agent``)"""
    events.get_logging_handler(config.event_log_handler)
    sink = _sink(config)
    grace = _shutdown_timeout(config)
    logs = config.logs_specs if config.logs_specs is not None else DefaultLogsSpecs()
    if isinstance(logs, DefaultLogsSpecs):
        logs = logs.for_launch()
        logs.check()
    duplicates = Duplicates(config.duplicate_stdout_filters, config.duplicate_stderr_filters)
    if getattr(logs, "root_log_dir", None) == os.devnull:
        duplicates.check(LogsDest())
    workers = _devices.workers_per_node(config.nproc_per_node)
    choice = _choose(config)
    if isinstance(choice, Job):
        choice = evolve(choice, work=entrypoint_name(entrypoint))
    sink(records.LaunchStarted(entrypoint_name(entrypoint), {**_summary(config), "nproc_per_node": workers}))
    succeeded = False
    try:
        with _opened(choice, config) as rendezvous:
            spec = WorkerSpec(
                role=config.role,
                local_world_size=workers,
                rdzv_handler=rendezvous,
                entrypoint=entrypoint,
                args=tuple(args),
                max_restarts=config.max_restarts,
                monitor_interval=config.monitor_interval,
                local_addr=config.local_addr,
                event_log_handler=config.event_log_handler,
                numa_options=config.numa_options,
                virtual_local_rank=config.virtual_local_rank,
                duplicate_stdout_filters=config.duplicate_stdout_filters,
                duplicate_stderr_filters=config.duplicate_stderr_filters,
                kwargs=dict(kwargs or {}),
                module=config.module,
                no_python=config.no_python,
                preload=config.preload,
                worker_server=config.worker_server,
            )
            agent = LocalElasticAgent(
                spec,
                logs,
                config.start_method,
                log_line_prefix_template=config.log_line_prefix_template,
                shutdown_timeout=grace,
                health_check_server=health_check_server,
                signals_to_handle=config.signals_to_handle,
                sink=sink,
            )
            result = _run(agent)
        if result.is_failed():
            _raise_failure(agent, entrypoint, result)
        succeeded = True
    finally:
        if isinstance(logs, DefaultLogsSpecs):
            logs.remove_if_temporary(only_if_empty=not succeeded)
            if not succeeded and logs.root_log_dir:
                records.log(records.LogsKept(logs.root_log_dir))
    return result.return_values


def _choose(config: LaunchConfig) -> Choice:
    """Which rendezvous *config* means on this machine; what its user should know is logged."""
    choice, warnings = _choice.choose(
        config,
        node=node_name(config.local_addr),
        fresh_id=uuid.uuid4().hex,
        token=config.token or os.environ.get(TOKEN_VARIABLE) or None,
        index=_choice.scheduler_index(os.environ),
    )
    for warning in warnings:
        _log.warning(warning)
    return choice


@contextlib.contextmanager
def _opened(choice: Choice, config: LaunchConfig) -> Iterator[object]:
    """What the agent meets the other nodes through, for the length of the block."""
    match choice:
        case Private(run_id, backend, port):
            rules = Rules(1, 1, config.max_restarts)
            with open_local(run_id, rules, backend=backend, node=host_name(config.local_addr), port=port) as rendezvous:
                yield rendezvous
        case Job():
            with open_remote(choice) as rendezvous:
                yield rendezvous
        case PlugIn(run_id, backend):
            from elasticlib.rendezvous._handlers import RendezvousParameters
            from elasticlib.rendezvous.registry import get_rendezvous_handler

            yield get_rendezvous_handler(
                RendezvousParameters(
                    backend,
                    config.rdzv_endpoint,
                    run_id,
                    config.min_nodes,
                    config.max_nodes,
                    config.local_addr,
                    **config.rdzv_configs,
                )
            )


def _sink(config: LaunchConfig) -> records.Sink:
    """Where the launch's records go: to the log, and as metrics to the handler that ``metrics_cfg`` names."""
    handler = metrics.handler_of(config.metrics_cfg)
    return records.log if handler is None else records.fan_out(records.log, metrics.MetricSink(config.role, handler))


def _summary(config: LaunchConfig) -> dict[str, object]:
    """What was asked for, but for what has no value and what nobody may see."""
    values = {field.name: getattr(config, field.name) for field in fields(LaunchConfig) if field.repr}
    return {name: value for name, value in values.items() if value is not False and value not in (None, "", {})}


def _run(agent: LocalElasticAgent) -> RunResult:
    """The result of *agent*; that there was one, or none, is told as torch's launcher does."""
    try:
        result = agent.run()
    except BaseException as error:
        agent.conclude(error)
        raise
    agent.conclude()
    return result


def _raise_failure(agent: LocalElasticAgent, entrypoint: Entrypoint, result: RunResult) -> None:
    error = ChildFailedError(entrypoint_name(entrypoint), result.failures)
    rank, _ = root_cause(result.failures)
    raise error from agent.original_exception(rank)


def _shutdown_timeout(config: LaunchConfig) -> float:
    if config.shutdown_timeout is not None:
        return config.shutdown_timeout
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_SHUTDOWN_TIMEOUT))
    if not text.isdecimal():
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} must be whole seconds, 0 or more")
    return int(text)


__all__ = ["elastic_launch", "launch_agent"]


def __getattr__(name: str) -> object:
    """torch's module of this name is a command, which lives on a floor above this one."""
    if name in ("launch", "main", "parse_args"):
        return getattr(importlib.import_module("elasticlib._legacy_launch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("elasticlib._legacy_launch").main()
