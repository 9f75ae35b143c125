"""
Conversion of option values into a configuration and an entry point.

Rules of this file: `cli._parser` has read the values, and `spec.py` checks their limits. Options without
effect cause a warning, and contradictions raise an error. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from attrs import Factory, evolve, frozen

from elasticlib._clock import wall_time
from elasticlib.cli._option_table import NUMA_MODES
from elasticlib.cli._parser import Parser, is_script, values_of
from elasticlib.cli._terminal import why_not
from elasticlib.cli._verdict import ExitSettings
from elasticlib.engines import (
    EngineContext,
    Filling,
    ending,
    engine_context,
    filling,
    is_shared_step,
    kill_wait,
    reachable,
)
from elasticlib.errors import ConfigError, SpecError
from elasticlib.logs import PREFIX_VARIABLE, DefaultLogsSpecs
from elasticlib.spec import START_METHODS, Entrypoint, LaunchConfig, LogsSpecs, Std

log = logging.getLogger("elasticlib.run")

_INTERPRETER = re.compile(r"python[\d.]*")
_OF_NODES = ("nnodes", "requeue", "progress", "engine", "logs_specs")
"""Options whose values can only be checked on the nodes, which have an engine, and packages that are missing here."""


class Script(str):
    """Path of a Python script, unchanged from the command line: it becomes the script's ``sys.argv[0]``."""

    __slots__ = ()

    # The launch runs a path as a script even if its name does not end in .py.
    def __fspath__(self) -> str:
        return str(self)


@frozen
class Request:
    """The launch that a command line describes."""

    config: LaunchConfig
    entrypoint: Entrypoint
    args: tuple[str, ...]
    given: Mapping[str, str]
    """{name of a value: option or variable that gave it}."""
    progress: bool = False
    """True if the terminal must show the ranks' progress."""
    exits: ExitSettings = Factory(ExitSettings)
    """The options for the end of the command."""
    notice: str = ""
    """One line for the console: the options that an engine has filled in."""


def request_of(
    args: argparse.Namespace, environ: Mapping[str, str], terminal: TextIO | None = None, no_rows: str = ""
) -> Request:
    """
    Return the request of a namespace of `parse_args`, for a program with *terminal* as its stderr.

    *no_rows* is the reason why this program never draws rows of progress; empty if it can. Raises
    `ConfigError` for a value that breaks a rule.
    """
    values, given = values_of(args)
    if values["progress"]:
        why = no_rows or why_not(terminal, environ.get("TERM"))
        if why:
            log.warning("no effect: %s (%s)", given.get("progress", "--progress"), why)
            values["progress"] = False

    try:
        context = None if values["standalone"] else engine_context(environ, values["engine"], now=wall_time())
        filled = _fill_in(context, values, given, environ)
        values, given = {**values, **filled.values}, {**dict.fromkeys(filled.values, filled.source), **given}
        config = _config(values, given, environ)
        exits = _exit_settings(context, values, given, environ)
    except ConfigError as e:
        raise by_source(e, given) from e

    entrypoint = _entrypoint(args.training_script, values)
    return Request(
        config,
        entrypoint,
        tuple(args.training_script_args),
        given,
        values["progress"],
        exits,
        filled.notice,
    )


def check_for_nodes(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options with which no node could launch its part of a job."""
    unset = Parser({}).parse_args(["script"])
    here = {name: getattr(unset, name) for name in _OF_NODES}
    request_of(argparse.Namespace(**{**vars(args), **here}), {})


def _exit_settings(
    context: EngineContext | None, values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]
) -> ExitSettings:
    requeue = values["requeue"]
    source = given.get("requeue", "--requeue")
    if requeue < 0:
        raise ConfigError(f"{source}: {requeue} must be a number of times, 0 or more")
    if requeue and values["standalone"]:
        # The engine fills in nothing for such a job, but restarts it.
        context = engine_context(environ, values["engine"], now=wall_time())
    complaint = _complaint_about_requeue(context, values, environ) if requeue else ""
    if complaint:
        raise ConfigError(f"{source} {requeue}: {complaint}")

    return ExitSettings(
        _exit_status("preempt_exit", values, given),
        _exit_status("failure_exit", values, given),
        values["termination_log"],
        requeue,
        context,
    )


def _complaint_about_requeue(
    context: EngineContext | None, values: Mapping[str, Any], environ: Mapping[str, str]
) -> str:
    """Return why the Slurm job of this process cannot be requeued; empty if it can."""
    if context is None or context.engine != "slurm":
        return _complaint_about_step(values, environ)

    option = _option_of_own_job(values)
    if not option or context.num_agents == 1:
        return ""
    return (
        f"{context.title} has {context.num_agents} tasks, each with a job of its own ({option}), and Slurm "
        "requeues them only together: give one task (srun --ntasks=1), or leave one of the two options out"
    )


def _option_of_own_job(values: Mapping[str, Any]) -> str:
    """Return the option by which each task has a job of its own; empty if the tasks share one."""
    if values["standalone"]:
        return "--standalone"
    _, most = values["nnodes"]
    return "--nnodes 1" if most == 1 else ""


def _complaint_about_step(values: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    if "SLURM_STEP_ID" not in environ:
        return "this process is not in a step of Slurm; leave it out"
    return f"{_why_not_read(values, environ)}, so the job of Slurm cannot be requeued"


def _why_not_read(values: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return why the variables of a step of Slurm are not read."""
    if values["engine"] != "auto":
        return f"--engine {values['engine']} ignores Slurm"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "this process is a worker of another launcher, to which the step belongs"
    if "SLURM_PTY_PORT" in environ:
        return "this is a terminal of srun --pty, whose step is read only with --engine slurm"
    return "srun has not started this process as a task"


def _exit_status(name: str, values: Mapping[str, Any], given: Mapping[str, str]) -> int:
    number: int = values[name]
    if not 0 <= number <= 255:
        source = given.get(name, f"--{name.replace('_', '-')}")
        raise ConfigError(f"{source}: {number} must be an exit status, from 0 to 255")
    return number


def _fill_in(
    context: EngineContext | None, values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]
) -> Filling:
    """Return the values that the engine adds, and log its warnings. Raises `ConfigError`."""
    if context is None:
        return Filling()

    # Each value that nobody gave, and only those: an option or variable always wins.
    filled = filling(context, values, given, reachable).joined(
        ending(context, values, given, environ, partial(kill_wait, environ))
    )
    for warning in filled.warnings:
        log.warning(warning)
    # One node says it for all of them.
    return filled if context.node_rank == 0 else evolve(filled, parts=())


def _entrypoint(text: str, values: Mapping[str, Any]) -> Entrypoint:
    """Return the program to run. Raises `ConfigError` for an interpreter in the place of a script."""
    if not is_script(values):
        return text
    if _INTERPRETER.fullmatch(os.path.basename(text)):
        raise ConfigError(f"{text!r} is an interpreter, which elasticrun starts for a script: leave it out")
    return Script(text)


def _config(values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]) -> LaunchConfig:
    min_nodes, max_nodes = values["nnodes"]
    if not 0 < min_nodes <= max_nodes:
        raise SpecError.of_setting(
            "nnodes", f"{min_nodes}:{max_nodes} is not a valid range of nodes: give MIN:MAX with 1 <= MIN <= MAX"
        )

    if values["standalone"] and min_nodes == 1:
        # A private rendezvous has one node.
        max_nodes = 1

    start_method = _start_method(values["start_method"], given)
    config = LaunchConfig(
        min_nodes,
        max_nodes,
        values["nproc_per_node"],
        logs_specs=_logs_specs(values, given),
        start_method=start_method,
        log_line_prefix_template=values["log_line_prefix_template"] or environ.get(PREFIX_VARIABLE),
        module=values["module"] and not values["run_path"],
        no_python=values["no_python"] and not values["run_path"],
        duplicate_stdout_filters=values["duplicate_stdout_filters"] or None,
        duplicate_stderr_filters=values["duplicate_stderr_filters"] or None,
        numa_options=_numa_options(values["numa_binding"]),
        **_rendezvous(values, given, environ),
        **{name: values[name] for name in _AS_GIVEN},
    )
    # Only a given one: where it has no effect, the default is left out without a word.
    if config.preload and "preload" in given:
        _check_preload(config, given["preload"])
    return config


def _start_method(name: str, given: Mapping[str, str]) -> Any:
    source = given.get("start_method", "PET_START_METHOD")
    # Unlike an option, a variable may be intended for another launcher.
    if name not in START_METHODS and source == "PET_START_METHOD":
        log.warning("%s=%r is unknown and ignored: forkserver is used", source, name)
        return "forkserver"
    return name


def _check_preload(config: LaunchConfig, source: str) -> None:
    if config.start_method == "spawn" or config.no_python:
        raise ConfigError(f"{source} cannot be used with --no-python or the start method spawn: leave out one of them")


_AS_GIVEN = (
    *("role", "max_restarts", "monitor_interval", "signals_to_handle", "shutdown_timeout", "exit_timeout", "preload"),
    *("local_addr", "wait_for", "event_log_handler", "virtual_local_rank", "worker_server"),
    *("preempt_signal", "preempt_notice", "end_time"),
)
"""Fields that take the value of the option with the same name."""


def by_source(error: ConfigError, given: Mapping[str, str]) -> ConfigError:
    """Return *error* with the option or variable that the user gave instead of the field's name."""
    option = _FIELDS.get(error.setting, error.setting)
    if option not in given:
        return error
    return error.with_name(given[option])


_FIELDS = {
    "run_id": "rdzv_id",
    "rdzv_configs": "rdzv_conf",
    "numa_options": "numa_binding",
}
"""Fields with another name on the command line."""


def _logs_specs(values: Mapping[str, Any], given: Mapping[str, str]) -> LogsSpecs:
    """Return the destinations of the output, made by a plug-in if the options name one."""
    if values["progress"]:
        return _logs_beside_progress(values, given)

    kind: Callable[..., LogsSpecs] = DefaultLogsSpecs
    if values["logs_specs"] is not None:
        # Imported here: it reads the metadata of all installed packages.
        from elasticlib.logs import load_logs_specs

        kind = load_logs_specs(values["logs_specs"])

    return kind(
        log_dir=values["log_dir"] or None,
        redirects=values["redirects"],
        tee=values["tee"],
        local_ranks_filter=values["local_ranks_filter"],
    )


def _logs_beside_progress(values: Mapping[str, Any], given: Mapping[str, str]) -> LogsSpecs:
    """
    Return specs that keep all output in files, since workers must not write across the rows.

    Raises `ConfigError` if other options prevent that.
    """
    option = given.get("progress", "--progress")
    if values["logs_specs"] is not None:
        raise ConfigError(
            f"{option} needs elasticlib's log layout, but --logs-specs sets another: leave one of the two options out"
        )
    if values["log_dir"] == os.devnull:
        raise ConfigError(
            f"{option} reads the log files, but {given['log_dir']} {os.devnull} writes none: "
            "leave one of the two options out"
        )

    redirects, tee, shown = values["redirects"], values["tee"], values["local_ranks_filter"]
    if "redirects" not in given:
        redirects = Std.ALL
    if not _are_all_in_files(redirects, tee):
        raise ConfigError(
            f"{option} needs all output in log files, but {given['redirects']} leaves some on the terminal: "
            f"give {given['redirects']} 3, or leave {given['redirects']} out"
        )

    if "tee" not in given:
        # The output of rank 0 appears above the rows, as in a notebook.
        tee = Std.ALL
        shown = shown or [0]

    specs = DefaultLogsSpecs(values["log_dir"] or None, redirects, tee, shown)

    # Files that only the rows need are removed after a success.
    specs.keeps_streams = any(values[name] for name in given.keys() & {"redirects", "tee"})
    shows_one_rank = shown is not None and len(shown) == 1
    specs.default_prefix = "" if shows_one_rank else "[${rank}] "
    return specs


def _are_all_in_files(redirects: Any, tee: Any) -> bool:
    """Return True if all streams of all ranks go to files; a tee'd stream has a file as well."""
    # Ranks that are missing in the mapping write to the terminal.
    if isinstance(redirects, Mapping):
        return False
    if isinstance(tee, Mapping):
        return bool(redirects == Std.ALL)
    return bool(redirects | tee == Std.ALL)


def _numa_options(mode: str | None) -> object | None:
    if mode is None:
        return None
    if mode not in NUMA_MODES:
        raise ConfigError.of_setting("numa_binding", f"{mode!r} is unknown: give one of {', '.join(NUMA_MODES)}")
    from elasticlib.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))


_OF_SEVERAL_NODES = (
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "wait_for"),
)


def _rendezvous(values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the configuration for the rendezvous. Raises `ConfigError` for a contradiction."""
    if values["standalone"]:
        return _standalone(values, given)

    if not given.keys() & {"nnodes", *_OF_SEVERAL_NODES} and values["engine"] != "none":
        _warn_of_separate_jobs(environ)
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"].strip()
    fields = {"rdzv_backend": backend, "rdzv_configs": values["rdzv_conf"], "run_id": values["rdzv_id"]}
    if backend == "static":
        return _static(fields, values, given, endpoint)

    _warn_of_static_options(values, given)
    return {**fields, "rdzv_endpoint": endpoint}


def _warn_of_static_options(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    # Rank 0 is the default, so it needs no warning.
    names = ("master_addr", "master_port") if values["node_rank"] == 0 else ("node_rank", "master_addr", "master_port")
    for name in names:
        if name in given:
            log.warning("%s is ignored: it needs --rdzv-backend static", given[name])


def _standalone(values: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a job on this node only. Raises `ConfigError` for several nodes."""
    least, most = values["nnodes"]
    standalone, nodes = given.get("standalone", "--standalone"), given.get("nnodes", "--nnodes")
    if least != 1:
        raise ConfigError(
            f"{standalone} and {nodes} cannot be combined: a private rendezvous has one node; leave one of them out"
        )

    if most != 1:
        log.warning(
            "%s: this job runs on one node only; the maximum of %s=%d:%d is ignored", standalone, nodes, least, most
        )
    idle = [given[name] for name in (*_OF_SEVERAL_NODES, "engine") if name in given and values[name] != "none"]
    if idle:
        log.warning("%s: this job runs on this node only, so these have no effect: %s", standalone, ", ".join(idle))
    return {"run_id": str(uuid.uuid4())}


def _static(
    fields: dict[str, Any], values: Mapping[str, Any], given: Mapping[str, str], endpoint: str
) -> dict[str, Any]:
    """Return *fields* with those of a job whose nodes get their ranks from their command lines."""
    address = _master(values, given, endpoint)
    if address:
        return {**fields, "rdzv_endpoint": address, "node_rank": values["node_rank"]}

    if values["node_rank"] != 0:
        log.warning("%s is ignored: the only node of this job has rank 0", given.get("node_rank", "node_rank"))
    # Jobs on one machine must not meet under the default id.
    if "rdzv_id" not in given:
        fields["run_id"] = str(uuid.uuid4())
    # Without an endpoint its rendezvous is private, so that no port can be taken.
    return {**fields, "rdzv_backend": "c10d"}


def _warn_of_separate_jobs(environ: Mapping[str, str]) -> None:
    """Warn, in one task, if srun starts this command on several nodes, and nothing makes them one job."""
    if not is_shared_step(environ) or "TORCHELASTIC_RUN_ID" in environ:
        return
    nodes = environ["SLURM_STEP_NUM_NODES"]
    log.warning(
        "srun started this command on %s nodes, in or from a terminal: these are %s separate jobs; for one job give "
        "--engine slurm, or leave --pty out; give --standalone for separate jobs",
        *(nodes, nodes),
    )


def _master(values: Mapping[str, Any], given: Mapping[str, str], endpoint: str) -> str:
    """Return the HOST:PORT of node 0 of a static job; empty for one node without a port."""
    host, port = _in_brackets(values["master_addr"]), values["master_port"]
    if endpoint:
        _warn_of_another_master(host, port, values, given, endpoint)
        return endpoint

    _check_port(port)
    is_one_node = values["nnodes"][1] == 1

    # No other node needs the address.
    if port is None and is_one_node:
        return ""

    address = f"{host}:{29500 if port is None else port}"

    # The default is the loopback address, which other machines cannot reach.
    is_found = is_one_node or host != _LOOPBACK or "master_addr" in given
    if not is_found:
        log.warning("--master-addr is not given: only nodes on this machine can find %s", address)
    return address


def _check_port(port: int | None) -> None:
    if port is not None and not 0 <= port < 65536:
        raise ConfigError.of_setting("master_port", f"{port} must be a port, from 0 (a free one) to 65535")


def _in_brackets(host: str) -> str:
    """Return *host* in the form before a port: an IPv6 address in brackets."""
    is_plain_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]" if is_plain_ipv6 else host


def _warn_of_another_master(
    host: str, port: int | None, values: Mapping[str, Any], given: Mapping[str, str], endpoint: str
) -> None:
    """Warn of an address of node 0 that differs from *endpoint*, which is used."""
    known_host, _, known_port = endpoint.rpartition(":")
    addresses = {"master_addr": (host, known_host), "master_port": (str(port), known_port)}
    for name, (text, known) in addresses.items():
        if name in given and text != known:
            log.warning(
                "%s is ignored: %s %r is used",
                *(f"{given[name]} {values[name]!r}", given.get("rdzv_endpoint", "rdzv_endpoint"), endpoint),
            )


_LOOPBACK = "127.0.0.1"
