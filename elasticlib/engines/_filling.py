"""
Options of a launch that nobody gave, from the context of its engine. Pure.

Rules of this file: a given option always wins, and a value is filled in only if the nodes get the
same one. Names and values are those of the command line's options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from attrs import evolve, frozen

from elasticlib._wording import counted
from elasticlib.engines._placement import EngineContext, engine_context, number_in
from elasticlib.errors import ConfigError
from elasticlib.spec import ALL_NODES, DEFAULT_RENDEZVOUS_TIMEOUT, LaunchConfig

_MEETINGS = frozenset({"rdzv_endpoint", "master_addr"})
"""Options that say where the nodes meet."""
_STATIC_OPTIONS = frozenset({"node_rank", "master_addr", "master_port"})
_WITH_ENDPOINT_HERE = frozenset({"c10d", "static"})
"""Backends whose store one of the nodes hosts."""
_WITH_SPARES = frozenset({"c10d", "etcd", "etcd-v2", "etcd-v3"})
"""Backends whose jobs may lose nodes. Others have another meaning of ``join_timeout=0``."""
_RECONNECT = 8
"""Seconds to find the store again where its host is not replaced: the allocation costs more than a short wait."""


@frozen
class Filling:
    """The values that an engine adds to a launch."""

    values: Mapping[str, Any] = {}
    """{name of an option: its value}."""
    context: EngineContext | None = None
    """The engine's description, from which they come; None if it adds nothing."""
    parts: tuple[str, ...] = ()
    """Texts for people about the values."""
    warnings: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The variable of the engine from which the values come."""
        return "" if self.context is None else self.context.source

    @property
    def notice(self) -> str:
        """One line that says what was filled in; empty if nothing was."""
        if self.context is None or not self.parts:
            return ""
        return f"{self.context.title}: {', '.join(self.parts)} (--engine none ignores {self.context.engine})"

    def joined(self, other: Filling) -> Filling:
        """Return the values of both."""
        return Filling(
            {**self.values, **other.values},
            self.context or other.context,
            (*self.parts, *other.parts),
            (*self.warnings, *other.warnings),
        )


def filling(
    context: EngineContext,
    values: Mapping[str, Any],
    given: Collection[str],
    reachable: Callable[[str], str] = str,
) -> Filling:
    """
    Return the values for the place of the nodes that *context* adds to a launch.

    *values* are those of all options, and *given* are the names of options that somebody gave. *reachable* returns an
    endpoint that this machine can resolve. Raises `ConfigError` if the engine started several agents on a node: each of
    them would count as a node.
    """
    if context.num_nodes is None or context.num_nodes == 1:
        return Filling()

    warnings = _warn_of_few_nodes(context, values["nnodes"][1], given)
    is_alone = "nnodes" in given and values["nnodes"][1] == 1
    added = {} if is_alone else _added(context, values, given)
    if not added:
        return Filling(warnings=warnings)

    _check_one_agent_each(context)
    if "rdzv_endpoint" in added:
        added["rdzv_endpoint"] = reachable(added["rdzv_endpoint"])
    return Filling(added, context, _parts(added), warnings)


def _added(context: EngineContext, values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    offered = _offered(context, values, given)
    return {
        name: value
        for name, value in offered.items()
        # Keys of the rendezvous are merged, so that an engine's stand beside given ones.
        if (name == "rdzv_conf" or name not in given) and value != values[name]
    }


def _offered(context: EngineContext, values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return all values that the engine has for these nodes, also of options that somebody gave."""
    backend = _backend(context, values, given)
    offered: dict[str, Any] = {"nnodes": (context.num_nodes, context.num_nodes), "rdzv_backend": backend}
    if backend == "static":
        offered["node_rank"] = context.node_rank

    meets_here = _meets_here(backend, values, given)
    has_same_id = meets_here or _is_id_of_all_nodes(context, backend)
    if meets_here:
        offered["rdzv_endpoint"] = _endpoint(context, values["master_port"])
    if has_same_id:
        offered["rdzv_id"] = context.run_id or values["rdzv_id"]

    conf: dict[str, Any] = {}
    if meets_here and backend == "c10d":
        # The node's own address may not be the endpoint's: it is one of several, or behind a name.
        conf["is_host"] = context.node_rank == 0
        if context.is_fixed:
            # The job ends with the node at the endpoint, and the engine brings no other one.
            conf["reconnect_timeout"] = _RECONNECT
    if has_same_id and _is_complete(context, backend, given):
        # No node replaces a lost one: the others decide at once.
        conf.update(_without_replacements(values["rdzv_conf"]))

    offered["rdzv_conf"] = {**conf, **values["rdzv_conf"]}
    return offered


def _is_complete(context: EngineContext, backend: str, given: Collection[str]) -> bool:
    """Return True if only nodes of the engine's job have its id, and none is added later."""
    if "rdzv_id" in given:
        return False
    return context.is_fixed and backend in _WITH_SPARES


def _without_replacements(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option by which no replacement is waited for, unless *conf* gives that time by its older name."""
    # A `LaunchConfig` has this timeout also if nobody gave one.
    timeout = conf.get("timeout", DEFAULT_RENDEZVOUS_TIMEOUT)
    if timeout != DEFAULT_RENDEZVOUS_TIMEOUT:
        return {}
    return {"join_timeout": 0}


def _backend(context: EngineContext, values: Mapping[str, Any], given: Collection[str]) -> str:
    # Without an option of it, static is only torchrun's default.
    is_given = "rdzv_backend" in given or not _STATIC_OPTIONS.isdisjoint(given)
    if is_given:
        return str(values["rdzv_backend"])
    return context.rdzv_backend


def _meets_here(backend: str, values: Mapping[str, Any], given: Collection[str]) -> bool:
    """Return True if the nodes meet at one of them, and nobody has said where."""
    is_given = bool(_MEETINGS.intersection(given))
    is_file = values["rdzv_conf"].get("store_type") == "file"
    return backend in _WITH_ENDPOINT_HERE and not is_given and not is_file


def _is_id_of_all_nodes(context: EngineContext, backend: str) -> bool:
    """Return True if the engine's id is right for nodes that meet where the user said."""
    # Nodes of two Slurm steps can meet at an endpoint, and their steps have different ids. On an etcd server other jobs
    # meet too, so that each needs an id.
    return context.engine == "trainjob" or backend not in _WITH_ENDPOINT_HERE


def _endpoint(context: EngineContext, given_port: int | None) -> str:
    host, _, port = context.rdzv_endpoint.rpartition(":")
    return f"{host}:{given_port or port}"


def _check_one_agent_each(context: EngineContext) -> None:
    if context.num_agents is not None and context.num_agents != context.num_nodes:
        raise ConfigError(
            f"{context.title} has {counted(context.num_agents, 'task')} on {counted(context.num_nodes or 0, 'node')}: "
            "start one task on each node (srun --ntasks-per-node=1), whose workers are those of its node; "
            "for a job of its own in each task give --standalone"
        )


def _warn_of_few_nodes(context: EngineContext, most: int, given: Collection[str]) -> tuple[str, ...]:
    nodes = context.num_nodes or 0
    is_fewer = "nnodes" in given and most < nodes
    # One node says it for all of them.
    if not is_fewer or context.node_rank != 0:
        return ()

    rest = f"{counted(nodes - most, 'node')} will wait as spares"
    is_alone = most == 1
    if is_alone:
        rest = "each node runs a job of its own"
    return (f"nnodes={most}, but {context.title} has {nodes} nodes: {rest}",)


def _parts(added: Mapping[str, Any]) -> tuple[str, ...]:
    least, most = added.get("nnodes", (0, 0))
    parts = (
        counted(most, "node") if least else "",
        f"endpoint {added['rdzv_endpoint']}" if "rdzv_endpoint" in added else "",
        f"id {added['rdzv_id']}" if "rdzv_id" in added else "",
    )
    return tuple(filter(None, parts))


# The end of a node.

_OF_THE_END = ("preempt_signal", "end_time", "shutdown_timeout")
"""Options of the end of a node, which are fields of the same names."""
END_MARGIN = 5.0
"""Seconds between the end of the workers and that of the launcher, which reports it."""
_ALWAYS_HANDLED = ("SIGUSR1", "SIGUSR2")
"""Signals that the launcher handles whatever its user lists: it passes them to the workers."""
_STOP_TIME = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable of torch's launcher, which gives the same as the option ``shutdown_timeout``."""


def ending(
    context: EngineContext,
    values: Mapping[str, Any],
    given: Collection[str],
    environ: Mapping[str, str],
    kill_wait: Callable[[], float | None] = lambda: None,
) -> Filling:
    """
    Return the values for the end of this node that *context* adds to a launch.

    *values* are those of all options, and *given* are the names of options that somebody gave. *kill_wait* returns the
    seconds from SIGTERM to SIGKILL in this Slurm.
    """
    announced = _handled_of(context.preempt_signal, values["signals_to_handle"])
    offered = {"preempt_signal": announced, "end_time": context.deadline}
    added = {name: value for name, value in offered.items() if value and name not in given}
    found = Filling(added, context)
    whole = _stop_time(context, kill_wait)
    if whole is None or _STOP_TIME in environ:
        return found

    left = max(whole - END_MARGIN, 0.0)
    if "shutdown_timeout" in given:
        return evolve(found, warnings=_warn_of_long_stop(context, values["shutdown_timeout"], whole, left))
    return Filling({**added, "shutdown_timeout": left}, context, (f"shutdown timeout {left:g} s",))


def _handled_of(announced: str, handled: str) -> str:
    """Return the signals *announced* by the engine that the launcher handles."""
    # A signal that the user keeps from the launcher announces nothing to it.
    received = {*map(str.strip, handled.split(",")), *_ALWAYS_HANDLED}
    return ",".join(name for name in announced.split(",") if name in received)


def _stop_time(context: EngineContext, kill_wait: Callable[[], float | None]) -> float | None:
    """Return the seconds from SIGTERM to SIGKILL; None if the engine sends no SIGKILL."""
    if context.engine == "slurm":
        return kill_wait() or context.grace
    return context.grace


def _warn_of_long_stop(context: EngineContext, given: float, whole: float, left: float) -> tuple[str, ...]:
    if given <= left or context.node_rank != 0:
        return ()
    return (
        f"shutdown_timeout={given:g}, but {context.title} kills all processes {whole:g} s after SIGTERM: "
        f"give {left:g} or less",
    )


# A configuration from Python.


def with_all_nodes(
    config: LaunchConfig,
    environ: Mapping[str, str],
    *,
    now: float,
    reachable: Callable[[str], str] = str,
    kill_wait: Callable[[], float | None] = lambda: None,
) -> tuple[LaunchConfig, Filling]:
    """
    Return *config* with numbers for ``min_nodes="all"``, and what its engine has filled in.

    Without an engine the job has this node only. Raises `ConfigError` if the engine does not say how many nodes there
    are, or has several for this one process.
    """
    if config.min_nodes != ALL_NODES:
        return config, Filling()

    context = engine_context(environ, now=now)
    if context is None:
        _check_alone(environ)
        return evolve(config, min_nodes=1, max_nodes=1), Filling()
    if context.num_nodes is None:
        raise ConfigError.of_setting("min_nodes", f"'all': {context.title} does not say how many: give a number")

    options, given = _options_of(config)
    found = filling(context, options, given, reachable).joined(ending(context, options, given, environ, kill_wait))
    values = found.values
    nodes = values["nnodes"][0] if "nnodes" in values else 1
    filled = evolve(
        config,
        min_nodes=nodes,
        max_nodes=nodes,
        run_id=values.get("rdzv_id", config.run_id),
        rdzv_backend=values.get("rdzv_backend", config.rdzv_backend),
        rdzv_endpoint=values.get("rdzv_endpoint", config.rdzv_endpoint),
        rdzv_configs=values.get("rdzv_conf", config.rdzv_configs),
        node_rank=values.get("node_rank", config.node_rank),
        **{name: values.get(name, getattr(config, name)) for name in _OF_THE_END},
    )
    return filled, found


def _options_of(config: LaunchConfig) -> tuple[dict[str, Any], set[str]]:
    """Return the values of the options that *config* stands for, and the names of those that it gives."""
    values = {
        "nnodes": (1, 1),
        "rdzv_backend": config.rdzv_backend,
        "rdzv_endpoint": config.rdzv_endpoint,
        "rdzv_id": config.run_id,
        "rdzv_conf": config.rdzv_configs,
        "node_rank": config.node_rank,
        "master_port": None,
        "signals_to_handle": config.signals_to_handle,
        **{name: getattr(config, name) for name in _OF_THE_END},
    }
    given = {name for name in ("rdzv_endpoint", "rdzv_id") if values[name]}
    if config.node_rank is not None:
        given.add("node_rank")
    given |= {name for name in _OF_THE_END if getattr(config, name) not in (None, "")}
    if config.rdzv_backend != "c10d":
        given.add("rdzv_backend")
    return values, given


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` in a Slurm job of several nodes in which no step has started this process on each."""
    nodes = number_in(environ, "SLURM_JOB_NUM_NODES") or 0
    is_worker = "TORCHELASTIC_RUN_ID" in environ
    if nodes > 1 and not is_worker:
        raise ConfigError.of_setting(
            "min_nodes",
            f"'all': the Slurm job has {nodes} nodes, but no step of srun is read here: start the program with "
            "srun --ntasks-per-node=1 from a batch script, or give min_nodes=1",
        )
