"""
The rendezvous that a launch means: private, shared by several nodes, or a third-party handler.
Pure.

Rules of this file: it decides and reports contradictions, and opens nothing. Hints that do not stop
the launch are returned, not printed. A setting that torch accepts, and that could have worked, is
not an error.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from elasticlib._wording import counted
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import _rdzv_options
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._endpoint import is_host, parse_rendezvous_endpoint
from elasticlib.spec import DEFAULT_PORT, LaunchConfig

DEFAULT_RUN_ID = "none"
"""Id of a job without a name on the command line."""

_LOCAL_ENDPOINTS = {"c10d": f"localhost:{DEFAULT_PORT}", **dict.fromkeys(_rdzv_options.ETCD_BACKENDS, "localhost:2379")}
"""Default endpoint by backend, for more than one node."""


@frozen
class Private:
    """A rendezvous of this launch with itself: no other node can join."""

    run_id: str
    backend: str
    port: int = 0
    """Port of the workers' store; 0 takes a free one."""


@frozen
class PlugIn:
    """A rendezvous whose handler comes from the registry."""

    run_id: str
    backend: str


Choice: TypeAlias = Private | PlugIn | NodeJob
_Warnings: TypeAlias = tuple[str, ...]


def choose(
    config: LaunchConfig, *, node: str, fresh_id: str, token: str | None, index: int | None
) -> tuple[Choice, _Warnings]:
    """
    Return the rendezvous that *config* means, and warnings for its user.

    *node* is this node's name in a job, *fresh_id* the id of a job without one, *index* the
    scheduler's number for this node. Raises `ConfigError` for settings that contradict each other,
    or that cannot work.
    """
    _check_local_addr(config)
    if config.rdzv_backend not in _rdzv_options.ALL:
        return _plug_in(config, fresh_id, token)

    options = _rdzv_options.read(config.rdzv_backend, config.rdzv_configs)
    is_static = config.rdzv_backend == "static"
    rank, rank_warnings = _node_rank(config, options) if is_static else (None, ())
    warnings = options.idle + _unused(config) + rank_warnings

    # First, since a launch that needs no other node needs neither an id nor an endpoint.
    private = _private(config, options, fresh_id)
    if private is not None:
        return private, warnings + _warn_of_one_node(config)

    if is_static:
        _check_rank_is_given(config, rank)
    run_id, id_warnings = _run_id(config, fresh_id)
    endpoint, endpoint_warnings = _endpoint(config)
    job = NodeJob.of(
        options,
        run_id=run_id,
        node=node,
        backend=config.rdzv_backend,
        endpoint=endpoint,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        wait_for=_wait_for(config, options),
        node_rank=rank if is_static else index,
        is_scheduled=rank is not None and rank == index,
        token=token,
        local_addr=config.local_addr or None,
        max_restarts=config.max_restarts,
    )
    return job, warnings + id_warnings + _warn_of_min_nodes(config) + endpoint_warnings


def _check_local_addr(config: LaunchConfig) -> None:
    if config.local_addr and not is_host(config.local_addr):
        raise ConfigError.of_setting(
            "local_addr", f"{config.local_addr!r} must be a host's name or address, without a port"
        )


def _check_rank_is_given(config: LaunchConfig, rank: int | None) -> None:
    if rank is None:
        last = config.max_nodes - 1
        raise ConfigError.of_setting(
            "node_rank", f"None: with rdzv_backend='static' give each node a different rank, from 0 to {last}"
        )


def _warn_of_one_node(config: LaunchConfig) -> _Warnings:
    """
    Warn that a launch with a private rendezvous could have several nodes by its configuration.
    """
    if config.max_nodes == 1:
        return ()
    place = "a free port" if config.rdzv_endpoint.strip() else "a file on this node"
    return (
        f"rdzv_endpoint={config.rdzv_endpoint!r} means {place}, which no other node can find: "
        f"this job stays at one node of max_nodes={config.max_nodes}; give host:port to let others join",
    )


def _warn_of_min_nodes(config: LaunchConfig) -> _Warnings:
    if config.rdzv_backend != "static" or config.min_nodes == config.max_nodes:
        return ()
    return (
        f"min_nodes={config.min_nodes} is ignored: with rdzv_backend='static' the number of nodes is fixed "
        f"(max_nodes={config.max_nodes}); rdzv_backend='c10d' starts with fewer",
    )


def _endpoint(config: LaunchConfig) -> tuple[str, _Warnings]:
    local = _LOCAL_ENDPOINTS.get(config.rdzv_backend)
    if config.rdzv_endpoint.strip() or local is None:
        return config.rdzv_endpoint, ()
    return local, (f"rdzv_endpoint='' means {local}: only nodes on this machine can join",)


def _plug_in(config: LaunchConfig, fresh_id: str, token: str | None) -> tuple[PlugIn, _Warnings]:
    if token is not None:
        raise ConfigError(
            f"rdzv_backend={config.rdzv_backend!r} does not support a token: leave token out and unset "
            "ELASTICLIB_TOKEN, or use c10d, static or etcd"
        )

    warnings = _unused(config)
    if config.wait_for != "quiet":
        warnings += (f"wait_for={config.wait_for!r} has no effect with rdzv_backend={config.rdzv_backend!r}",)
    run_id, id_warnings = _run_id(config, fresh_id)
    return PlugIn(run_id, config.rdzv_backend), warnings + id_warnings


def _unused(config: LaunchConfig) -> _Warnings:
    if config.node_rank is None or config.rdzv_backend == "static":
        return ()
    return (
        f"node_rank={config.node_rank} is ignored: with rdzv_backend={config.rdzv_backend!r} the nodes agree on ranks",
    )


def _private(config: LaunchConfig, options: _rdzv_options.Options, fresh_id: str) -> Private | None:
    """
    Return the launch's private rendezvous if it needs no other node; check the endpoint on the way.
    """
    if config.rdzv_backend in _rdzv_options.ETCD_BACKENDS:
        return None  # other nodes use the server, too

    run_id = config.run_id or fresh_id
    is_in_file = options.store_type == "file"
    endpoint = config.rdzv_endpoint.strip()
    if not endpoint:
        return _private_without_endpoint(config, run_id, is_in_file)
    if is_in_file:
        return None  # every process that sees the file can join

    return _private_at_endpoint(config, run_id, endpoint)


def _private_without_endpoint(config: LaunchConfig, run_id: str, is_in_file: bool) -> Private | None:
    may_be_alone = config.max_nodes == 1 or (is_in_file and config.min_nodes == 1)
    if may_be_alone:
        return Private(run_id, config.rdzv_backend)
    if is_in_file:
        raise _no_common_endpoint(config, "path of a file that all nodes see", "/shared/job")
    if config.rdzv_backend == "static":
        raise _no_common_endpoint(config, "host:port", "node0:29500")
    return None  # an endpoint of this machine is meant, see `_LOCAL_ENDPOINTS`


def _no_common_endpoint(config: LaunchConfig, kind: str, example: str) -> ConfigError:
    return ConfigError.of_setting(
        "rdzv_endpoint",
        f"'': {config.max_nodes} nodes need a common endpoint: give the same {kind} on all of them, such as {example}",
    )


def _private_at_endpoint(config: LaunchConfig, run_id: str, endpoint: str) -> Private | None:
    backend = config.rdzv_backend
    _, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    if port == 0:
        _check_nobody_looks_for(config, endpoint)
        return Private(run_id, backend)

    if backend != "static":
        return None  # the store is at the given port for any number of nodes

    # A given port stays the same with another default.
    has_port = port == parse_rendezvous_endpoint(endpoint, 29401)[1]
    if not has_port:
        raise ConfigError.of_setting("rdzv_endpoint", f"{endpoint!r} has no port: give host:port, such as node0:29500")
    if config.max_nodes == 1:
        return Private(run_id, backend, port)

    return None


def _check_nobody_looks_for(config: LaunchConfig, endpoint: str) -> None:
    if config.min_nodes != 1:
        raise ConfigError.of_setting(
            "rdzv_endpoint",
            f"{endpoint!r} means any free port, which the other nodes cannot know, "
            f"but min_nodes={config.min_nodes}: give the same port on all nodes",
        )


def _node_rank(config: LaunchConfig, options: _rdzv_options.Options) -> tuple[int | None, _Warnings]:
    """Return the fixed place of this node, in range, or None if none was given; and warnings."""
    rank = options.rank if config.node_rank is None else config.node_rank
    if rank is None:
        return None, ()

    if rank >= config.max_nodes:
        raise ConfigError.of_setting(
            "node_rank",
            f"{rank} is out of range for {counted(config.max_nodes, 'node')}: "
            f"give a number from 0 to {config.max_nodes - 1}",
        )

    if options.rank is None or options.rank == rank:
        return rank, ()

    return rank, (f"rdzv_configs={{'rank': {options.rank}}} is ignored: node_rank={rank} is used",)


def _run_id(config: LaunchConfig, fresh_id: str) -> tuple[str, _Warnings]:
    is_static = config.rdzv_backend == "static"
    if not config.run_id:
        needs_others = config.min_nodes != 1 or (is_static and config.max_nodes > 1)
        if needs_others:
            raise ConfigError.of_setting(
                "run_id", "'': nodes find each other by this id: give the same non-empty id on all nodes"
            )
        return fresh_id, (f"run_id is empty: this job gets the id {fresh_id}, so no other node can join it",)

    # The endpoint identifies a static job: torch's commands for it leave the id out.
    may_be_joined = config.max_nodes > 1 and not is_static
    if may_be_joined and config.run_id == DEFAULT_RUN_ID:
        return config.run_id, (
            f"run_id={DEFAULT_RUN_ID!r}: launches with the same id and endpoint join one job; give each job "
            "its own id (rdzv_id)",
        )

    return config.run_id, ()


def _wait_for(config: LaunchConfig, options: _rdzv_options.Options) -> str:
    if options.wait_for is None:
        return config.wait_for
    # "quiet" is the default: it does not show that anybody asked for it.
    if config.wait_for not in ("quiet", options.wait_for):
        raise ConfigError.of_setting(
            "wait_for",
            f"{config.wait_for!r} and rdzv_configs['wait_for']={options.wait_for!r} differ: give one of them",
        )
    return options.wait_for
