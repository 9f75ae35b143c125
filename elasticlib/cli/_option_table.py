"""
The options of the command line, one row each, with spelling, reader and help.

Rules of this file: an option is one row of `OPTIONS`. Its text is read in one place, from the command line
or from the environment. `spec.py` checks the limits of values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from elasticlib.errors import ConfigError, NodesError
from elasticlib.rendezvous import RDZV_CONF_KEYS, RdzvConfKey, parse_conf
from elasticlib.spec import DEFAULT_SIGNALS, DEVICE_WORDS, START_METHODS, TOKEN_VARIABLE, Std

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
_SAID_OTHERWISE = ("rank", "timeout", "wait_for", "cert", "key", "cacert")
"""Keys of the rendezvous that are separate options, or other names for keys."""


def read_nodes(text: str) -> tuple[int, int]:
    """Return the (least, most) number of nodes from ``N`` or ``MIN:MAX``. Raises `NodesError` or `ConfigError`."""
    parts = text.split(":")
    if len(parts) > 2:
        raise NodesError(f"{text!r} has more than two parts: give a number of nodes or a range such as 1:4")
    try:
        return int(parts[0]), int(parts[-1])
    except ValueError:
        raise ConfigError(f"{text!r} is neither a number of nodes nor a range such as 1:4") from None


def read_workers(text: str) -> int | str:
    """Return the number of workers as an int, or any other text unchanged."""
    try:
        return int(text)
    except ValueError:
        return text


def _ranks(text: str) -> list[int] | None:
    return [int(part) for part in text.split(",")] if text else None


def _texts(text: str) -> list[str]:
    """Return the parts between commas; two commas mean one comma within a part."""
    parts = re.findall(r"(?:[^,]|,,)+", text)
    return [part.replace(",,", ",") for part in parts]


def _flag(text: str) -> bool:
    return bool(int(text))


def _explained(name: str, key: RdzvConfKey) -> str:
    return f"{name}: {key.meaning}" + (f" ({key.default})" if key.default else "")


def _as_it_is(text: str) -> str:
    """Return the same *text* object: a default is recognized by its identity."""
    return text


@frozen
class Option:
    """One option, with its spelling, reader and help."""

    long: str
    """Spelling with dashes; the spelling with underscores is the name of its value."""
    help: str
    """One line for ``--help`` and for the configuration reference."""
    default: str | None = None
    """Default as a user would type it; None if the option has no default."""
    read: Callable[[str], Any] = _as_it_is
    short: tuple[str, ...] = ()
    metavar: str | None = None
    unset: str = "none"
    """Text in the help for the effect of an option without default that is not given."""
    more: str = ""
    """More text for ``--help``; the configuration reference has it as a separate table."""
    environment: bool = True
    """True if ``PET_<NAME>`` gives the default."""
    dest: str = field(init=False)

    @dest.default
    def _underscores(self) -> str:
        return self.long.lstrip("-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """True if the option takes no value on the command line."""
        return self.read is _flag

    @property
    def is_kept_as_text(self) -> bool:
        """True if torch's namespace holds the text, which is read later, and not the value."""
        return self.read not in (_flag, int, float, _texts)

    @property
    def variable(self) -> str:
        """Name of the environment variable that gives the default."""
        return f"PET_{self.dest.upper()}"

    def value(self, text: str | None, source: str) -> Any:
        """Return the value of *text*; None for None. Raises `ConfigError`, which names *source*."""
        if text is None:
            return None
        try:
            return self.read(text)
        except ConfigError as e:
            raise type(e)(f"{source}: {e}") from None
        except ValueError:
            kind = {_flag: "0 or 1", float: "a number", _ranks: "a list of whole numbers such as 0,2"}
            raise ConfigError(f"{source}: {text!r} is not {kind.get(self.read, 'a whole number')}") from None


NOTES = {
    "several nodes": "Alike on all nodes, but for is_host and a node's own rank and address. The secret that the "
    f"nodes share is read from the variable {TOKEN_VARIABLE} alone: a command line shows in ps.",
}
"""By group of options, a note for the help."""

OPTIONS: dict[str, tuple[Option, ...]] = {
    "workers": (
        Option(
            "--nnodes",
            "nodes of the job, N or MIN:MAX: it runs with MIN to MAX of them",
            "1:1",
            read_nodes,
            metavar="N",
        ),
        Option(
            "--nproc-per-node",
            f"workers on this node: a number or one of {', '.join(DEVICE_WORDS)} (auto: devices, else CPUs)",
            "1",
            read_workers,
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
            "comma-separated modules to import once for all workers; auto: torch, as the script needs it; '': none",
            "auto",
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
        Option(
            "--exit-timeout",
            "seconds from the end of a worker's program to that of its process; then it is ended, its stacks logged",
            None,
            float,
            metavar="SECONDS",
            unset="30; threads and exit handlers of what ended well take any time",
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
            "--log-line-prefix-template",
            "what stands before each line of a stream given to --tee; "
            "${role_name}, ${local_rank}, ${rank} and ${hostname} are filled in",
            "",
            metavar="TEXT",
            unset="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:",
        ),
        Option(
            "--local-ranks-filter",
            "local ranks shown on the console, as in 0,2",
            "",
            _ranks,
            metavar="RANKS",
            unset="all",
        ),
        Option(
            "--duplicate-stdout-filters",
            "copy lines of tee'd stdout that hold one of these texts to filtered_stdout.log; ,, stands for a comma",
            "",
            _texts,
            metavar="A,B",
        ),
        Option("--duplicate-stderr-filters", "the same for stderr", "", _texts, metavar="A,B"),
        Option(
            "--progress",
            "a line for each rank at the terminal's foot, with step, metrics, last line and restarts, drawn by the "
            "package rich; output goes to files, that of local rank 0 is shown unless --tee or --local-ranks-filter "
            "says otherwise",
            "0",
            _flag,
        ),
        Option(
            "--logs-specs",
            "layout of the logs: the name of a plug-in (entry-point group torchrun.logs_specs)",
            metavar="NAME",
            unset="default",
            environment=False,
        ),
    ),
    "several nodes": (
        Option(
            "--rdzv-backend",
            "how the nodes find each other: static, c10d, etcd, etcd-v2, etcd-v3 or a plug-in's name",
            "static",
            metavar="NAME",
        ),
        Option(
            "--rdzv-endpoint",
            "where: HOST:PORT (29400 unless given), for etcd its server (2379); port 0: this launch alone",
            "",
            metavar="HOST:PORT",
        ),
        Option("--rdzv-id", "id of the job; jobs with the same id and endpoint are one", "none", metavar="ID"),
        Option(
            "--rdzv-conf",
            "more about it, as in join_timeout=60,is_host=1",
            "",
            parse_conf,
            metavar="K=V,...",
            more=". Times in seconds: "
            + ". ".join(_explained(name, key) for name, key in RDZV_CONF_KEYS.items() if name not in _SAID_OTHERWISE),
        ),
        Option(
            "--wait-for",
            "when a round with MIN nodes starts: quiet (after last_call_timeout without newcomers), "
            "min (at once) or max (with MAX nodes, or when join_timeout is over)",
            "quiet",
            metavar="WORD",
        ),
        Option("--local-addr", "name or address of this node for the others", metavar="HOST", unset="found out"),
        Option("--node-rank", "node rank, from 0 on; static only", "0", int, metavar="N"),
        Option("--master-addr", "where the node with rank 0 is; static only", "127.0.0.1", metavar="HOST"),
        Option(
            "--master-port",
            "port on that node for the store of all workers; static only",
            None,
            int,
            metavar="PORT",
            unset="29500, on one node a free one",
        ),
        Option("--standalone", "private rendezvous on this machine, whatever the options above say", "0", _flag),
    ),
    "devices": (
        Option(
            "--virtual-local-rank", "LOCAL_RANK=0 and one device, in CUDA_VISIBLE_DEVICES, in every worker", "0", _flag
        ),
        Option(
            "--numa-binding",
            f"CPUs of each worker, by the GPU of its local rank: {', '.join(NUMA_MODES)}",
            metavar="MODE",
            environment=False,
        ),
    ),
    "events and debugging": (
        Option("--event-log-handler", f"where events go: {', '.join(EVENT_HANDLERS)}", "null", metavar="NAME"),
        Option(
            "--worker-server",
            "torch's debug server in every worker, on the Unix socket that ELASTICLIB_WORKER_SERVER_SOCKET names there",
            "0",
            _flag,
        ),
    ),
}
