"""
What was asked: the launch, the workers of one node, and where their output goes.

Rules of this file: constructing a spec does no I/O and touches nothing outside it; a validator names
the value, the rule and the mend; a caller's list or dict is copied, never changed. Names, order and
meaning of the fields follow torch; what torch lacks comes after, by keyword only.
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

DEFAULT_RENDEZVOUS_TIMEOUT = 900
"""Seconds"""
DEFAULT_MAX_RESTARTS = 3
AUTO = ("auto",)
"""The `preload` that imports ahead torch, and its parts that an entry point's text mentions."""
DEFAULT_PRELOAD = AUTO
DEFAULT_SIGNALS = _rules.Default("SIGTERM,SIGINT,SIGHUP,SIGQUIT")
START_METHODS = ("spawn", "fork", "forkserver")
WAITS = ("quiet", "min", "max")
RAISES = ("both", "ChildFailedError")
MAINS = ("import", "value")
DEVICE_WORDS = ("auto", "cpu", "gpu", "xpu")


class Std(enum.IntFlag):
    """A choice of a worker's streams. (torch: ``torch.distributed.elastic.multiprocessing.Std``)"""

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
    """Give each local rank its streams; ranks that a map leaves out get `Std.NONE`."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: Std(val_or_map.get(rank, Std.NONE)) for rank in range(local_world_size)}


def _streams(name: str, value: Any) -> Std | dict[int, Std]:
    """Streams for all ranks or by rank; plain numbers will do."""
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
    # An IntFlag takes any number.
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
    """Paths of one round, each by local rank; `os.devnull` where a stream is thrown away."""

    stdouts: dict[int, str] = Factory(dict)
    """Redirected stdout; a rank that is left out writes to the launcher's stdout."""
    stderrs: dict[int, str] = Factory(dict)
    tee_stdouts: dict[int, str] = Factory(dict)
    """Files of `stdouts` whose lines go to the launcher's console too."""
    tee_stderrs: dict[int, str] = Factory(dict)
    error_files: dict[int, str] = Factory(dict)
    filtered_stdout: str = ""
    """The file for lines that hold one of ``duplicate_stdout_filters``, of all ranks; empty where there is none."""
    filtered_stderr: str = ""


class LogsSpecs(abc.ABC):
    """Which streams go where. (torch: ``torch.distributed.elastic.multiprocessing.LogsSpecs``)"""

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
        """The folder that holds all logs of the launch."""


_FOR_POOLS = "for pools"
NOT_FOR_POOLS = {_FOR_POOLS: False}
"""Metadata of a field of `LaunchConfig` that has no meaning for a pool, which is of one machine and mends itself."""


def is_for_pools(setting: Attribute[Any]) -> bool:
    """Return True for a field of `LaunchConfig` that `pool` takes."""
    return bool(setting.metadata.get(_FOR_POOLS, True))


def _nproc(_: Any, attribute: Attribute[Any], value: Any) -> None:
    # torch may have a device of any name, which is looked for when the workers are counted.
    if isinstance(value, str) and value.isidentifier():
        return
    if isinstance(value, int) and value > 0:
        return
    words = ", ".join(DEVICE_WORDS)
    raise SpecError.of_setting(attribute.name, f"{value!r} must be a whole number of at least 1, or one of {words}")


def _alone(rule: _rules.Validator) -> _rules.Validator:
    """The *rule* of a field, which gets its value without the object that has the call's arguments, too."""
    return lambda _, attribute, value: rule(None, attribute, value)


def _arguments(value: Any) -> tuple[Any, ...]:
    return _rules.arguments("args", value)


def _dictionary_or_none(value: Any) -> dict[str, Any]:
    return {} if value is None else _rules.dictionary(value)


def _with_timeout(config: LaunchConfig, _: object, value: dict[str, Any]) -> dict[str, Any]:
    if getattr(config, "rdzv_timeout", -1) != -1:
        value["timeout"] = config.rdzv_timeout
    value.setdefault("timeout", DEFAULT_RENDEZVOUS_TIMEOUT)
    return value


def _into_configs(config: LaunchConfig, _: object, value: int) -> int:
    if value != -1:
        config.rdzv_configs["timeout"] = value
    config.rdzv_configs.setdefault("timeout", DEFAULT_RENDEZVOUS_TIMEOUT)
    return value


def _default_max_restarts() -> int:
    """torch's, but none in a notebook: whoever has a bug in a cell would wait there for each attempt to meet it."""
    return DEFAULT_MAX_RESTARTS if ipython_shell() is None else 0


@define
class LaunchConfig(DataclassView):
    """
    One launch as asked for; ``LaunchConfig()`` runs one worker per device of this machine.

    Fields, order and meaning are those of ``torch.distributed.launcher.LaunchConfig``. Defaults differ
    where torch's do not work alone: one node, ``nproc_per_node="auto"``, ``rdzv_backend="c10d"`` with a
    private rendezvous when no endpoint is given, and workers forked from a fork server. A job of several
    nodes needs `run_id` and `rdzv_endpoint`; `rdzv_configs` takes the keys of ``--rdzv-conf``.

    Raises `ConfigError` (a ``ValueError``) for a value that breaks a rule; nothing is started by then.
    """

    min_nodes: int = field(metadata=NOT_FOR_POOLS, default=1, converter=_rules.number)
    """Fewest nodes that the job runs with."""
    max_nodes: int = field(metadata=NOT_FOR_POOLS, default=1, converter=_rules.number)
    """Most nodes that the job runs with; those beyond are spares."""
    nproc_per_node: int | str = field(metadata=NOT_FOR_POOLS, default="auto", converter=_rules.number, validator=_nproc)
    """Workers on this node: a number, ``cpu``, ``gpu``, another device's name, or ``auto`` (devices, else CPUs)."""
    logs_specs: LogsSpecs | None = field(default=None, validator=optional(_rules.logs_specs))
    """None leaves the workers' streams on the launcher's own."""
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
    """The keys of ``--rdzv-conf``, as text or typed."""
    rdzv_timeout: int = field(
        metadata=NOT_FOR_POOLS,
        default=-1,
        converter=_rules.number,
        validator=_rules.whole(-math.inf),
        on_setattr=[setters.convert, setters.validate, _into_configs],
    )
    """
    Seconds until enough nodes have joined; -1 takes ``rdzv_configs["timeout"]``, else 900 for static and etcd.

    c10d, etcd-v2 and etcd-v3 have 600 unless another number is given here (900 counts as none: torch's launches always
    say it) or ``rdzv_configs["join_timeout"]`` says so.
    """
    max_restarts: int = field(
        metadata=NOT_FOR_POOLS, factory=_default_max_restarts, converter=_rules.number, validator=_rules.whole(0)
    )
    """Restarts of the whole group that worker failures may use up, counted over the whole job; in a notebook none
    unless it is given."""
    monitor_interval: float = field(default=0.1, converter=_rules.real, validator=_rules.positive)
    """Seconds between looks at what can only be polled; workers' ends are noticed at once."""
    start_method: StartMethod = field(default="forkserver", validator=_rules.one_of(START_METHODS))
    """``forkserver``: forked from a fork server; ``spawn``: a new interpreter each; ``fork``: from the caller."""
    log_line_prefix_template: str | None = field(default=None, validator=optional(_rules.text))
    """What stands before each line of a stream that is tee'd; None: ``[${role_name}${local_rank}]:``."""
    metrics_cfg: dict[str, str] = field(factory=dict, converter=_dictionary_or_none)
    """Where this launch's own metrics go, in place of the handler that the program has configured:
    ``{"handler": "console"}`` or ``{"handler": "null"}``. Nothing else has an effect, which is said in a warning."""
    local_addr: str | None = field(default=None, validator=optional(_rules.text))
    event_log_handler: str = field(default="null", validator=_rules.text)
    """Where events go: ``null``, ``console``, ``dynamic_rendezvous``, or a name given to `add_logging_handler`."""
    numa_options: NumaOptions | None = field(default=None, converter=as_numa_options)
    """Binds each worker to the CPUs near the accelerator whose index is its local rank. None: where each worker
    has an accelerator, as the torch that this program has imported has it by default; PyPI's does not bind."""
    signals_to_handle: str = field(default=DEFAULT_SIGNALS, validator=_rules.text)
    duplicate_stdout_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=optional(_rules.texts)
    )
    """Lines of tee'd stdout that hold one of these texts go to ``attempt_<n>/filtered_stdout.log`` too."""
    duplicate_stderr_filters: list[str] | None = field(
        default=None, converter=_rules.own_list, validator=optional(_rules.texts)
    )
    """The same for stderr."""
    virtual_local_rank: bool = field(default=False, converter=_rules.truth, validator=_rules.yes_or_no)
    """Each worker sees LOCAL_RANK=0 and one device: its entry of CUDA_VISIBLE_DEVICES, else that of its rank."""
    shutdown_timeout: float | None = field(
        default=None, converter=_rules.real, validator=optional(_rules.shutdown_timeout)
    )
    """Seconds from the stop signal to SIGKILL; None takes TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30. Less where all
    workers of a node wait in native code, such as a collective, and an early end of some frees the others."""
    module: bool = field(metadata=NOT_FOR_POOLS, default=False, kw_only=True)
    """The entry point is a module's name, run as ``python -m`` would."""
    no_python: bool = field(metadata=NOT_FOR_POOLS, default=False, kw_only=True)
    """The entry point is a program, also where its name ends in ``.py``."""
    preload: tuple[str, ...] = field(default=DEFAULT_PRELOAD, converter=_rules.words, kw_only=True)
    """Modules that the fork server imports once for all workers; empty for none; ``auto`` for torch and the parts
    of it that the entry point's text mentions. Only for ``forkserver``."""
    token: str | None = field(
        metadata=NOT_FOR_POOLS, default=None, validator=optional(_rules.secret), repr=False, kw_only=True
    )
    """Secret of the job: nodes without it are kept out. None takes the variable ELASTICLIB_TOKEN."""
    wait_for: WaitFor = field(metadata=NOT_FOR_POOLS, default="quiet", validator=_rules.one_of(WAITS), kw_only=True)
    """When a round with `min_nodes` starts: after a time without newcomers (``quiet``), at once (``min``), or not
    before `max_nodes` are there or the join time is over (``max``)."""
    node_rank: int | None = field(
        metadata=NOT_FOR_POOLS, default=None, validator=optional(_rules.whole(0)), kw_only=True
    )
    """Fixed place of this node, 0 to ``max_nodes - 1``, for ``rdzv_backend="static"`` alone."""
    worker_server: bool = field(default=False, kw_only=True)
    """Run torch's debug server in every worker that loads torch; ``ELASTICLIB_WORKER_SERVER_SOCKET`` there names its
    Unix socket. Programs that are no Python find the socket to serve in ``TORCH_WORKER_SERVER_SOCKET``."""
    exit_timeout: float | None = field(default=None, validator=optional(_rules.exit_timeout), kw_only=True)
    """Seconds from the outcome of a worker's program (it raised, returned or ended) to the end of its process: time for
    exit handlers and threads. After it the stacks of its threads are logged and it is stopped: it has failed, unless
    only finalizers were left. In the last rank that runs, also the time for destructors of local variables, once its
    function has returned. None gives 30 s, and any time to these, and to threads and exit handlers after a success."""
    show: Literal["all"] | tuple[int, ...] | None = field(
        default=None, converter=converters.optional(_rules.ranks), kw_only=True
    )
    """Global ranks of this node whose output is shown, ``all`` or some; that of all is kept in files meanwhile. None:
    rank 0 in a notebook, of a started job and where ``sys.stdout`` was replaced, else all, by their own descriptors."""
    raise_as: RaiseAs = field(default="both", validator=_rules.one_of(RAISES), kw_only=True)
    """What a launch raises for a worker's exception: ``both``, a `ChildFailedError` that is of that exception's class
    too, so that ``except ValueError:`` catches it; ``ChildFailedError``, just that, with the other one as its cause."""
    devices: tuple[int | str, ...] | None = field(
        default=None, converter=converters.optional(_rules.devices), kw_only=True
    )
    """GPUs that the workers see: indices of those that this program sees, or names such as ``GPU-8932f937``; () for
    none. None: all that no other job of this program has. A worker's own is that of its local rank, among these."""

    main: Literal["import", "value"] | None = field(
        default=None, validator=optional(_rules.one_of(MAINS)), kw_only=True
    )
    """How workers get the caller's script: they import it, as those of ``multiprocessing`` do (``import``), or get the
    function with what it uses of it (``value``). None: import where the call stands behind the script's
    ``if __name__ == "__main__":``, else by value, as from a notebook."""

    @max_nodes.validator
    def _not_below_min(self, attribute: Attribute[Any], value: int) -> None:
        _rules.whole(1)(self, attribute, value)
        if value < self.min_nodes:
            raise SpecError(f"max_nodes={value} is below min_nodes={self.min_nodes}: raise max_nodes")

    @min_nodes.validator
    def _not_above_max(self, attribute: Attribute[Any], value: int) -> None:
        _rules.whole(1)(self, attribute, value)
        if value > getattr(self, "max_nodes", value):
            raise SpecError(f"max_nodes={self.max_nodes} is below min_nodes={value}: raise max_nodes")

    @no_python.validator
    @module.validator
    def _not_both(self, attribute: Attribute[Any], value: bool) -> None:
        if value and all(getattr(self, name, False) for name in {"module", "no_python"} - {attribute.name}):
            raise ConfigError.of_setting(
                "no_python", "True excludes module=True: a module needs the interpreter; leave one out"
            )

    def __attrs_post_init__(self) -> None:
        _into_configs(self, None, self.rdzv_timeout)


@define
class WorkerSpec(DataclassView):
    """
    The workers of one node as asked for.

    Fields, order and meaning are those of ``torch.distributed.elastic.agent.server.WorkerSpec``. `fn` is an old
    name of `entrypoint` and deprecated; where both are given, it is what runs. Raises `SpecError` (also an
    ``AssertionError``) for a number that breaks its rule.
    """

    role: str = field(validator=_alone(_rules.text))
    local_world_size: int = field(converter=_rules.number, validator=_alone(_rules.whole(1)))
    """How many workers this node has."""
    rdzv_handler: object
    """Through which the nodes meet: what `get_rendezvous_handler` returns, or another `RendezvousHandler`."""
    fn: Callable[..., Any] | None = None
    """Old name of `entrypoint`; deprecated."""
    entrypoint: Entrypoint | None = None
    """What each worker runs: a callable, the path of a script, a module's name or a program; one must be given."""
    args: tuple[Any, ...] = field(default=(), converter=_arguments)
    """Arguments of the callable, or the command line of the script or program."""
    max_restarts: int = field(default=DEFAULT_MAX_RESTARTS, converter=_rules.number, validator=_alone(_rules.whole(0)))
    """As in `LaunchConfig`, but 3 in a notebook, too."""
    monitor_interval: float = field(default=0.1, converter=_rules.real, validator=_alone(_rules.positive))
    master_port: int | None = None
    """For etcd alone: the workers' rank 0 hosts their store there. Elsewhere the port of the round's own store counts,
    unlike in torch, and another one here is warned of."""
    master_addr: str | None = None
    """As `master_port`."""
    local_addr: str | None = None
    event_log_handler: str = field(default="null", validator=_alone(_rules.text))
    numa_options: NumaOptions | None = field(default=None, converter=as_numa_options)
    """As in `LaunchConfig`, but None binds nothing."""
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
    exit_timeout: float | None = field(default=None, validator=_alone(optional(_rules.exit_timeout)), kw_only=True)
    """As in `LaunchConfig`."""
    main: Literal["import", "value"] | None = field(
        default=None, validator=_alone(optional(_rules.one_of(MAINS))), kw_only=True
    )
    """As in `LaunchConfig`."""

    def __attrs_post_init__(self) -> None:
        if self.fn is not None:
            warnings.warn("WorkerSpec.fn is deprecated: give entrypoint", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if self.entrypoint is None:
            raise SpecError("entrypoint=None: give a callable, a script's path or a program")

    def get_entrypoint_name(self) -> str:
        """The callable's qualified name, or the file name of the script or program."""
        return entrypoint_name(self.entrypoint)


def entrypoint_name(entrypoint: Entrypoint | None) -> str:
    """The name by which reports call *entrypoint*."""
    if isinstance(entrypoint, (str, os.PathLike)):
        return os.path.basename(os.fspath(entrypoint))
    return str(getattr(entrypoint, "__qualname__", None) or type(entrypoint).__qualname__)
