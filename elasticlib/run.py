"""
The command line: options and ``PET_*`` variables become a `LaunchConfig`, then `elastic_launch` runs it.

Rules of this file: an option is one row of `OPTIONS`, its text is read in one place, whether it came
from the command line or from the environment; the limits of a value are the business of `spec.py`; an
option of torchrun that is not built yet is refused by name, never ignored. What stands after the script
is the script's, to the letter. Nothing here imports torch.
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

from attrs import field, frozen

from elasticlib.errors import ChildFailedError, ConfigError, ElasticError, SignalException
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import (
    DEFAULT_SIGNALS,
    DEVICE_WORDS,
    PRIVATE_ENDPOINTS,
    START_METHODS,
    Entrypoint,
    LaunchConfig,
    Std,
)

PROG = "elasticrun"
log = logging.getLogger("elasticlib.run")


def _nodes(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2:
        raise ConfigError(f"{text!r} is neither a number of nodes nor a range such as 1:4")
    return int(parts[0]), int(parts[-1])


def _number_or_word(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _ranks(text: str) -> list[int] | None:
    return [int(part) for part in text.split(",")] if text else None


def _flag(text: str) -> bool:
    return bool(int(text))


@frozen
class Option:
    """One option: how it is spelled, read and explained."""

    long: str
    """With dashes; the spelling with underscores is the name of its value."""
    help: str
    default: str | None = None
    """As it would be typed; None when the option has no default."""
    read: Callable[[str], Any] = str
    short: tuple[str, ...] = ()
    metavar: str | None = None
    unset: str = "none"
    """What no value stands for, in the help."""
    environment: bool = True
    """Whether ``PET_<NAME>`` gives the default."""
    built: bool = True
    """False: any value but the default is refused."""
    dest: str = field(init=False)

    @dest.default
    def _underscores(self) -> str:
        return self.long.lstrip("-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value on the command line."""
        return self.read is _flag

    @property
    def variable(self) -> str:
        """Name of the environment variable that gives the default."""
        return f"PET_{self.dest.upper()}"

    def value(self, text: str | None, source: str) -> Any:
        """Read *text*; raises `ConfigError` that names *source* when it cannot be read."""
        if text is None:
            return None
        try:
            return self.read(text)
        except ConfigError as e:
            raise ConfigError(f"{source}: {e}") from None
        except ValueError:
            kind = {_flag: "0 or 1", float: "a number", _ranks: "a list of whole numbers such as 0,2"}
            raise ConfigError(f"{source}: {text!r} is not {kind.get(self.read, 'a whole number')}") from None


OPTIONS: dict[str, tuple[Option, ...]] = {
    "workers": (
        Option("--nnodes", "nodes of the job, N or MIN:MAX; so far 1", "1:1", _nodes, metavar="N"),
        Option(
            "--nproc-per-node",
            f"workers on this node: a number or one of {', '.join(DEVICE_WORDS)} (auto: devices, else CPUs)",
            "1",
            _number_or_word,
            metavar="N",
        ),
        Option(
            "--start-method",
            f"{', '.join(START_METHODS)}; forkserver forks the workers from a warm interpreter",
            "forkserver",
            metavar="METHOD",
        ),
        Option(
            "--preload",
            "modules, as in a,b, that are imported once for all workers; '' for none",
            "torch",
            metavar="A,B",
        ),
        Option("--role", "name of the workers' role", "default"),
    ),
    "what to run": (
        Option("--module", "run the script as a module, as python -m does", "0", _flag, ("-m",)),
        Option("--no-python", "run the script as a program, without an interpreter", "0", _flag),
        Option("--run-path", "run the file as a Python script, whatever --module and --no-python say", "0", _flag),
    ),
    "restarts and end": (
        Option("--max-restarts", "restarts of all workers that failures may use up", "0", int, metavar="N"),
        Option(
            "--monitor-interval", "seconds between looks at what can only be polled", "0.1", float, metavar="SECONDS"
        ),
        Option("--signals-to-handle", "signals that stop the job, passed on to the workers", DEFAULT_SIGNALS),
        Option(
            "--shutdown-timeout",
            "seconds from the stop signal to SIGKILL",
            None,
            int,
            metavar="SECONDS",
            unset="TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        ),
    ),
    "logs": (
        Option("--log-dir", "folder for logs", metavar="DIR", unset="a temporary one"),
        Option(
            "--redirects",
            "streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank as in 0:1,1:3",
            "0",
            Std.from_str,
            ("-r",),
            metavar="STD",
        ),
        Option("--tee", "streams that go to files and to the console, as above", "0", Std.from_str, ("-t",), "STD"),
        Option(
            "--local-ranks-filter",
            "local ranks shown on the console, as in 0,2",
            "",
            _ranks,
            metavar="RANKS",
            unset="all",
        ),
    ),
    "rendezvous": (
        Option("--standalone", "private rendezvous on this machine, whatever backend, endpoint and id say", "0", _flag),
        Option("--rdzv-backend", "static or c10d; private to this machine in both cases", "static", metavar="NAME"),
        Option("--rdzv-endpoint", "so far localhost:0 with --rdzv-backend c10d", "", metavar="HOST:PORT"),
        Option("--rdzv-id", "job id", "none", metavar="ID"),
    ),
    "known, not built yet: refused unless they have their default": (
        Option("--rdzv-conf", "options of the rendezvous, as in a=1,b=2", "", metavar="K=V", built=False),
        Option("--node-rank", "rank of this node", "0", int, metavar="N", built=False),
        Option("--master-addr", "address of node 0", "127.0.0.1", metavar="HOST", built=False),
        Option("--master-port", "port on node 0", None, int, metavar="PORT", built=False),
        Option("--local-addr", "address of this node", metavar="HOST", built=False),
        Option("--event-log-handler", "where events go", "null", metavar="NAME", built=False),
        Option("--duplicate-stdout-filters", "copy matching lines of stdout", "", metavar="A,B", built=False),
        Option("--duplicate-stderr-filters", "copy matching lines of stderr", "", metavar="A,B", built=False),
        Option("--logs-specs", "log layout of a plug-in", metavar="NAME", environment=False, built=False),
        Option("--numa-binding", "node, socket, exclusive or core-complex", environment=False, built=False),
        Option("--virtual-local-rank", "LOCAL_RANK=0 and one device in every worker", "0", _flag, built=False),
    ),
}
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
        group = parser.add_argument_group(title)
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
    return Request(config, Script(script) if as_script else script, tuple(script_args))


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
        run_id=_run_id(values, given),
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
    )
    if max_nodes > 1:
        raise ConfigError(f"{given['nnodes']}: more than one node is not built yet: give 1")
    if "preload" in given and config.preload and (config.start_method != "forkserver" or config.no_python):
        raise ConfigError(
            f"{given['preload']}: modules are imported ahead only for Python under forkserver: leave it out"
        )
    return config


def _by_source(message: str, given: Mapping[str, str]) -> str:
    """*message* with the option or variable that was given in place of the field's name."""
    name, mark, rest = message.partition("=")
    return f"{given[name]}={rest}" if mark and name in given else message


def _run_id(values: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """The job's id; raises `ConfigError` for a rendezvous that is not private to this machine."""
    if values["standalone"]:
        return str(uuid.uuid4())
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"]
    if backend not in ("static", "c10d"):
        raise ConfigError(f"{given['rdzv_backend']}={backend!r} is not built yet: give c10d, or --standalone instead")
    if endpoint and (backend == "static" or endpoint not in PRIVATE_ENDPOINTS):
        raise ConfigError(
            f"{given['rdzv_endpoint']}={endpoint!r} with rdzv_backend={backend!r} is not built yet: "
            "give --rdzv-backend c10d --rdzv-endpoint localhost:0, or --standalone instead"
        )
    if backend == "static" and "rdzv_id" not in given:
        return str(uuid.uuid4())
    return str(values["rdzv_id"])


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

                elastic_launch(request.config, request.entrypoint)(*request.args)
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


def _leave(status: int, message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(message + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
