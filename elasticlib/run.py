"""
The command line: options and ``PET_*`` variables become a `LaunchConfig`, then `elastic_launch` runs it.

Rules of this file: the options are the rows of `_cli_options`; the limits of a value are the business of
`spec.py`; an option of torchrun that is not built yet is refused by name, and what has no effect is never
ignored in silence. What stands after the script is the script's, to the letter. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib._cli_options import NOTES, OPTIONS
from elasticlib.errors import ChildFailedError, ConfigError, ElasticError, SignalException
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import Entrypoint, LaunchConfig

PROG = "elasticrun"
log = logging.getLogger("elasticlib.run")


_ROWS = [option for rows in OPTIONS.values() for option in rows]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [options] script [arguments of the script]",
        description="Starts N workers of a distributed PyTorch job, watches them and restarts them when one fails.",
        epilog="Each long option may be written with underscores or cut short, "
        "and takes its default from PET_<NAME>, as in PET_MAX_RESTARTS=3.",
    )
    for title, rows in OPTIONS.items():
        group = parser.add_argument_group(title, NOTES.get(title))
        for row in rows:
            default = "off" if row.is_flag else row.default or row.unset
            text = f"{row.help} (default: {default})".replace("%", "%%")
            if row.is_flag:
                group.add_argument(*row.short, row.long, action="store_const", const="1", help=text)
            else:
                group.add_argument(*row.short, row.long, metavar=row.metavar or row.dest.upper(), help=text)
    return parser


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the launcher's options, in the spelling with dashes, from the script and what follows it."""
    options: list[str] = []
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            found = [row for row in _ROWS if row.long == name] or [row for row in _ROWS if row.long.startswith(name)]
            takes_value = len(found) == 1 and not found[0].is_flag and not equals
        else:
            takes_value = any(name in row.short and not row.is_flag for row in _ROWS) and not equals
        options.append(name + equals + value)
        if takes_value and rest:
            options.append(rest.pop(0))
    return options, rest[1:] if rest and rest[0] == "--" else rest


@frozen
class Script:
    """The path of a Python script, spelled as it was typed: it becomes the script's ``sys.argv[0]``."""

    path: str

    def __fspath__(self) -> str:
        return self.path


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
    parser = _parser()
    options, rest = _split(args)
    typed = vars(parser.parse_args(options))
    if not rest:
        parser.error("the script is missing: give a file, a module after -m, or a program after --no-python")
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for row in _ROWS:
        text, source = typed[row.dest], row.long
        if text is None and row.environment and row.variable in environ:
            text, source = environ[row.variable], row.variable
        if text is not None:
            given[row.dest] = source
        values[row.dest] = row.value(row.default if text is None else text, source)
    try:
        config = _config(values, given, environ)
    except ConfigError as e:
        raise ConfigError(_by_source(str(e), given)) from e
    for row in _ROWS:
        if not row.built and values[row.dest] != row.value(row.default, row.long):
            raise ConfigError(f"{given[row.dest]}={values[row.dest]!r} is not built yet: leave it out")
    script, *script_args = rest
    as_script = values["run_path"] or not (values["module"] or values["no_python"])
    return Request(config, Script(script) if as_script else script, tuple(script_args), given)


def _config(values: Mapping[str, Any], given: Mapping[str, str], environ: Mapping[str, str]) -> LaunchConfig:
    min_nodes, max_nodes = values["nnodes"]
    config = LaunchConfig(
        min_nodes,
        max_nodes,
        values["nproc_per_node"],
        logs_specs=DefaultLogsSpecs(
            log_dir=values["log_dir"] or None,
            redirects=values["redirects"],
            tee=values["tee"],
            local_ranks_filter=values["local_ranks_filter"],
        ),
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
        **_rendezvous(values, given),
    )
    if "preload" in given and config.preload and (config.start_method != "forkserver" or config.no_python):
        raise ConfigError(
            f"{given['preload']}: modules are imported ahead only for Python under forkserver: leave it out"
        )
    return config


def _by_source(message: str, given: Mapping[str, str]) -> str:
    """*message* with the option or variable that was given in place of the field's name."""
    name, mark, rest = message.partition("=")
    name = _FIELDS.get(name, name)
    return f"{given[name]}={rest}" if mark and name in given else message


_FIELDS = {"run_id": "rdzv_id", "rdzv_configs": "rdzv_conf"}
"""Fields that go by another name on the command line."""


def _rendezvous(values: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Which nodes meet where, as fields of the configuration. Raises `ConfigError` for a contradiction."""
    if values["standalone"]:
        if values["nnodes"] != (1, 1):
            raise ConfigError(
                f"{given['standalone']} and {given['nnodes']} exclude each other: "
                "a private rendezvous has one node; leave one of them out"
            )
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
    address = f"{host}:{29500 if port is None else port}"
    if endpoint:
        told = [given[name] for name in ("master_addr", "master_port") if name in given]
        if told and endpoint != address:
            raise ConfigError(
                f"{given['rdzv_endpoint']} {endpoint!r} and {' '.join(told)} {address!r} differ: leave one of them out"
            )
        return endpoint
    if port is None and values["nnodes"][1] == 1:
        return ""
    if values["nnodes"][1] > 1 and "master_addr" not in given:
        log.warning("--master-addr is not given: only nodes on this machine can find %s", address)
    return address


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
    Run a command line (by default the program's own) to its end.

    Leaves by SystemExit with status 1 when workers failed or a signal stopped the job, and with 2 when
    the call is wrong, with the reason on stderr.
    """
    while args is None and os.open(os.devnull, os.O_RDWR) < 3:
        pass  # a stream that was closed at our start: no other file may get its number
    try:
        with _console_log(os.environ.get("LOGLEVEL") or "WARNING"):
            try:
                request = parse(sys.argv[1:] if args is None else args, os.environ)
                # Only now: help and refusals need not wait for what starts processes.
                from elasticlib.launch import elastic_launch

                _launch(elastic_launch, request)
            except (ElasticError, KeyboardInterrupt):
                log.debug("the launch ended with an exception", exc_info=True)
                raise
    except ChildFailedError as e:
        from elasticlib.workers.record import pass_on

        pass_on(e)
        _leave(1, f"{e}")
    except ConfigError as e:
        _leave(2, f"{PROG}: error: {e}")
    except (ElasticError, KeyboardInterrupt) as e:
        if isinstance(e, SignalException) and args is None:
            signal.signal(e.sigval, signal.SIG_IGN)  # whoever presses the key again need not see how we leave
        _leave(1, f"{PROG}: {str(e) or 'interrupted'}")


def _launch(launch: Callable[..., Callable[..., object]], request: Request) -> None:
    try:
        launch(request.config, request.entrypoint)(*request.args)
    except ConfigError as e:
        raise ConfigError(_by_source(str(e), request.given)) from e


def _leave(status: int, message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(message + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
