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

from elasticlib.engines import ENGINES
from elasticlib.errors import PREEMPTED, ConfigError, NodesError
from elasticlib.rendezvous import RDZV_CONF_KEYS, RdzvConfKey, parse_conf
from elasticlib.spec import DEFAULT_SIGNALS, DEVICE_WORDS, START_METHODS, TOKEN_VARIABLE, Std

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
_EXPLAINED_ELSEWHERE = ("rank", "timeout", "wait_for", "cert", "key", "cacert")
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
    # As torchrun reads the variables of flags: 0 or 1.
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
    "several nodes": "Give all nodes the same values, except for is_host and a node's own rank and address. The "
    f"secret that the nodes share is read only from the environment variable {TOKEN_VARIABLE}, "
    "because ps shows command lines.",
}
"""By group of options, a note for the help."""

OPTIONS: dict[str, tuple[Option, ...]] = {
    "workers": (
        Option(
            "--nnodes",
            "number of nodes, N or MIN:MAX; the job runs with MIN to MAX nodes",
            "1:1",
            read_nodes,
            metavar="N",
        ),
        Option(
            "--nproc-per-node",
            f"workers on this node: a number or one of {', '.join(DEVICE_WORDS)} (auto: one for each "
            "device, else for each CPU)",
            "1",
            read_workers,
            metavar="N",
        ),
        Option(
            "--start-method",
            f"{', '.join(START_METHODS)}; forkserver forks the workers "
            "from a process that has already imported torch (see preload)",
            "forkserver",
            metavar="METHOD",
        ),
        Option(
            "--preload",
            "comma-separated modules to import once for all workers; auto: torch, with the parts that the "
            "script uses; '': none",
            "auto",
            metavar="A,B",
        ),
        Option("--role", "name of the workers' role", "default"),
    ),
    "program to run": (
        Option("--module", "run the script as a module, as python -m does", "0", _flag, ("-m",)),
        Option("--no-python", "run the script as a program, without an interpreter", "0", _flag),
        Option("--run-path", "run the file as a Python script, despite --module and --no-python", "0", _flag),
    ),
    "restarts and end": (
        Option("--max-restarts", "maximum number of restarts after failures, for the whole job", "0", int, metavar="N"),
        Option(
            "--monitor-interval",
            "polling interval in seconds, for rendezvous handlers of other packages",
            "0.1",
            float,
            metavar="SECONDS",
        ),
        Option("--signals-to-handle", "signals that stop the job and are forwarded to the workers", DEFAULT_SIGNALS),
        Option(
            "--shutdown-timeout",
            "seconds from the stop signal to SIGKILL",
            None,
            int,
            metavar="SECONDS",
            unset="TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        ),
        Option(
            "--preempt-exit",
            "exit status if a signal stopped the job, and all workers returned after elasticlib.should_stop()",
            str(PREEMPTED),
            int,
            metavar="N",
        ),
        Option(
            "--failure-exit",
            "exit status if the program itself failed and no restart was left, so that another try would not help",
            "1",
            int,
            metavar="N",
        ),
        Option(
            "--termination-log",
            "file for the root cause of an end without success, in one line",
            None,
            metavar="FILE",
            unset="/dev/termination-log if it exists, as in a pod; else none",
        ),
        Option(
            "--requeue",
            "most times that the Slurm job is requeued after a time limit, a preemption notice or a lost node",
            "0",
            int,
            metavar="N",
        ),
        Option(
            "--preempt-signal",
            "signals that announce the end of this node, such as USR1: workers that call elasticlib.should_stop() are "
            "asked to stop, and workers that handle the signal and end with 0 were preempted",
            None,
            metavar="NAMES",
            unset="in a Slurm step SIGTERM,SIGUSR1,SIGUSR2; in a pod SIGTERM; else none",
        ),
        Option(
            "--preempt-notice",
            "file whose appearance announces the end of this node; its first line is the reason",
            None,
            metavar="FILE",
        ),
        Option(
            "--end-time",
            "Unix time at which the scheduler ends the job, or inf to ask Slurm: workers that call "
            "elasticlib.should_stop() are asked to stop before it, by the shutdown timeout",
            None,
            float,
            metavar="SECONDS",
            unset="that of the Slurm job",
        ),
        Option(
            "--exit-timeout",
            "seconds that a worker's process may take to exit after its program has finished; then its stacks "
            "are logged and it is killed",
            None,
            float,
            metavar="SECONDS",
            unset="30 after a failure; no limit after success",
        ),
    ),
    "logs": (
        Option("--log-dir", "folder for logs", metavar="DIR", unset="a temporary one"),
        Option(
            "--redirects",
            "streams to redirect to files: 0 none, 1 stdout, 2 stderr, 3 both, or for each local rank, such as 0:1,1:3",
            "0",
            Std.from_str,
            ("-r",),
            metavar="STD",
        ),
        Option(
            "--tee", "streams to write to files and to the console, in the same form", "0", Std.from_str, ("-t",), "STD"
        ),
        Option(
            "--log-line-prefix-template",
            "prefix of each console line of --tee; ${role_name}, ${local_rank}, ${rank} and ${hostname} are replaced",
            "",
            metavar="TEXT",
            unset="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, else [${role_name}${local_rank}]:",
        ),
        Option(
            "--local-ranks-filter",
            "local ranks to show on the console, such as 0,2",
            "",
            _ranks,
            metavar="RANKS",
            unset="all",
        ),
        Option(
            "--duplicate-stdout-filters",
            "copy lines of tee'd stdout that contain one of these comma-separated strings to "
            "filtered_stdout.log; ,, is a literal comma",
            "",
            _texts,
            metavar="A,B",
        ),
        Option("--duplicate-stderr-filters", "the same for stderr", "", _texts, metavar="A,B"),
        Option(
            "--progress",
            "show a live table of all ranks below the output: step, metrics, last line, restarts (needs "
            "the package rich); output goes to files, and local rank 0 is shown unless --tee or "
            "--local-ranks-filter is given",
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
            "address of the rendezvous, HOST:PORT (default port 29400; for etcd: its server, default port 2379); port "
            "0: a free port, for a job of one node",
            "",
            metavar="HOST:PORT",
        ),
        Option("--rdzv-id", "id of the job; launches with the same id and endpoint join one job", "none", metavar="ID"),
        Option(
            "--rdzv-conf",
            "further rendezvous options, such as join_timeout=60,is_host=1",
            "",
            parse_conf,
            metavar="K=V,...",
            more=". Times in seconds: "
            + ". ".join(
                _explained(name, key) for name, key in RDZV_CONF_KEYS.items() if name not in _EXPLAINED_ELSEWHERE
            ),
        ),
        Option(
            "--wait-for",
            "when a round with at least MIN nodes starts: quiet (after last_call_timeout without a new "
            "node), min (at once) or max (with MAX nodes, or after join_timeout)",
            "quiet",
            metavar="WORD",
        ),
        Option(
            "--local-addr",
            "host name or address by which other nodes reach this node",
            metavar="HOST",
            unset="detected",
        ),
        Option("--node-rank", "rank of this node, from 0 (static only)", "0", int, metavar="N"),
        Option("--master-addr", "address of the node with rank 0 (static only)", "127.0.0.1", metavar="HOST"),
        Option(
            "--master-port",
            "port on that node for the workers' store (static only)",
            None,
            int,
            metavar="PORT",
            unset="29500; a free port for a job of one node",
        ),
        Option(
            "--engine",
            f"program that placed this node and gives the values of --nnodes, --rdzv-endpoint and --rdzv-id that are "
            f"not given: {', '.join(ENGINES)}",
            "auto",
            metavar="NAME",
        ),
        Option("--standalone", "private rendezvous on this machine; overrides the options above", "0", _flag),
    ),
    "devices": (
        Option(
            "--virtual-local-rank",
            "set LOCAL_RANK=0 and one device in CUDA_VISIBLE_DEVICES for every worker",
            "0",
            _flag,
        ),
        Option(
            "--numa-binding",
            f"bind each worker to the CPUs near the GPU of its local rank: {', '.join(NUMA_MODES)}",
            metavar="MODE",
            environment=False,
        ),
    ),
    "events and debugging": (
        Option("--event-log-handler", f"destination of events: {', '.join(EVENT_HANDLERS)}", "null", metavar="NAME"),
        Option(
            "--worker-server",
            "start torch's debug server in every worker, on the Unix socket in its variable "
            "ELASTICLIB_WORKER_SERVER_SOCKET",
            "0",
            _flag,
        ),
    ),
}
