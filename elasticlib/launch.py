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
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from elasticlib import _rules, events, metrics, records
from elasticlib._torch_config import as_launch_config
from elasticlib.agent import check_health_check_server
from elasticlib.errors import ChildFailedError, ConfigError, SignalException
from elasticlib.job import (
    GPU_SHARES,
    Job,
    JobLogs,
    Results,
    announce_log_folder,
    combined_error,
    own_logs,
    remove_logs,
    shown_ranks,
    warn_of_ranks,
)
from elasticlib.logs import DefaultLogsSpecs, Duplicates, make_run_folder
from elasticlib.notebook import CallersStream, ipython_shell, is_stdout_replaced
from elasticlib.preload import preload_for
from elasticlib.processes import flags_here, open_files_needed
from elasticlib.rendezvous import PlugIn, choose_rendezvous, command_line, opened_rendezvous
from elasticlib.spec import Entrypoint, LaunchConfig, LogsDest, LogsSpecs, WorkerSpec, entrypoint_name
from elasticlib.state import RunResult
from elasticlib.workers import (
    HandledSignals,
    default_numa_options,
    fork_servers,
    parse_signals,
    prepare_workers,
    serving_caller,
    shown_by_caller,
    workers_per_node,
)

if TYPE_CHECKING:
    from elasticlib.agent import HealthCheckServer, LocalElasticAgent
    from elasticlib.workers import ForkServer, Preparation

_log = logging.getLogger("elasticlib")

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_SHUTDOWN_TIMEOUT = 30


class elastic_launch:  # noqa: N801 - torch's name
    """
    Runs *entrypoint* on every worker of *config* when called, and returns `Results`: {global rank: result}.

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
        # Wrong settings are refused now; the present ones count at the call.
        as_launch_config(config)
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any, **kwargs: Any) -> Results:
        """Run the workers to their end and return {global rank: result}."""
        return launch_agent(self._config, self._entrypoint, args, self._health_check_server, kwargs)

    def start(self, *args: Any, **kwargs: Any) -> Job:
        """
        Run the workers beside the program, and return at once what it watches, awaits and stops them by.

        What a call refuses is refused here, before anything is started. Without ``LaunchConfig.logs_specs`` all output
        goes to files that `Job.logs` reads, and that of rank 0 to the console, too. A job that still runs when the
        program ends is stopped. Raises `JobRunsError` where a notebook's cell is executed again while the job of its
        last execution runs.
        """
        return Job(CheckedLaunch(self._config, self._entrypoint, args, self._health_check_server, kwargs, True)).begin()


def launch_agent(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any] = (),
    health_check_server: HealthCheckServer | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Results:
    """What a call of `elastic_launch` does. (torch: ``torch.distributed.launcher.api.launch_agent``)"""
    return Job(CheckedLaunch(config, entrypoint, args, health_check_server, kwargs or {})).run()


class CheckedLaunch:
    """
    A launch that was checked, to be carried out once: beside the program where *is_started*.

    *follows_callers*: its output goes through ``sys.stdout``, which callers to come may replace.
    """

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
    ) -> None:
        check_health_check_server(health_check_server)
        self._health_check_server = health_check_server
        with contextlib.ExitStack() as until_end, contextlib.ExitStack() as until_run:
            if health_check_server is not None:
                from elasticlib.agent import stop_health_check

                until_run.callback(stop_health_check, health_check_server, records.log)
            self._config = config = as_launch_config(config)
            self._follows_callers = follows_callers
            self._choose_output(is_started)
            self._metric_handler = _check(config, self._logs)
            self.title = title or title_of(entrypoint, args)
            if self.console is not None:
                self.console.files = lambda: getattr(self._logs, "root_log_dir", "")
                self.console.watch(self.title, shown_ranks(config), is_pool=bool(title), is_started=is_started)
                until_end.callback(self.console.close)
            self._choice = choose_rendezvous(config, work=self.title, command=_command_of(self.title, entrypoint, args))
            gpus = GPU_SHARES.of(f"job {self.title!r}", config.devices, config.nproc_per_node, is_started=is_started)
            shown = until_end.enter_context(gpus)
            self._spec = _worker_spec(config, entrypoint, args, kwargs, shown)
            self.grace = _shutdown_timeout(config)
            self._prepared = self._prepare(shown)
            self.signums = parse_signals(self._prepared.signals_to_handle)
            self.quit_shows_stacks = isinstance(config.signals_to_handle, _rules.Default)
            warn_of_ranks(self._logs, self.workers, config)
            records.log(records.LaunchStarted(self.title, {**_summary(config), "nproc_per_node": self.workers}))
            # Last of all before the rendezvous: other nodes must not meet a node that cannot work.
            make_run_folder(self._logs, self._choice.run_id)
            self._until_run, self._until_end = until_run.pop_all(), until_end.pop_all()

    def _choose_output(self, is_started: bool) -> None:
        """Choose the console and the logs of this launch; *is_started*: the program goes on beside it."""
        config = self._config
        goes_here = self._follows_callers or (is_stdout_replaced() and config.logs_specs is None)
        self.console = CallersStream() if goes_here else None
        given = own_logs(config, is_started or self.console is not None)
        self._given_logs = given
        self._logs = given.for_launch() if isinstance(given, DefaultLogsSpecs) else given

    def _prepare(self, shown: Mapping[str, str]) -> Preparation:
        """Check the call; the workers have the variables *shown*, which name their GPUs."""
        config = self._config
        prepared = prepare_workers(self._spec, config.start_method, config.signals_to_handle, shown)
        is_in_notebook = ipython_shell() is not None
        if not is_in_notebook and not self._follows_callers:
            return prepared
        job = prepared.job
        if is_in_notebook:
            # A worker writes its traceback itself only where logs of the caller's choice take its output.
            cell_shows_errors = config.logs_specs is None
            key = self.console.word if self.console is not None else ""
            job = shown_by_caller(job, errors=cell_shows_errors, display_key=key, ranks=shown_ranks(config))
        return evolve(prepared, job=serving_caller(job))

    @property
    def folder(self) -> str:
        """Where the output is after success, or of a pool that was stopped: it goes with the job's object."""
        if self.console is not None and self.console.is_full:
            # The cell did not show all of it: the folder stays when the object of the job goes.
            return ""
        return self._logs.root_log_dir if isinstance(self._logs, JobLogs) else ""

    @property
    def workers(self) -> int:
        """How many there will be on this node."""
        return self._spec.local_world_size

    def hand(self, descriptors: Mapping[str, int]) -> None:
        """Have each worker get copies of *descriptors*, by name, made now: their numbers may be others' by then."""
        copies: dict[str, int] = {}
        for name, descriptor in descriptors.items():
            copies[name] = os.dup(descriptor)
            self._until_end.callback(os.close, copies[name])
        self._prepared = evolve(self._prepared, job=evolve(self._prepared.job, descriptors=copies))

    def abandon(self) -> None:
        """It will not be carried out."""
        with self._until_end:
            self._until_run.close()
        if isinstance(self._logs, DefaultLogsSpecs):
            self._logs.forget_unused()

    def __call__(self, job: Job) -> dict[int, Any]:
        """Run the workers of *job* to their end; their results."""
        with self._until_end, self._until_run as until_run:
            # From the first process on a signal ends the job; while a handler of others is made, which may take any
            # time, it does what it did before.
            is_ours = not isinstance(self._choice, PlugIn)
            own = HandledSignals(self.signums if is_ours else (), job.inbox, takes_notices=True)
            with own:
                return self._run(job, until_run)

    def _say_that_it_starts(self, there: ForkServer | None) -> None:
        """Tell whoever looks at a cell why nothing comes for seconds."""
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
                    repeats_errors=ipython_shell() is None,
                    inbox=job.inbox,
                    interrupt_shows_stacks=self.console is None,
                )
                job.attach(agent)
                if self.console is not None:
                    self.console.files = partial(_place_of_output, weakref.ref(job), logs, shown_ranks(config))
                # From now on the agent stops the health check, when its run ends.
                until_run.pop_all()
                result = _run(agent)
            if result.is_failed():
                error = ChildFailedError(self.title, result.failures)
                error._elastic_ranks = agent.get_worker_group().workers[0].world_size
                cause = agent.original_exception(error.get_first_failure()[0])
                raise combined_error(error, cause, config.raise_as) from cause
            succeeded = True
        except SignalException:
            # Nobody looks at failures of a pool's workers that were stopped on purpose.
            is_kept = not self._follows_callers
            raise
        finally:
            remove_logs(logs, given, succeeded=succeeded, is_kept=is_kept)
        return result.return_values


def _place_of_output(weak: weakref.ref[Job], logs: LogsSpecs, shown: Sequence[int] | None) -> str:
    """
    The file with the output of the one rank that is *shown*; where there are several, the folder of the files.

    The job is known weakly: its files go with it, and whoever asks here may stay longer.
    """
    job, files = weak(), list[str]()
    if job is not None and shown is not None and len(shown) == 1:
        # The rank is on another node.
        with contextlib.suppress(ConfigError):
            files = job.files(shown[0])
    return files[0] if len(files) == 1 else logs.root_log_dir


def _check(config: LaunchConfig, logs: LogsSpecs) -> metrics.MetricHandler | None:
    """Refuse what can be seen to be wrong by itself. The launch's own handler of metrics; None for the program's."""
    events.get_logging_handler(config.event_log_handler)
    metric_handler = metrics.handler_of(config.metrics_cfg)
    if isinstance(logs, DefaultLogsSpecs):
        logs.check()
        has_files = logs.has_files()
    else:
        has_files = getattr(logs, "root_log_dir", None) != os.devnull
    if not has_files:
        Duplicates(config.duplicate_stdout_filters, config.duplicate_stderr_filters).check(LogsDest())
    return metric_handler


def title_of(entrypoint: Entrypoint, args: Sequence[Any] = ()) -> str:
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


def _command_of(title: str, entrypoint: Entrypoint, args: Sequence[Any]) -> str:
    """What nodes of one job are compared by; empty where the arguments are not known."""
    if isinstance(entrypoint, (str, os.PathLike)):
        return command_line(title, [str(arg) for arg in args])
    # A function's arguments are objects, which cannot be compared: those of its program mostly tell two of them apart.
    return "" if ipython_shell() is not None else command_line(title, sys.argv[1:])


def _worker_spec(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shown: Mapping[str, str],
) -> WorkerSpec:
    """Return the workers of this node, still without a rendezvous; they have the variables *shown*."""
    flags = flags_here()
    # The fork server that counts devices should be the job's own, so it must import the same.
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


__all__ = ["elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    """torch's module of this name is a command, whose code is in a layer above this one."""
    if name in ("launch", "main", "parse_args"):
        return getattr(importlib.import_module("elasticlib.cli._legacy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("elasticlib.cli._legacy").main()
