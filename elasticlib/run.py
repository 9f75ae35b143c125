"""
The command line: options and ``PET_*`` variables become a `LaunchConfig`, then `elastic_launch` runs it.

Rules of this file: `_cli_parser` reads, the limits of a value are the business of `spec.py`; what has no effect is
never ignored in silence. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import runpy
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib._cli_options import NUMA_MODES, read_nodes, read_workers
from elasticlib._cli_parser import PROG, Parser, values_of
from elasticlib.errors import ChildFailedError, ConfigError, ElasticError, SignalException
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import Entrypoint, LaunchConfig, LogsSpecs

log = logging.getLogger("elasticlib.run")


class Script(str):
    """The path of a Python script, spelled as it was typed: it becomes the script's ``sys.argv[0]``."""

    __slots__ = ()

    def __fspath__(self) -> str:
        return str(self)


@frozen
class Request:
    """What the command line asks for."""

    config: LaunchConfig
    entrypoint: Entrypoint
    args: tuple[str, ...]
    given: Mapping[str, str]
    """By what option or variable a value was given, by the value's name."""


def parse(args: Sequence[str], environ: Mapping[str, str]) -> Request:
    """
    Read a command line without the program's name; *environ* gives ``PET_*`` defaults.

    Raises `ConfigError` for a value that breaks a rule and SystemExit (status 2) for wrong usage.
    """
    return request_of(Parser(environ).parse_args(args), environ)


def request_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Request:
    """What a namespace of `parse_args` asks for. Raises `ConfigError` for a value that breaks a rule."""
    values, given = values_of(args)
    try:
        config = _config(values, given, environ)
    except ConfigError as e:
        raise by_source(e, given) from e
    script = args.training_script
    as_script = values["run_path"] or not (values["module"] or values["no_python"])
    return Request(config, Script(script) if as_script else script, tuple(args.training_script_args), given)


def _config(values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]) -> LaunchConfig:
    min_nodes, max_nodes = values["nnodes"]
    config = LaunchConfig(
        min_nodes,
        max_nodes,
        values["nproc_per_node"],
        logs_specs=_logs_specs(values),
        role=values["role"],
        max_restarts=values["max_restarts"],
        monitor_interval=values["monitor_interval"],
        start_method=values["start_method"],
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        signals_to_handle=values["signals_to_handle"],
        shutdown_timeout=values["shutdown_timeout"],
        module=values["module"] and not values["run_path"],
        no_python=values["no_python"] and not values["run_path"],
        preload=values["preload"],
        local_addr=values["local_addr"],
        wait_for=values["wait_for"],
        event_log_handler=values["event_log_handler"],
        duplicate_stdout_filters=values["duplicate_stdout_filters"] or None,
        duplicate_stderr_filters=values["duplicate_stderr_filters"] or None,
        numa_options=_numa_options(values["numa_binding"]),
        virtual_local_rank=values["virtual_local_rank"],
        worker_server=values["worker_server"],
        **_rendezvous(values, given),
    )
    if "preload" in given and config.preload and (config.start_method != "forkserver" or config.no_python):
        raise ConfigError(
            f"{given['preload']}: modules are imported ahead only for Python under forkserver: leave it out"
        )
    return config


def by_source(error: ConfigError, given: Mapping[str, str]) -> ConfigError:
    """*error*, of the same kind, with the option or variable that was given in place of the field's name."""
    name, mark, rest = str(error).partition("=")
    name = _FIELDS.get(name, name)
    if not mark or name not in given:
        return error
    kind = type(error) if error.args == (str(error),) else ConfigError
    return kind(f"{given[name]}={rest}")


_FIELDS = {
    "run_id": "rdzv_id",
    "rdzv_configs": "rdzv_conf",
    "min_nodes": "nnodes",
    "max_nodes": "nnodes",
    "numa_options": "numa_binding",
}
"""Fields that go by another name on the command line."""


def _logs_specs(values: Mapping[str, Any]) -> LogsSpecs:
    """Where the output goes, by the class of a plug-in where one is named."""
    kind: Callable[..., LogsSpecs] = DefaultLogsSpecs
    if values["logs_specs"] is not None:
        from elasticlib.logs import _plugins  # only here: it reads the metadata of all that is installed

        kind = _plugins.load(values["logs_specs"])
    return kind(
        log_dir=values["log_dir"] or None,
        redirects=values["redirects"],
        tee=values["tee"],
        local_ranks_filter=values["local_ranks_filter"],
    )


def _numa_options(mode: str | None) -> object | None:
    if mode is None:
        return None
    if mode not in NUMA_MODES:
        raise ConfigError(f"numa_binding={mode!r} is unknown: give one of {', '.join(NUMA_MODES)}")
    from elasticlib.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))


_OF_SEVERAL_NODES = (
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "wait_for"),
)


def _rendezvous(values: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Which nodes meet where, as fields of the configuration. Raises `ConfigError` for a contradiction."""
    if values["standalone"]:
        if values["nnodes"] != (1, 1):
            raise ConfigError(
                f"{given['standalone']} and {given['nnodes']} exclude each other: "
                "a private rendezvous has one node; leave one of them out"
            )
        idle = [given[name] for name in _OF_SEVERAL_NODES if name in given]
        if idle:
            log.warning("without effect beside %s, which is one node alone: %s", given["standalone"], ", ".join(idle))
        return {"run_id": str(uuid.uuid4())}
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"].strip()
    fields = {"rdzv_backend": backend, "rdzv_configs": values["rdzv_conf"], "run_id": values["rdzv_id"]}
    if backend != "static":
        for name in ("node_rank", "master_addr", "master_port"):
            if name in given and not (name == "node_rank" and values[name] == 0):
                log.warning("%s is ignored: it has a meaning for --rdzv-backend static alone", given[name])
        return {**fields, "rdzv_endpoint": endpoint}
    if address := _master(values, given, endpoint):
        return {**fields, "rdzv_endpoint": address, "node_rank": values["node_rank"]}
    if values["node_rank"] != 0:
        raise ConfigError(f"node_rank={values['node_rank']} is out of range for one node: leave it out")
    if "rdzv_id" not in given:
        fields["run_id"] = str(uuid.uuid4())
    return {**fields, "rdzv_backend": "c10d"}


def _master(values: Mapping[str, Any], given: Mapping[str, str], endpoint: str) -> str:
    """Where node 0 of a static job is, as HOST:PORT; empty for one node that was told no port."""
    host, port = values["master_addr"], values["master_port"]
    if port is not None and not 0 <= port < 65536:
        raise ConfigError(f"master_port={port} must be a port, from 0 (a free one) to 65535")
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if endpoint:
        there, _, number = endpoint.rpartition(":")
        for name, told, known in (("master_addr", host, there), ("master_port", str(port), number)):
            if name in given and told != known:
                raise ConfigError(
                    f"{given['rdzv_endpoint']} {endpoint!r} and {given[name]} {values[name]!r} differ: "
                    "leave one of them out"
                )
        return endpoint
    address = f"{host}:{29500 if port is None else port}"
    least, most = values["nnodes"]
    if port is None and most == 1:
        return ""
    if most > 1 and least <= most and host == _LOOPBACK and "master_addr" not in given:
        log.warning("--master-addr is not given: only nodes on this machine can find %s", address)
    return address


_LOOPBACK = "127.0.0.1"


def launch(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Run what a namespace of `parse_args` asks for. Raises what `elastic_launch` raises."""
    request = request_of(args, environ)
    # Only now: help and refusals need not wait for what starts processes.
    from elasticlib.launch import elastic_launch

    try:
        elastic_launch(request.config, request.entrypoint)(*request.args)
    except ConfigError as e:
        raise by_source(e, request.given) from e


# What programs call that build upon torch's module of this name.


def get_args_parser() -> argparse.ArgumentParser:
    """The command line's parser, to which options may be added. (torch: ``torch.distributed.run.get_args_parser``)"""
    return Parser()


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """
    The namespace of a command line without the program's name, by default this program's own.

    Raises SystemExit (status 2) for wrong usage and `ConfigError` for a value that cannot be read. (torch:
    ``torch.distributed.run.parse_args``)
    """
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """
    (least, most) number of nodes from ``N`` or ``MIN:MAX``. (torch: ``torch.distributed.run.parse_min_max_nnodes``)

    Raises `NodesError` for another shape, `ConfigError` for what is no number.
    """
    return read_nodes(nnodes)


def determine_local_world_size(nproc_per_node: str) -> int:
    """
    How many workers ``--nproc-per-node`` means on this machine.

    Raises `SpecError` (a ``ValueError``) for another word, or where there is no such device. (torch:
    ``torch.distributed.run.determine_local_world_size``)
    """
    from elasticlib.workers._devices import workers_per_node

    return workers_per_node(LaunchConfig(nproc_per_node=read_workers(nproc_per_node)).nproc_per_node)


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """
    (config, entry point, arguments) for ``elastic_launch(config, entry_point)(*arguments)``.

    torch's function of this name gives the interpreter as entry point, with ``-u`` and the script among the
    arguments; here the script is the entry point, so that workers come from the warm template. Raises `ConfigError`.
    (torch: ``torch.distributed.run.config_from_args``)
    """
    from elasticlib.workers._devices import workers_per_node

    request = request_of(args, os.environ)
    request.config.nproc_per_node = workers_per_node(request.config.nproc_per_node)
    return request.config, request.entrypoint, list(request.args)


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Where the nodes meet, by a namespace of `parse_args`. (torch: ``torch.distributed.run.get_rdzv_endpoint``)"""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """
    Whether the script finds its local rank in ``LOCAL_RANK`` alone: True but for the legacy command's default.

    (torch: ``torch.distributed.run.get_use_env``)
    """
    return bool(getattr(args, "use_env", True))


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a Python file as ``__main__`` in this interpreter. (torch: ``torch.distributed.run.run_script_path``)"""
    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: argparse.Namespace) -> None:
    """
    Run what a namespace of `parse_args` asks for, to its end.

    Raises what `elastic_launch` raises. (torch: ``torch.distributed.run.run``)
    """
    launch(args, os.environ)


@contextlib.contextmanager
def _console_log(level: str) -> Iterator[None]:
    """Show the library's messages on stderr, from *level* on, for the length of the block."""
    logger = logging.getLogger("elasticlib")
    before = logger.level
    try:
        logger.setLevel(int(level) if level.isdigit() else level.upper())
    except ValueError:
        raise ConfigError(f"LOGLEVEL={level!r} is none of DEBUG, INFO, WARNING, ERROR, CRITICAL") from None
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname).1s %(asctime)s {PROG}[%(process)d] %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def main(args: Sequence[str] | None = None) -> None:
    """
    Run a command line to its end.

    For the program's own, by default, it leaves by SystemExit with status 1 when workers failed or a signal stopped
    the job, and with 2 when the call is wrong, with the reason on stderr. With *args* it raises what `elastic_launch`
    raises, and SystemExit only as argparse does. (torch: ``torch.distributed.run.main``)
    """
    carry_out(lambda: launch(parse_args(args), os.environ), whole_program=args is None)


def carry_out(command: Callable[[], None], *, whole_program: bool) -> None:
    """Call *command* with the library's messages on stderr; for a whole program, leave as `main` says if it raises."""
    while whole_program and os.open(os.devnull, os.O_RDWR) < 3:
        pass  # a stream that was closed at our start: no other file may get its number
    try:
        with _console_log(os.environ.get("LOGLEVEL") or "WARNING"):
            try:
                command()
            except (ElasticError, KeyboardInterrupt):
                log.debug("the launch ended with an exception", exc_info=True)
                raise
    except ElasticError as e:
        if isinstance(e, ChildFailedError):
            from elasticlib.workers.record import pass_on

            pass_on(e)
        if not whole_program:
            raise
        _leave_by(e)
    except KeyboardInterrupt:
        if not whole_program:
            raise
        _leave(1, f"{PROG}: interrupted")


def _leave_by(error: ElasticError) -> None:
    if isinstance(error, ChildFailedError):
        _leave(1, f"{error}")
    if isinstance(error, ConfigError):
        _leave(2, f"{PROG}: error: {error}")
    if isinstance(error, SignalException):
        signal.signal(error.sigval, signal.SIG_IGN)  # whoever presses the key again need not see how we leave
    _leave(1, f"{PROG}: {str(error) or 'interrupted'}")


def _leave(status: int, message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(message + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
