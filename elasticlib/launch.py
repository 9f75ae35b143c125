"""
`elastic_launch` and `launch_agent`: the only place that wires a launch together.

Rules of this file: everything is checked before anything is started; what the process had before the
launch (environment, signal handlers, folder) it has after it. torch's own configuration is known by its name and its
fields, and torch is not imported for it: what it holds is taken as it is, and what nothing here reads is warned of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from elasticlib import events, metrics, records
from elasticlib.agent._checks import check_health_check_server
from elasticlib.errors import ChildFailedError, ConfigError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.logs._streams import Duplicates, make_ready
from elasticlib.rendezvous import _choice
from elasticlib.rendezvous._choice import Choice, PlugIn, Private
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._names import host_name, node_name
from elasticlib.rendezvous._options import ETCD
from elasticlib.spec import TOKEN_VARIABLE, Entrypoint, LaunchConfig, LogsDest, LogsSpecs, WorkerSpec, entrypoint_name
from elasticlib.state import RunResult
from elasticlib.workers import _devices
from elasticlib.workers._fork_servers import flags_here, fork_servers
from elasticlib.workers._plan import prepare

if TYPE_CHECKING:
    from elasticlib.agent import LocalElasticAgent
    from elasticlib.agent._health import HealthCheckServer

_log = logging.getLogger("elasticlib")

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_SHUTDOWN_TIMEOUT = 30
_OF_TORCH = frozenset(each.name for each in fields(LaunchConfig) if not each.kw_only)
"""Fields that torch's ``LaunchConfig`` has too."""


class elastic_launch:  # noqa: N801 - torch's name
    """
    Runs *entrypoint* on every worker of *config* when called, and returns {global rank: result}.

    *entrypoint* is a callable, the path of a Python script (a ``pathlib.Path``, or text that ends in
    ``.py``), the name of a module with ``LaunchConfig(module=True)``, or any other program. The call's
    arguments are those of the callable, or the command line of the script or program; the results are the
    callable's return values, None for others. Calls may come from any thread and run side by side.

    Each node of a job makes the same call and gets the results of its own workers; a spare that was not
    needed gets {}, one whose workers had ended well before others repeated the round `RendezvousGracefulExitError`.

    *config* may be torch's own ``LaunchConfig``: its fields are taken as they are at the call, torch's defaults too.
    A *health_check_server* that the caller has started is stopped when a call ends, however it does. After a launch
    the caller's `DefaultLogsSpecs` names in ``root_log_dir`` the folder that was kept.

    Raises `ConfigError` before anything is started when the call cannot work, `ChildFailedError`, from the
    worker's own exception, when workers failed and no restart was left, on every node of the job with the
    same root cause; `RendezvousError` and its kinds when the nodes could not meet or lost each other, and
    `SignalException` when a signal ended the launch. (torch: ``torch.distributed.launcher.elastic_launch``)
    """

    def __init__(
        self, config: LaunchConfig, entrypoint: Entrypoint, health_check_server: HealthCheckServer | None = None
    ) -> None:
        as_launch_config(config)  # refused now; what it holds counts when it is called
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
    check_health_check_server(health_check_server)
    with contextlib.ExitStack() as until_run:
        if health_check_server is not None:
            from elasticlib.agent._watch import stop_health_check

            until_run.callback(stop_health_check, health_check_server, records.log)
        config = as_launch_config(config)
        asked = config.logs_specs if config.logs_specs is not None else DefaultLogsSpecs()
        logs = asked.for_launch() if isinstance(asked, DefaultLogsSpecs) else asked
        metric_handler = _check(config, logs)
        title = _title(entrypoint, args)
        choice = _choose(config)
        if isinstance(choice, Job):
            choice = evolve(choice, work=title)
        flags = flags_here() if callable(entrypoint) else ()
        workers = _devices.workers_per_node(config.nproc_per_node, config.preload, flags)
        spec = _worker_spec(config, workers, entrypoint, args, kwargs or {})
        if spec.numa_options is None:
            spec.numa_options = _devices.default_numa_options(workers, config.preload, flags)
        grace = _shutdown_timeout(config)
        prepared = prepare(spec, config.start_method, config.signals_to_handle)
        _warn_of_strange_ranks(logs, workers)
        records.log(records.LaunchStarted(title, {**_summary(config), "nproc_per_node": workers}))
        succeeded = False
        make_ready(logs, choice.run_id)  # others must not meet a node that cannot work
        try:
            job = prepared.job
            warming = fork_servers.warming(job.fork_server, job.common.env, job.search_path)
            with warming, _opened(choice, config) as spec.rdzv_handler:
                from elasticlib.agent import LocalElasticAgent

                agent = LocalElasticAgent(
                    spec,
                    logs,
                    config.start_method,
                    log_line_prefix_template=config.log_line_prefix_template,
                    shutdown_timeout=grace,
                    health_check_server=health_check_server,
                    signals_to_handle=config.signals_to_handle,
                    metric_handler=metric_handler,
                    prepared=prepared,
                )
                until_run.pop_all()  # the agent stops it when its run ends
                result = _run(agent)
            if result.is_failed():
                error = ChildFailedError(title, result.failures)
                rank, _ = error.get_first_failure()
                raise error from agent.original_exception(rank)
            succeeded = True
        finally:
            if isinstance(logs, DefaultLogsSpecs) and isinstance(asked, DefaultLogsSpecs):
                logs.forget_unused()
                logs.remove_if_temporary(only_if_empty=not succeeded)
                asked.tell(logs)
                if not succeeded and logs.root_log_dir:
                    records.log(records.LogsKept(logs.root_log_dir))
        return result.return_values


def _check(config: LaunchConfig, logs: LogsSpecs) -> metrics.MetricHandler | None:
    """Refuse what can be seen to be wrong by itself. The launch's own handler of metrics; None for the program's."""
    events.get_logging_handler(config.event_log_handler)
    metric_handler = metrics.handler_of(config.metrics_cfg)
    if isinstance(logs, DefaultLogsSpecs):
        logs.check()
    if getattr(logs, "root_log_dir", None) == os.devnull:
        Duplicates(config.duplicate_stdout_filters, config.duplicate_stderr_filters).check(LogsDest())
    return metric_handler


def _title(entrypoint: Entrypoint, args: Sequence[Any]) -> str:
    """
    What reports call the work.

    The function's bare name, or the name of the file or module: where the program is this interpreter, of what it is
    to run.
    """
    if isinstance(entrypoint, (str, os.PathLike)):
        path = os.fspath(entrypoint)
        if path == sys.executable:
            path = next((each for each in map(str, args) if each and not each.startswith("-")), path)
        return os.path.basename(path)
    while isinstance(entrypoint, partial):
        entrypoint = entrypoint.func
    return str(getattr(entrypoint, "__name__", None) or entrypoint_name(entrypoint))


def _worker_spec(
    config: LaunchConfig, workers: int, entrypoint: Entrypoint, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> WorkerSpec:
    """The workers of this node, still without a rendezvous."""
    shared = {each.name for each in fields(WorkerSpec)} & {each.name for each in fields(LaunchConfig)}
    asked = {name: getattr(config, name) for name in shared}
    return WorkerSpec(
        **{**asked, "local_addr": config.local_addr or None},
        local_world_size=workers,
        rdzv_handler=None,
        entrypoint=entrypoint,
        args=tuple(args),
        kwargs=dict(kwargs),
    )


def _warn_of_strange_ranks(logs: LogsSpecs, workers: int) -> None:
    """Say which local ranks *logs* names and this node does not have; another node of the job may have them."""
    for name in ("local_ranks_filter", "redirects", "tee"):
        named = getattr(logs, f"_{name}", None)  # where torch's own specifications keep it too
        if not isinstance(named, (Mapping, Set)):
            continue
        strange = sorted(rank for rank in named if rank not in range(workers))
        if strange:
            hidden = name == "local_ranks_filter" and len(strange) == len(named)
            _log.warning(
                "%s names local rank%s %s, but this node has %s only: %s",
                name,
                "s" * (len(strange) > 1),
                ", ".join(map(str, strange)),
                {1: "0", 2: "0 and 1"}.get(workers, f"0 to {workers - 1}"),
                "no worker of this node is shown on the console" if hidden else "that has no effect here",
            )


def _choose(config: LaunchConfig) -> Choice:
    """Which rendezvous *config* means on this machine; what its user should know is logged."""
    choice, warnings = _choice.choose(
        config,
        node=node_name(config.local_addr),
        fresh_id=uuid.uuid4().hex,
        token=config.token or os.environ.get(TOKEN_VARIABLE) or None,
        index=_choice.scheduler_index(os.environ),
    )
    if isinstance(choice, Job) and choice.backend in ETCD and not config.rdzv_endpoint.strip():
        _find_local_etcd(choice)
    for warning in warnings:
        _log.warning(warning)
    return choice


def _find_local_etcd(job: Job) -> None:
    """Raise `ConfigError` unless somebody listens at the endpoint that none means: nobody would wait for that one."""
    import socket  # only here: most launches need none

    host, _, port = job.endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"rdzv_endpoint='': rdzv_backend={job.backend!r} needs the address of an etcd server, such as "
            f"node0:2379, and none answers at {job.endpoint} ({error})"
        ) from error


@contextlib.contextmanager
def _opened(choice: Choice, config: LaunchConfig) -> Iterator[object]:
    """What the agent meets the other nodes through, for the length of the block."""
    # Imported only now, while the fork server is at its own imports.
    from elasticlib.rendezvous import Rules, open_local, open_remote

    match choice:
        case Private(run_id, backend, port):
            rules = Rules(1, 1, config.max_restarts)
            with open_local(run_id, rules, backend=backend, node=host_name(config.local_addr), port=port) as rendezvous:
                yield rendezvous
        case Job():
            with open_remote(choice) as rendezvous:
                yield rendezvous
        case PlugIn(run_id, backend):
            from elasticlib.rendezvous.handlers._base import RendezvousParameters
            from elasticlib.rendezvous.handlers._registry import get_rendezvous_handler

            yield get_rendezvous_handler(
                RendezvousParameters(
                    backend,
                    config.rdzv_endpoint,
                    run_id,
                    config.min_nodes,
                    config.max_nodes,
                    config.local_addr or None,
                    **config.rdzv_configs,
                )
            )


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


def _shutdown_timeout(config: LaunchConfig) -> float:
    if config.shutdown_timeout is not None:
        return config.shutdown_timeout
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_SHUTDOWN_TIMEOUT))
    try:
        return max(0, int(text))
    except ValueError:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} must be whole seconds, 0 or more") from None


def as_launch_config(value: object) -> LaunchConfig:
    """
    *value* where it is a `LaunchConfig`, or a new one with the fields of torch's ``LaunchConfig``.

    Raises `ConfigError` for anything else, and for a value that breaks a rule. A field that is unknown here and says
    something is named in a warning. *value* is not changed.
    """
    if isinstance(value, LaunchConfig):
        return value
    kinds = [each for each in type(value).__mro__ if each.__name__ == "LaunchConfig"]
    kind = next(filter(dataclasses.is_dataclass, kinds), None)
    if kind is None:
        raise ConfigError(
            f"config{_shown(value, like_it=bool(kinds))} is no LaunchConfig: give one, such as "
            "elasticlib.LaunchConfig(nproc_per_node=2)"
        )
    given = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    for each in dataclasses.fields(kind):
        if each.name not in _OF_TORCH and not _is_default(each, given[each.name]):
            _log.warning(
                "%s=%r has no effect: elasticlib's LaunchConfig has no such field", each.name, given[each.name]
            )
    return LaunchConfig(**{name: each for name, each in given.items() if name in _OF_TORCH})


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _shown(value: object, *, like_it: bool) -> str:
    # Anything but a plain value may hold a token, which must not end up in a log.
    if isinstance(value, (str, int, float, type, type(None))):
        return f"={value!r}"
    return f", a {type(value).__qualname__}{' that is no dataclass' if like_it else ''},"


__all__ = ["elastic_launch", "launch_agent"]


def __getattr__(name: str) -> object:
    """torch's module of this name is a command, whose code is in a layer above this one."""
    if name in ("launch", "main", "parse_args"):
        return getattr(importlib.import_module("elasticlib.cli._legacy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("elasticlib.cli._legacy").main()
