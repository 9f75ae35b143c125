"""
`elastic_launch` and `launch_agent`: the only module that wires the parts of a launch together.

Rules of this file: everything is checked before anything is started. After a launch the process
has the same environment, signal handlers and working directory as before.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from elasticlib import _rules, events, metrics, records
from elasticlib._clock import wall_time
from elasticlib._torch_config import as_launch_config
from elasticlib.agent import EndNotice, check_health_check_server
from elasticlib.engines import end_of_job, is_cancelled, kill_wait, reachable, with_all_nodes
from elasticlib.errors import ChildFailedError, ConfigError, ElasticError, PreemptedError, SignalException
from elasticlib.job import (
    GPU_SHARES,
    AnnouncedEnd,
    Job,
    JobLogs,
    Results,
    announce_log_folder,
    combined_error,
    controlled,
    end_watch,
    own_logs,
    remove_logs,
    shown_ranks,
    shows_errors_in_cell,
    source_of,
    uncaught_hook,
    warn_of_ranks,
    warn_of_shown_ranks,
)
from elasticlib.logs import DefaultLogsSpecs, Duplicates, make_run_folder
from elasticlib.notebook import CallersStream, ipython_shell, is_stdout_replaced
from elasticlib.preload import preload_for
from elasticlib.processes import flags_here, open_files_needed
from elasticlib.rendezvous import PlugIn, check_for_engine, choose_rendezvous, command_line, opened_rendezvous
from elasticlib.spec import Entrypoint, LaunchConfig, LogsDest, LogsSpecs, WorkerSpec, entrypoint_name
from elasticlib.state import RunResult
from elasticlib.workers import (
    NOTICES,
    HandledSignals,
    check_call,
    default_numa_options,
    end_signals,
    fork_servers,
    parse_signals,
    prepare_workers,
    serving_caller,
    shown_by_caller,
    with_descriptors,
    without_keyboard,
    workers_per_node,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from elasticlib.agent import HealthCheckServer, LocalElasticAgent
    from elasticlib.engines import BatchEngine, Engine
    from elasticlib.job import Source
    from elasticlib.remote import BatchLaunch, RemoteLaunch
    from elasticlib.workers import ForkServer, Preparation

_log = logging.getLogger("elasticlib")

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_SHUTDOWN_TIMEOUT = 30
_NOTHING = contextlib.nullcontext()


class elastic_launch:  # noqa: N801 - torch's name
    """
    Launcher of *entrypoint* on all workers of *config*; a call returns `Results`: {global rank: result}.

    *entrypoint* is one of these:

    * a callable; its return values are the results
    * the path of a Python script (a ``pathlib.Path``, or text that ends in ``.py``)
    * the name of a module, with ``LaunchConfig(module=True)``
    * any other program

    The call's arguments go to the callable, or form the command line of the script or program, whose
    results are None. Any thread may make calls, and several calls may run at the same time.

    With *on*, an engine such as ``elasticlib.engines.Ssh(["h1", "h2"])``, this one call runs the job on
    all of its machines, and returns the results of all of their ranks. Without it, each node of a job
    makes the same call and gets the results of its own workers. A spare node that was not needed gets
    {}. If a node's workers had succeeded before the others repeated the round, its call raises
    `RendezvousGracefulExitError`.

    *config* may be torch's own ``LaunchConfig``: the call reads its fields, also torch's defaults. A
    *health_check_server* that the caller has started is stopped at the end of every call. After a
    launch, ``root_log_dir`` of the caller's `DefaultLogsSpecs` is the folder that was kept.

    Raises:

    * `ConfigError` before anything is started, if the call cannot work
    * `ChildFailedError`, from the worker's own exception, if workers failed and no restart was left;
      all nodes of the job raise it with the same root cause
    * `RendezvousError` and its subclasses, if the nodes could not meet or lost each other
    * `SignalException`, if a signal ended the launch

    (torch: ``torch.distributed.launcher.elastic_launch``)
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Entrypoint,
        health_check_server: HealthCheckServer | None = None,
        *,
        on: Engine | BatchEngine | None = None,
    ) -> None:
        # Invalid settings are refused now; the call reads the settings again.
        as_launch_config(config)
        if on is not None and not _is_engine(on):
            raise ConfigError.of_setting("on", f"{on!r} is not an engine: give one, such as Ssh(['h1', 'h2'])")
        if on is not None and health_check_server is not None:
            raise ConfigError("health_check_server cannot be combined with on: each node has its own; leave it out")
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._on = on

    def __call__(self, *args: Any, **kwargs: Any) -> Results:
        """Run the workers to their end and return {global rank: result}."""
        if self._on is not None:
            return Job(self._remote_launch(self._on, args, kwargs, is_started=False)).run()
        return launch_agent(self._config, self._entrypoint, args, self._health_check_server, kwargs)

    def start(self, *args: Any, **kwargs: Any) -> Job:
        """
        Start the workers in the background, and return at once the `Job` that controls them.

        Raises the same errors as a call, before anything is started. Without ``LaunchConfig.logs_specs``
        all output goes to files that `Job.logs` reads, and that of rank 0 also to the console. A job
        that still runs at the end of the program is stopped. Raises `JobRunsError` if a notebook's
        cell is executed again while the job of its last execution runs.
        """
        if self._on is not None:
            return Job(self._remote_launch(self._on, args, kwargs, is_started=True)).begin()
        return Job(CheckedLaunch(self._config, self._entrypoint, args, self._health_check_server, kwargs, True)).begin()

    def _remote_launch(
        self, engine: Engine | BatchEngine, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_started: bool
    ) -> RemoteLaunch | BatchLaunch:
        from elasticlib.remote import RemoteLaunch, batch_launch, check_number_of_nodes

        check_number_of_nodes(engine)
        config = as_launch_config(self._config)
        title, grace = title_of(self._entrypoint, args), _shutdown_timeout(config)
        _check_for_engine(config, engine.nodes, self._entrypoint, args, kwargs)
        if config.show is None and config.logs_specs is None:
            # The output of a batch job is the only place with that of the other ranks.
            is_short = _is_placing(engine) and (is_started or is_stdout_replaced())
            config = evolve(config, show=(0,) if is_short else "all")
        if _is_placing(engine):
            return RemoteLaunch(
                engine, config, self._entrypoint, args, kwargs, title=title, grace=grace, is_started=is_started
            )
        return batch_launch(engine, config, self._entrypoint, args, kwargs, title=title, grace=grace)


def _is_placing(engine: Engine | BatchEngine) -> TypeIs[Engine]:
    return callable(getattr(engine, "place", None))


def _is_engine(on: object) -> bool:
    """Return True for an engine; its class has the same methods, and cannot be called by them."""
    has_method = callable(getattr(on, "place", None)) or callable(getattr(on, "submit", None))
    return has_method and not isinstance(on, type)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any] = (),
    health_check_server: HealthCheckServer | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Results:
    """
    Run a launch to its end, as a call of `elastic_launch` does.

    (torch: ``torch.distributed.launcher.api.launch_agent``)
    """
    return Job(CheckedLaunch(config, entrypoint, args, health_check_server, kwargs or {})).run()


class CheckedLaunch:
    """
    A checked launch, which can run once.

    *is_started*: it runs in the background of the program. *follows_callers*: its output goes through
    ``sys.stdout``, which later callers may replace. *has_keyboard*: False on a machine that is not the
    caller's. *cell_shows_errors*: a notebook on another machine shows the exceptions of workers.
    """

    outlives_program = False

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Entrypoint,
        args: Sequence[Any],
        health_check_server: HealthCheckServer | None,
        kwargs: Mapping[str, Any],
        is_started: bool = False,
        title: str = "",
        *,
        follows_callers: bool = False,
        has_keyboard: bool = True,
        cell_shows_errors: bool = False,
    ) -> None:
        check_health_check_server(health_check_server)
        self._health_check_server = health_check_server

        # An error below releases everything; only a whole launch keeps both stacks.
        with uncaught_hook(), contextlib.ExitStack() as until_end, contextlib.ExitStack() as until_run:
            if health_check_server is not None:
                from elasticlib.agent import stop_health_check

                until_run.callback(stop_health_check, health_check_server, records.log)

            self._config = config = _with_all_nodes(as_launch_config(config))
            self._follows_callers, self._cell_shows_errors = follows_callers, cell_shows_errors
            self._has_keyboard = has_keyboard
            self._choose_output(is_started)
            self._metric_handler = _check(config, self._logs)
            self._is_pool = bool(title)
            self.title = title or title_of(entrypoint, args)
            if self.console is not None:
                self.console.files = lambda: getattr(self._logs, "root_log_dir", "")
                self.console.watch(self.title, shown_ranks(config), is_pool=self._is_pool, is_started=is_started)
                until_end.callback(self.console.rest)

            self._choice = choose_rendezvous(config, work=self.title, command=_command_of(self.title, entrypoint, args))

            # Before the workers are counted, since a word for their number counts these GPUs.
            gpus = GPU_SHARES.of(f"job {self.title!r}", config.devices, config.nproc_per_node, is_started=is_started)
            shown = until_end.enter_context(gpus)
            self._spec = _worker_spec(config, entrypoint, args, kwargs, shown)
            self.grace = _shutdown_timeout(config)
            self._prepared = self._prepare(shown)
            self.signums = parse_signals(self._prepared.signals_to_handle)
            self._end_notice = _end_notice_of(config, self.signums)
            self._end_sources = _end_sources_of(config, self._end_notice, self.grace)
            self.quit_shows_stacks = isinstance(config.signals_to_handle, _rules.Default)
            warn_of_ranks(self._logs, self.workers, config)
            records.log(records.LaunchStarted(self.title, {**_summary(config), "nproc_per_node": self.workers}))

            # The last check before the rendezvous: other nodes must not meet a node that cannot work.
            make_run_folder(self._logs, self._choice.run_id)
            self._until_run, self._until_end = until_run.pop_all(), until_end.pop_all()

    def _choose_output(self, is_started: bool) -> None:
        """Choose the console and the logs of this launch; *is_started*: it runs in the background."""
        config = self._config
        is_shown_here = self._follows_callers or (is_stdout_replaced() and config.logs_specs is None)
        self.console = CallersStream() if is_shown_here else None
        given = own_logs(config, is_started or self.console is not None)
        self._given_logs = given
        self._logs = given.for_launch() if isinstance(given, DefaultLogsSpecs) else given

    def _prepare(self, shown: Mapping[str, str]) -> Preparation:
        """Check the call; the workers get the variables *shown*, which name their GPUs."""
        config = self._config
        prepared = prepare_workers(self._spec, config.start_method, config.signals_to_handle, shown)
        if self._cell_shows_errors:
            job = shown_by_caller(prepared.job, errors=True, display_key="", ranks=())
            return evolve(prepared, job=job)
        if not self._has_keyboard:
            return evolve(prepared, job=without_keyboard(prepared.job))
        is_in_notebook = ipython_shell() is not None
        if not is_in_notebook and not self._follows_callers:
            return prepared

        job = prepared.job
        if is_in_notebook:
            key = self.console.word if self.console is not None else ""
            job = shown_by_caller(job, errors=shows_errors_in_cell(config), display_key=key, ranks=shown_ranks(config))

        return evolve(prepared, job=serving_caller(job))

    @property
    def folder(self) -> str:
        """
        Folder of the output after success, or of a stopped pool, to remove with the job's object.

        "" if nothing may be removed.
        """
        if self.console is not None and self.console.is_full:
            # The cell did not show all output: the folder stays after the job's object is gone.
            return ""
        return self._logs.root_log_dir if isinstance(self._logs, JobLogs) else ""

    @property
    def workers(self) -> int:
        """Number of workers on this node."""
        return self._spec.local_world_size

    def hand(self, descriptors: Mapping[str, int]) -> None:
        """
        Give each worker copies of *descriptors*, by name.

        The copies are made now, since the caller may close its own before the workers start.
        """
        copies: dict[str, int] = {}
        for name, descriptor in descriptors.items():
            copies[name] = os.dup(descriptor)
            self._until_end.callback(os.close, copies[name])
        self._prepared = evolve(self._prepared, job=with_descriptors(self._prepared.job, copies))

    def abandon(self) -> None:
        """Release the resources of a launch that will not run."""
        with self._until_end:
            self._until_run.close()
        if isinstance(self._logs, DefaultLogsSpecs):
            self._logs.forget_unused()

    def __call__(self, job: Job) -> dict[int, Any]:
        """Run the workers of *job* to their end, and return {global rank: result}."""
        with self._until_end, self._until_run as until_run:
            # A signal ends the job from the first process on. While a third-party rendezvous handler
            # is made, which may take any time, signals have the same effect as before.
            is_ours = not isinstance(self._choice, PlugIn)
            own = HandledSignals(self.signums if is_ours else (), job.inbox, takes_notices=True)
            with own:
                return self._run(job, until_run)

    def _say_that_it_starts(self, there: ForkServer | None) -> None:
        """Print in the cell why no output appears for some seconds."""
        if self.console and there and not there.ready() and "torch" in there.key.preload:
            self.console.say("starting: importing torch\n")

    def _run(self, job: Job, until_run: contextlib.ExitStack) -> dict[int, Any]:
        config, spec, logs, given = self._config, self._spec, self._logs, self._given_logs
        succeeded, is_kept = False, True
        announce_log_folder(logs)
        try:
            plan = self._prepared.job
            warming = fork_servers.warming(plan.fork_server, plan.common.env, plan.search_path)
            with (
                open_files_needed("the job"),
                warming as there,
                opened_rendezvous(self._choice, config, job.inbox) as spec.rdzv_handler,
            ):
                self._say_that_it_starts(there)

                # Imported here, while the fork server is at its own imports.
                from elasticlib.agent import LocalElasticAgent

                agent = LocalElasticAgent(
                    spec,
                    logs,
                    config.start_method,
                    log_line_prefix_template=config.log_line_prefix_template,
                    shutdown_timeout=self.grace,
                    health_check_server=self._health_check_server,
                    signals_to_handle=config.signals_to_handle,
                    sink=records.fan_out(records.log, job.sink),
                    metric_handler=self._metric_handler,
                    prepared=self._prepared,
                    console=self.console,
                    repeats_errors=not self._cell_shows_errors and ipython_shell() is None,
                    inbox=job.inbox,
                    end_notice=self._end_notice,
                    interrupt_shows_stacks=self.console is None,
                )
                job.attach(agent)
                if self.console is not None:
                    self.console.files = partial(_place_of_output, weakref.ref(job), logs, shown_ranks(config))
                # From now on the agent stops the health check, when its run ends.
                until_run.pop_all()
                control = controlled(self._choice.run_id, self.title, job.inbox)
                with end_watch(self._end_sources, job.inbox), _NOTHING if self._is_pool else control:
                    result = _run(agent)

            if result.is_failed():
                error = ChildFailedError(self.title, result.failures)
                error._elastic_ranks = agent.get_worker_group().workers[0].world_size
                cause = agent.original_exception(error.get_first_failure()[0])
                combined = combined_error(error, cause, config.raise_as)
                combined.lost_hosts = agent.lost_hosts()
                raise combined from cause

            succeeded = True
        except SignalException:
            # The output of a pool's workers that were stopped on purpose is not needed.
            is_kept = not self._follows_callers
            raise
        finally:
            remove_logs(logs, given, succeeded=succeeded, is_kept=is_kept)

        return result.return_values


def _place_of_output(weak: weakref.ref[Job], logs: LogsSpecs, shown: Sequence[int] | None) -> str:
    """Return the output file of the one rank that is *shown*, or the folder of the files for several."""
    # The reference is weak: a job's files are removed with it, and the caller may live longer.
    job, files = weak(), list[str]()
    if job is not None and shown is not None and len(shown) == 1:
        # ConfigError: the rank is on another node.
        with contextlib.suppress(ConfigError):
            files = job.files(shown[0])
    return files[0] if len(files) == 1 else logs.root_log_dir


def _with_all_nodes(config: LaunchConfig) -> LaunchConfig:
    """Return *config* with numbers for ``min_nodes="all"``; log the values that the engine has filled in."""
    config, filled = with_all_nodes(
        config, os.environ, now=wall_time(), reachable=reachable, kill_wait=partial(kill_wait, os.environ)
    )
    for warning in filled.warnings:
        _log.warning(warning)
    if filled.notice:
        _log.info(filled.notice)
    return config


def _check_for_engine(
    config: LaunchConfig, nodes: int, entrypoint: Entrypoint, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check a call that an engine will run on *nodes* machines, as far as their state does not matter."""
    check_call(entrypoint, args, kwargs, config, config.start_method)
    _check_outputs(config, own_logs(config, True))
    _end_notice_of(config, parse_signals(config.signals_to_handle))
    check_for_engine(config, nodes)
    if isinstance(config.nproc_per_node, int):
        warn_of_shown_ranks(config, config.nproc_per_node * nodes)


def _check(config: LaunchConfig, logs: LogsSpecs) -> metrics.MetricHandler | None:
    """Check settings that depend on nothing else. Return the launch's own metric handler; None: the program's."""
    metric_handler = _check_outputs(config, logs)
    if isinstance(logs, DefaultLogsSpecs):
        logs.check()
    return metric_handler


def _check_outputs(config: LaunchConfig, logs: LogsSpecs) -> metrics.MetricHandler | None:
    """Check the names and filters of a launch's output, and return the launch's own metric handler."""
    events.get_logging_handler(config.event_log_handler)
    metric_handler = metrics.handler_of(config.metrics_cfg)
    if isinstance(logs, DefaultLogsSpecs):
        has_files = logs.has_files()
    else:
        # A plug-in names its files only for a round; a null folder shows earlier that it has none.
        has_files = getattr(logs, "root_log_dir", None) != os.devnull

    if not has_files:
        Duplicates(config.duplicate_stdout_filters, config.duplicate_stderr_filters).check(LogsDest())
    return metric_handler


def title_of(entrypoint: Entrypoint, args: Sequence[Any] = ()) -> str:
    """
    Return the title of the work in reports.

    This is the function's bare name, or the name of the file or module. If the program is this
    interpreter, it is the name of the script or module that it runs.
    """
    if isinstance(entrypoint, (str, os.PathLike)):
        path = os.fspath(entrypoint)
        if path == sys.executable:
            path = next((each for each in map(str, args) if each and not each.startswith("-")), path)
        return os.path.basename(path)
    while isinstance(entrypoint, partial):
        entrypoint = entrypoint.func
    return str(getattr(entrypoint, "__name__", None) or entrypoint_name(entrypoint))


def _command_of(title: str, entrypoint: Entrypoint, args: Sequence[Any]) -> str:
    """Return the text by which a job's nodes compare their calls; empty if arguments are unknown."""
    if isinstance(entrypoint, (str, os.PathLike)):
        return command_line(title, [str(arg) for arg in args])
    # A function's arguments are objects, which cannot be compared. The program's arguments mostly
    # distinguish two calls.
    return "" if ipython_shell() is not None else command_line(title, sys.argv[1:])


def _worker_spec(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shown: Mapping[str, str],
) -> WorkerSpec:
    """Return the spec of this node's workers, still without a rendezvous; they get the variables *shown*."""
    flags = flags_here()

    # The job's own fork server should count the devices, so it must import the same modules.
    ahead = preload_for(entrypoint) if isinstance(config.nproc_per_node, str) else ()
    workers = workers_per_node(config.nproc_per_node, config.preload, flags, shown, ahead)
    shared = {each.name for each in fields(WorkerSpec)} & {each.name for each in fields(LaunchConfig)}
    given = {name: getattr(config, name) for name in shared}
    spec = WorkerSpec(
        **{**given, "local_addr": config.local_addr or None},
        local_world_size=workers,
        rdzv_handler=None,
        entrypoint=entrypoint,
        args=tuple(args),
        kwargs=dict(kwargs),
    )
    if spec.numa_options is None:
        spec.numa_options = default_numa_options(workers, config.preload, flags, shown)
    return spec


def _summary(config: LaunchConfig) -> dict[str, object]:
    """Return the settings of *config* for the log, without empty values and secrets."""
    values = {field.name: getattr(config, field.name) for field in fields(LaunchConfig) if field.repr}
    # By identity: 0 equals False, and is a setting.
    return {name: value for name, value in values.items() if value is not False and value not in (None, "", {})}


def _run(agent: LocalElasticAgent) -> RunResult:
    """Run *agent* and return its result; record success or failure as torch's launcher does."""
    try:
        result = agent.run()
    except PreemptedError as error:
        agent.conclude(error)
        if is_cancelled(os.environ):
            # Its owner wants no other try.
            raise SignalException(f"{error}; the job was cancelled", error.sigval) from None
        raise
    except BaseException as error:
        agent.conclude(error)
        if isinstance(error, ElasticError):
            error.lost_hosts = agent.lost_hosts()
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


def _end_notice_of(config: LaunchConfig, handled: Sequence[signal.Signals]) -> EndNotice:
    """Return the notices that this node gets of its end. Raises `ConfigError`, also for an end in the past."""
    now = wall_time()
    if config.end_time is not None and config.end_time <= now:
        raise ConfigError.of_setting(
            "end_time", f"{config.end_time:.0f} is before the present time {now:.0f}: give a later Unix time"
        )
    end_time = math.inf if config.end_time is None else config.end_time
    return EndNotice(end_signals(config.preempt_signal, (*handled, *NOTICES)), end_time)


def _end_sources_of(config: LaunchConfig, notice: EndNotice, grace: float) -> list[Source]:
    """Return the sources that announce the end of this node to workers with *grace* seconds for their stop."""
    sources: list[Source] = []
    if config.preempt_notice is not None:
        sources.append(source_of(config.preempt_notice))
    if config.end_time is not None:
        sources.append(AnnouncedEnd(notice, grace, partial(end_of_job, os.environ)))
    return sources


__all__ = ["elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    """Load the names of torch's command of this name, whose code is in a layer above this one."""
    if name in ("launch", "main", "parse_args"):
        return getattr(importlib.import_module("elasticlib.cli._legacy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("elasticlib.cli._legacy").main()
