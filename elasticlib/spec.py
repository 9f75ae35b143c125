"""
Specifications of a launch, of the workers of one node, and of their output.

Rules of this file: the constructor of a spec does no I/O and changes nothing outside it. A validator
names the value, the rule and the fix. A caller's list or dict is copied, never changed. Names, order
and meaning of the fields follow torch. Fields that torch lacks come last, by keyword only.
"""

from __future__ import annotations

import abc
import enum
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import Attribute, Factory, converters, define, field, setters
from attrs.validators import optional

from elasticlib import _rules
from elasticlib._untrusted import TOKEN_VARIABLE as TOKEN_VARIABLE
from elasticlib.errors import ConfigError, SpecError
from elasticlib.notebook import ipython_shell
from elasticlib.numa import NumaOptions, as_numa_options
from elasticlib.utils import DataclassView

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]
WaitFor: TypeAlias = Literal["quiet", "min", "max"]
RaiseAs: TypeAlias = Literal["both", "ChildFailedError"]
Entrypoint: TypeAlias = Callable[..., Any] | str | os.PathLike[str]

DEFAULT_PORT = 29400
"""Port of a rendezvous whose endpoint names none."""
DEFAULT_RENDEZVOUS_TIMEOUT = 900
"""Seconds."""
DEFAULT_MAX_RESTARTS = 3
AUTO = ("auto",)
"""Value of `preload` that imports torch ahead, and the parts of it that an entry point's text mentions."""
DEFAULT_PRELOAD = AUTO
DEFAULT_SIGNALS = _rules.Default("SIGTERM,SIGINT,SIGHUP,SIGQUIT")
START_METHODS = ("spawn", "fork", "forkserver")
WAITS = ("quiet", "min", "max")
RAISES = ("both", "ChildFailedError")
MAINS = ("import", "value")
DEVICE_WORDS = ("auto", "cpu", "gpu", "xpu")
ALL_NODES = "all"
"""Value of `min_nodes`: all nodes on which an engine, such as Slurm, has started this program."""


class Std(enum.IntFlag):
    """Selection of a worker's streams. (torch: ``torch.distributed.elastic.multiprocessing.Std``)"""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Read ``0``..``3``, or a map ``rank:0..3,...`` with ranks of any size."""
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (pair.split(":") for pair in text.split(","))
            return {int(rank): cls(int(std)) for rank, std in pairs}
        raise ConfigError(
            f"stream selector {text!r} is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) "
            "nor a list such as 0:1,1:3 (local rank:selector)"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return {local rank: streams}; ranks that a map leaves out get `Std.NONE`."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: Std(val_or_map.get(rank, Std.NONE)) for rank in range(local_world_size)}


def _streams(name: str, value: Any) -> Std | dict[int, Std]:
    """Return streams for all ranks or by rank, also from plain numbers. Raises `ConfigError`."""
    try:
        if not isinstance(value, Mapping):
            return _stream(value)
        return {operator.index(rank): _stream(std) for rank, std in value.items()}
    except (TypeError, ValueError):
        raise ConfigError.of_setting(
            name, f"{value!r} must be a Std (Std.NONE, OUT, ERR, ALL) or a dictionary {{local rank: Std}}"
        ) from None


def _stream(value: Any) -> Std:
    number = operator.index(value)
    # An IntFlag accepts any number.
    if not 0 <= number <= Std.ALL:
        raise ValueError(number)
    return Std(number)


def _ranks(value: Any) -> set[int] | None:
    if value is None:
        return None
    try:
        return set(map(operator.index, value))
    except TypeError:
        raise ConfigError.of_setting("local_ranks_filter", f"{value!r} must be local ranks, such as {{0, 1}}") from None


@define
class LogsDest(DataclassView):
    """Paths of one round's output, each by local rank; `os.devnull` for a discarded stream."""

    stdouts: dict[int, str] = Factory(dict)
    """Files of redirected stdout; a rank that is missing here writes to the launcher's stdout."""
    stderrs: dict[int, str] = Factory(dict)
    tee_stdouts: dict[int, str] = Factory(dict)
    """Files of `stdouts` whose lines also go to the launcher's console."""
    tee_stderrs: dict[int, str] = Factory(dict)
    error_files: dict[int, str] = Factory(dict)
    filtered_stdout: str = ""
    """File for lines of all ranks that contain one of ``duplicate_stdout_filters``; empty for none."""
    filtered_stderr: str = ""


class LogsSpecs(abc.ABC):
    """Destinations of worker streams. (torch: ``torch.distributed.elastic.multiprocessing.LogsSpecs``)"""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
        local_ranks_filter: Sequence[int] | set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = _streams("redirects", redirects)
        self._tee = _streams("tee", tee)
        self._local_ranks_filter = _ranks(local_ranks_filter)

    @abc.abstractmethod
    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Make the folders of one round and return its paths; *envs* is {local rank: environment}."""

    @property
    @abc.abstractmethod
    def root_log_dir(self) -> str:
        """Folder of all logs of the launch."""


_FOR_POOLS = "for pools"
NOT_FOR_POOLS = {_FOR_POOLS: False}
"""
Metadata of a field of `LaunchConfig` that `pool` does not accept.

A pool has one machine, and replaces its workers without restarts.
"""


def is_for_pools(setting: Attribute[Any]) -> bool:
    """Return True for a field of `LaunchConfig` that `pool` accepts."""
    return bool(setting.metadata.get(_FOR_POOLS, True))


def _nproc(_: Any, attribute: Attribute[Any], value: Any) -> None:
    # torch may know a device by any name. Unknown names are found when the workers are counted.
    if isinstance(value, str) and value.isidentifier():
        return
    if isinstance(value, int) and value > 0:
        return
    words = ", ".join(DEVICE_WORDS)
    raise SpecError.of_setting(attribute.name, f"{value!r} must be a whole number of at least 1, or one of {words}")


def _alone(rule: _rules.Validator) -> _rules.Validator:
    """Return the *rule* as a validator that does not get the object, which may hold the call's arguments."""
    return lambda _, attribute, value: rule(None, attribute, value)


def _arguments(value: Any) -> tuple[Any, ...]:
    return _rules.arguments("args", value)


def _dictionary_or_none(value: Any) -> dict[str, Any]:
    return {} if value is None else _rules.dictionary(value)


def _with_timeout(config: LaunchConfig, _: object, value: dict[str, Any]) -> dict[str, Any]:
    # As in torch, a timeout in its own field replaces the one in the dictionary.
    if getattr(config, "rdzv_timeout", -1) != -1:
        value["timeout"] = config.rdzv_timeout
    value.setdefault("timeout", DEFAULT_RENDEZVOUS_TIMEOUT)
    return value


def _into_configs(config: LaunchConfig, _: object, value: int) -> int:
    if value != -1:
        config.rdzv_configs["timeout"] = value
    config.rdzv_configs.setdefault("timeout", DEFAULT_RENDEZVOUS_TIMEOUT)
    return value


def _check_range(least: Any, most: int) -> None:
    if least == ALL_NODES:
        if most != 1:
            raise SpecError(f"max_nodes={most} cannot be combined with min_nodes='all', which sets both: leave it out")
    elif most < least:
        raise SpecError(f"max_nodes={most} is below min_nodes={least}: raise max_nodes")


def _default_max_restarts() -> int:
    """Return torch's default, but 0 in a notebook: a bug in a cell would make each attempt fail again."""
    return DEFAULT_MAX_RESTARTS if ipython_shell() is None else 0


@define
class LaunchConfig(DataclassView):
    """
    Settings of one launch; ``LaunchConfig()`` runs one worker per device of this machine.

    Fields, order and meaning are those of ``torch.distributed.launcher.LaunchConfig``. Some defaults
    differ, so that a launch works without settings: one node, ``nproc_per_node="auto"``, and workers
    forked from a fork server. ``rdzv_backend="c10d"`` has a private rendezvous if no endpoint is
    given. A job of several nodes needs `run_id` and `rdzv_endpoint`. `rdzv_configs` takes the keys of
    ``--rdzv-conf``.

    Raises `ConfigError` (a ``ValueError``) for a value that breaks a rule, before anything is started.
    """

    min_nodes: int | Literal["all"] = field(metadata=NOT_FOR_POOLS, default=1, converter=_rules.number)
    """Minimum number of nodes of the job. ``all``: the engine that started this program on each node, such as ``srun``,
    gives the number, and the endpoint and the id if they are not set. Without an engine the job has one node."""
    max_nodes: int = field(metadata=NOT_FOR_POOLS, default=1, converter=_rules.number)
    """Maximum number of nodes of the job; further nodes are spares."""
    nproc_per_node: int | str = field(metadata=NOT_FOR_POOLS, default="auto", converter=_rules.number, validator=_nproc)
    """Workers on this node: a number, ``cpu``, ``gpu``, another device's name, or ``auto`` (devices, else CPUs)."""
    logs_specs: LogsSpecs | None = field(default=None, validator=optional(_rules.logs_specs))
    """Destinations of the workers' output. None: workers write to the launcher's own streams."""
    run_id: str = field(metadata=NOT_FOR_POOLS, default="", converter=_rules.text_of, validator=_rules.identity)
    role: str = field(default="default_role", validator=_rules.text)
    rdzv_endpoint: str = field(metadata=NOT_FOR_POOLS, default="", converter=_rules.text_of, validator=_rules.text)
    rdzv_backend: str = field(metadata=NOT_FOR_POOLS, default="c10d", validator=_rules.text)
    rdzv_configs: dict[str, Any] = field(
        metadata=NOT_FOR_POOLS,
        factory=dict,
        converter=_rules.dictionary,
        on_setattr=[setters.convert, _with_timeout],
    )
    """The keys of ``--rdzv-conf``; values are text or typed."""
    rdzv_timeout: int = field(
        metadata=NOT_FOR_POOLS,
        default=-1,
        converter=_rules.number,
        validator=_rules.whole(-math.inf),
        on_setattr=[setters.convert, setters.validate, _into_configs],
    )
    """
    Time in seconds for enough nodes to join; -1 takes ``rdzv_configs["timeout"]``, else 900 for static and etcd.

    For c10d, etcd-v2 and etcd-v3 the default is 600. Another number here or ``rdzv_configs["join_timeout"]``
    changes it; 900 does not, since torch's launches always give it.
    """
    max_restarts: int = field(
        metadata=NOT_FOR_POOLS, factory=_default_max_restarts, converter=_rules.number, validator=_rules.whole(0)
    )
    """Maximum number of restarts of the whole group after worker failures, counted over the whole job. The default
    is 0 in a notebook."""
    monitor_interval: float = field(default=0.1, converter=_rules.real, validator=_rules.positive)
    """Polling interval in seconds for third-party rendezvous handlers; the end of a worker is noticed at once."""
    start_method: StartMethod = field(default="forkserver", validator=_rules.one_of(START_METHODS))
    """``forkserver``: workers are forked from a fork server; ``spawn``: each is a new interpreter; ``fork``: they are
    forked from the caller."""
    log_line_prefix_template: str | None = field(default=None, validator=optional(_rules.text))
    """Prefix of each line of a tee'd stream; None: ``[${role_name}${local_rank}]:``."""
    metrics_cfg: dict[str, str] = field(factory=dict, converter=_dictionary_or_none)
    """Handler for this launch's own metrics, instead of the program's: ``{"handler": "console"}`` or
    ``{"handler": "null"}``. Other items have no effect and cause a warning."""
    local_addr: str | None = field(default=None, validator=optional(_rules.text))
    event_log_handler: str = field(default="null", validator=_rules.text)
    """Handler of events: ``null``, ``console``, ``dynamic_rendezvous``, or a name given to `add_logging_handler`."""
    numa_options: NumaOptions | None = field(default=None, converter=as_numa_options)
    """Binds each worker to the CPUs near the accelerator whose index is its local rank. None: if each worker has an
    accelerator, the default of the torch that this program has imported; torch from PyPI does not bind."""
    signals_to_handle: str = field(default=DEFAULT_SIGNALS, validator=_rules.text)
    duplicate_stdout_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=optional(_rules.texts)
    )
    """Lines of tee'd stdout that contain one of these texts also go to ``attempt_<n>/filtered_stdout.log``."""
    duplicate_stderr_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=optional(_rules.texts)
    )
    """As `duplicate_stdout_filters`, for stderr."""
    virtual_local_rank: bool = field(default=False, converter=_rules.truth, validator=_rules.yes_or_no)
    """Each worker gets LOCAL_RANK=0 and sees one device: its entry of CUDA_VISIBLE_DEVICES, else the device of its
    local rank."""
    shutdown_timeout: float | None = field(
        default=None, converter=_rules.real, validator=optional(_rules.shutdown_timeout)
    )
    """Seconds from the stop signal to SIGKILL; None takes TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30. If all workers of
    a node wait in native code, such as a collective, some are killed earlier to free the others."""
    module: bool = field(metadata=NOT_FOR_POOLS, default=False, kw_only=True)
    """The entry point is the name of a module, which runs as with ``python -m``."""
    no_python: bool = field(metadata=NOT_FOR_POOLS, default=False, kw_only=True)
    """The entry point is a program, even if its name ends in ``.py``."""
    preload: tuple[str, ...] = field(default=DEFAULT_PRELOAD, converter=_rules.words, kw_only=True)
    """Modules that the fork server imports once for all workers. Empty: none. ``auto``: torch and the parts of it
    that the entry point's text mentions. Only for ``forkserver``."""
    token: str | None = field(
        metadata=NOT_FOR_POOLS, default=None, validator=optional(_rules.secret), repr=False, kw_only=True
    )
    """Secret of the job, without which no node can join. None takes the variable ELASTICLIB_TOKEN."""
    wait_for: WaitFor = field(metadata=NOT_FOR_POOLS, default="quiet", validator=_rules.one_of(WAITS), kw_only=True)
    """Time at which a round with at least `min_nodes` starts. ``quiet``: when no node has joined for some time;
    ``min``: at once; ``max``: when `max_nodes` have joined or the join time is over."""
    node_rank: int | None = field(
        metadata=NOT_FOR_POOLS,
        default=None,
        converter=_rules.number,
        validator=optional(_rules.whole(0)),
        kw_only=True,
    )
    """Fixed rank of this node, 0 to ``max_nodes - 1``; only for ``rdzv_backend="static"``."""
    worker_server: bool = field(default=False, kw_only=True)
    """Run torch's debug server in every worker that loads torch. The worker's variable
    ``ELASTICLIB_WORKER_SERVER_SOCKET`` names its Unix socket. Programs other than Python find the socket that they
    can serve in ``TORCH_WORKER_SERVER_SOCKET``."""
    preempt_signal: str = field(
        metadata=NOT_FOR_POOLS, default="", converter=_rules.text_of, validator=_rules.text, kw_only=True
    )
    """Signals that announce the end of this node, such as ``SIGTERM,SIGUSR1``: workers that call `should_stop` are
    asked to stop, and workers that handle the signal on their own and end with success were preempted. A Slurm step
    sets SIGTERM, SIGUSR1 and SIGUSR2, and a pod SIGTERM, if ``min_nodes="all"``."""
    preempt_notice: str | os.PathLike[str] | Callable[[], str | None] | None = field(
        metadata=NOT_FOR_POOLS, default=None, validator=optional(_rules.notice), kw_only=True
    )
    """File or function that announces the end of this node, read once a second. The file appears; the function returns
    the reason as text, and None before. The workers are stopped then, as by a signal of `preempt_signal`."""
    end_time: float | None = field(
        metadata=NOT_FOR_POOLS,
        default=None,
        converter=_rules.real,
        validator=optional(_rules.unix_time),
        kw_only=True,
    )
    """Unix time at which the scheduler ends the job; ``inf`` asks Slurm. Workers that call `should_stop` are asked to
    stop ``shutdown_timeout`` before. A Slurm step sets it if ``min_nodes="all"``."""
    exit_timeout: float | None = field(
        default=None, converter=_rules.real, validator=optional(_rules.exit_timeout), kw_only=True
    )
    """Seconds from the outcome of a worker's program (it raised, returned or ended) to the end of its process: time for
    exit handlers and threads. Then the stacks of its threads are logged and the worker is stopped. It has failed,
    unless only finalizers were left. For the last running rank the time includes destructors of local variables after
    its function has returned. None gives 30 s, but no limit for these destructors, nor for threads and exit handlers
    after a success."""
    show: Literal["all"] | tuple[int, ...] | None = field(
        default=None, converter=converters.optional(_rules.ranks), kw_only=True
    )
    """Global ranks of this node whose output is shown: ``all`` or some. The output of all is kept in files meanwhile.
    None: rank 0 in a notebook, in a started job, and if ``sys.stdout`` was replaced; else all ranks, which write to
    the launcher's own descriptors. On Slurm (``on=``): all ranks."""
    raise_as: RaiseAs = field(default="both", validator=_rules.one_of(RAISES), kw_only=True)
    """Class that a launch raises for a worker's exception. ``both``: a `ChildFailedError` that is also of that
    exception's class, so that ``except ValueError:`` catches it. ``ChildFailedError``: only that, with the worker's
    exception as its cause."""
    devices: tuple[int | str, ...] | None = field(
        default=None, converter=converters.optional(_rules.devices), kw_only=True
    )
    """GPUs that the workers see: indices among the GPUs that this program sees, or names such as ``GPU-8932f937``; ()
    for none. None: all that no other job of this program has. A worker uses the GPU with its local rank among these."""

    main: Literal["import", "value"] | None = field(
        default=None, validator=optional(_rules.one_of(MAINS)), kw_only=True
    )
    """Way in which workers get the caller's script. ``import``: they import it, as with ``multiprocessing``.
    ``value``: they get the function with the parts of the script that it uses. None: ``import`` if the call is under
    the script's ``if __name__ == "__main__":``, else ``value``, as from a notebook."""

    @max_nodes.validator
    def _not_below_min(self, attribute: Attribute[Any], value: int) -> None:
        _rules.whole(1)(self, attribute, value)
        _check_range(self.min_nodes, value)

    @min_nodes.validator
    def _not_above_max(self, attribute: Attribute[Any], value: Any) -> None:
        if value != ALL_NODES:
            _rules.whole(1)(self, attribute, value)
        _check_range(value, getattr(self, "max_nodes", 1))

    @no_python.validator
    @module.validator
    def _not_both(self, attribute: Attribute[Any], value: bool) -> None:
        if value and all(getattr(self, name, False) for name in {"module", "no_python"} - {attribute.name}):
            raise ConfigError.of_setting(
                "no_python", "True cannot be combined with module=True: a module needs the interpreter; leave one out"
            )

    def __attrs_post_init__(self) -> None:
        _into_configs(self, None, self.rdzv_timeout)


@define
class WorkerSpec(DataclassView):
    """
    Specification of the workers of one node.

    Fields, order and meaning are those of ``torch.distributed.elastic.agent.server.WorkerSpec``. `fn` is a
    deprecated name of `entrypoint`; if both are given, `fn` runs. Raises `SpecError` (also an
    ``AssertionError``) for a number that breaks its rule.
    """

    role: str = field(validator=_alone(_rules.text))
    local_world_size: int = field(converter=_rules.number, validator=_alone(_rules.whole(1)))
    """Number of workers on this node."""
    rdzv_handler: object
    """Rendezvous of the nodes: the result of `get_rendezvous_handler`, or another `RendezvousHandler`."""
    fn: Callable[..., Any] | None = None
    """Old name of `entrypoint`; deprecated."""
    entrypoint: Entrypoint | None = None
    """Work of each worker: a callable, the path of a script, a module's name or a program. Required."""
    args: tuple[Any, ...] = field(default=(), converter=_arguments)
    """Arguments of the callable, or the command line of the script or program."""
    max_restarts: int = field(default=DEFAULT_MAX_RESTARTS, converter=_rules.number, validator=_alone(_rules.whole(0)))
    """As in `LaunchConfig`, but the default is 3 in a notebook, too."""
    monitor_interval: float = field(default=0.1, converter=_rules.real, validator=_alone(_rules.positive))
    master_port: int | None = field(default=None, converter=_rules.number)
    """Port of the workers' store in rank 0, only for etcd. Other backends use the port of the round's own store,
    unlike torch, and another port here causes a warning."""
    master_addr: str | None = None
    """Host of the workers' store, with the limits of `master_port`."""
    local_addr: str | None = None
    event_log_handler: str = field(default="null", validator=_alone(_rules.text))
    numa_options: NumaOptions | None = field(default=None, converter=as_numa_options)
    """As in `LaunchConfig`, but None means no binding."""
    duplicate_stdout_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=_alone(optional(_rules.texts))
    )
    duplicate_stderr_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=_alone(optional(_rules.texts))
    )
    virtual_local_rank: bool = field(default=False, converter=_rules.truth, validator=_alone(_rules.yes_or_no))
    kwargs: dict[str, Any] = field(factory=dict, converter=_rules.dictionary, kw_only=True)
    """Keyword arguments of a callable entry point."""
    module: bool = field(default=False, kw_only=True)
    no_python: bool = field(default=False, kw_only=True)
    preload: tuple[str, ...] = field(default=DEFAULT_PRELOAD, converter=_rules.words, kw_only=True)
    worker_server: bool = field(default=False, kw_only=True)
    exit_timeout: float | None = field(
        default=None, converter=_rules.real, validator=_alone(optional(_rules.exit_timeout)), kw_only=True
    )
    """As in `LaunchConfig`."""
    main: Literal["import", "value"] | None = field(
        default=None, validator=_alone(optional(_rules.one_of(MAINS))), kw_only=True
    )
    """As in `LaunchConfig`."""

    def __attrs_post_init__(self) -> None:
        if self.fn is not None:
            # The third frame is the user's line: attrs has generated the second.
            warnings.warn("WorkerSpec.fn is deprecated: give entrypoint", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if self.entrypoint is None:
            raise SpecError("entrypoint=None: give a callable, a script's path or a program")

    def get_entrypoint_name(self) -> str:
        """Return the callable's qualified name, or the file name of the script or program."""
        return entrypoint_name(self.entrypoint)


def entrypoint_name(entrypoint: Entrypoint | None) -> str:
    """Return the name of *entrypoint* in reports."""
    if isinstance(entrypoint, (str, os.PathLike)):
        return os.path.basename(os.fspath(entrypoint))
    return str(getattr(entrypoint, "__qualname__", None) or type(entrypoint).__qualname__)
