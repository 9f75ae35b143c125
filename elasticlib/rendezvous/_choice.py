"""
Which rendezvous a launch means: one of its own, a place in a job of several nodes, or someone else's handler. Pure.

Rules of this file: it decides and names contradictions; it opens nothing, and what a user should hear
without being stopped is returned, not printed. What torch takes, and could have worked, stops nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from elasticlib._wording import counted
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import _options
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous.net._endpoint import address_of, parse_rendezvous_endpoint
from elasticlib.spec import LaunchConfig

DEFAULT_RUN_ID = "none"
"""What the command line calls a job that was given no name."""

_LOCAL_ENDPOINTS = {"c10d": "localhost:29400", **dict.fromkeys(_options.ETCD_BACKENDS, "localhost:2379")}
"""What no endpoint means, by back end, for more than one node."""

_SCHEDULERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    ("JOB_COMPLETION_INDEX", ""),
)
"""Where schedulers leave a task's place and, where they do, the number of tasks."""


@frozen
class Private:
    """A rendezvous of this launch with itself: no other node can join."""

    run_id: str
    backend: str
    port: int = 0
    """Port of the workers' store; 0 takes a free one."""


@frozen
class PlugIn:
    """A rendezvous whose handler the registry makes."""

    run_id: str
    backend: str


Choice: TypeAlias = Private | PlugIn | Job


def scheduler_index(environ: Mapping[str, str]) -> int | None:
    """This node's place as its scheduler numbers it; None where none does, or where there is one task only."""
    for place, size in _SCHEDULERS:
        index, tasks = environ.get(place, ""), environ.get(size, "") if size else "2"
        if index.isdecimal() and tasks.isdecimal() and int(tasks) > 1:
            return int(index)
    return None


def choose(
    config: LaunchConfig, *, node: str, fresh_id: str, token: str | None, index: int | None
) -> tuple[Choice, tuple[str, ...]]:
    """
    What *config* means, and warnings for its user.

    *node* is this node's name in a job, *fresh_id* the id of a job that was given none, *index* the
    scheduler's number for this node. Raises `ConfigError` for what contradicts itself or cannot be found.
    """
    if config.local_addr and not _is_host(config.local_addr):
        raise ConfigError.of_setting(
            "local_addr", f"{config.local_addr!r} must be a host's name or address, without a port"
        )
    if config.rdzv_backend not in _options.ALL:
        return _plug_in(config, fresh_id, token)
    options = _options.read(config.rdzv_backend, config.rdzv_configs)
    static = config.rdzv_backend == "static"
    rank, differing = _node_rank(config, options) if static else (None, ())
    warnings = options.idle + _unused(config) + differing
    private = _private(config, options, fresh_id)
    if private is not None:
        if config.max_nodes > 1:
            place = "on a free port, where" if config.rdzv_endpoint.strip() else "a file of this node alone, so that"
            warnings += (
                f"rdzv_endpoint={config.rdzv_endpoint!r} is {place} no other node can find it: "
                f"this job stays at one node of max_nodes={config.max_nodes}; give host:port to let others join",
            )
        return private, warnings
    if static and rank is None:
        last = config.max_nodes - 1
        raise ConfigError.of_setting(
            "node_rank", f"None: with rdzv_backend='static' each node needs its own, from 0 to {last}"
        )
    run_id, more = _run_id(config, fresh_id)
    if static and config.min_nodes != config.max_nodes:
        more += (
            f"min_nodes={config.min_nodes} is ignored: with rdzv_backend='static' the number of nodes is fixed, "
            f"max_nodes={config.max_nodes} are waited for; rdzv_backend='c10d' starts with fewer",
        )
    endpoint = config.rdzv_endpoint
    if not endpoint.strip() and config.rdzv_backend in _LOCAL_ENDPOINTS:
        endpoint = _LOCAL_ENDPOINTS[config.rdzv_backend]
        more += (f"rdzv_endpoint='' means {endpoint}: only nodes on this machine can join",)
    job = Job.of(
        options,
        run_id=run_id,
        node=node,
        backend=config.rdzv_backend,
        endpoint=endpoint,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        wait_for=_wait_for(config, options),
        node_rank=rank if static else index,
        is_scheduled=rank is not None and rank == index,
        token=token,
        local_addr=config.local_addr or None,
        max_restarts=config.max_restarts,
    )
    return job, warnings + more


def _is_host(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+", text)) or address_of(text) is not None


def _plug_in(config: LaunchConfig, fresh_id: str, token: str | None) -> tuple[PlugIn, tuple[str, ...]]:
    if token is not None:
        raise ConfigError(
            f"token is given, but rdzv_backend={config.rdzv_backend!r} does not support a token: "
            "leave it (or the variable ELASTICLIB_TOKEN) out, or take c10d, static or etcd"
        )
    warnings = _unused(config)
    if config.wait_for != "quiet":
        warnings += (f"wait_for={config.wait_for!r} has no effect with rdzv_backend={config.rdzv_backend!r}",)
    run_id, more = _run_id(config, fresh_id)
    return PlugIn(run_id, config.rdzv_backend), warnings + more


def _unused(config: LaunchConfig) -> tuple[str, ...]:
    if config.node_rank is None or config.rdzv_backend == "static":
        return ()
    return (
        f"node_rank={config.node_rank} is ignored: with rdzv_backend={config.rdzv_backend!r} "
        "the nodes agree on ranks by themselves",
    )


def _private(config: LaunchConfig, options: _options.Options, fresh_id: str) -> Private | None:
    """The launch's own rendezvous, if it needs no other node's; checks the endpoint on the way."""
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint.strip()
    run_id, in_file = config.run_id or fresh_id, options.store_type == "file"
    if backend in _options.ETCD_BACKENDS or (endpoint and in_file):
        return None
    if not endpoint:
        if config.max_nodes == 1 or (in_file and config.min_nodes == 1):
            return Private(run_id, backend)
        if backend == "static" or in_file:
            what, example = "host:port", "node0:29500"
            if in_file:
                what, example = "the path of a file that all see", "/shared/job"
            raise ConfigError.of_setting(
                "rdzv_endpoint",
                f"'': {config.max_nodes} nodes need a common endpoint: give the same {what} "
                f"on all of them, such as {example}",
            )
        return None
    _, port = parse_rendezvous_endpoint(endpoint, 29400)
    if port == 0:
        if config.min_nodes > 1:
            raise ConfigError.of_setting(
                "rdzv_endpoint",
                f"{endpoint!r} is on a free port, where no other node can find it, "
                f"but min_nodes={config.min_nodes}: give a port, the same on all nodes",
            )
        return Private(run_id, backend)
    if backend != "static":
        return None
    if port != parse_rendezvous_endpoint(endpoint, 29401)[1]:
        raise ConfigError.of_setting("rdzv_endpoint", f"{endpoint!r} has no port: give host:port, such as node0:29500")
    return Private(run_id, backend, port) if config.max_nodes == 1 else None


def _node_rank(config: LaunchConfig, options: _options.Options) -> tuple[int | None, tuple[str, ...]]:
    """The fixed place of this node, in range, None when none was given; and warnings."""
    rank = options.rank if config.node_rank is None else config.node_rank
    if rank is not None and rank >= config.max_nodes:
        raise ConfigError.of_setting(
            "node_rank",
            f"{rank} is out of range for {counted(config.max_nodes, 'node')}: "
            f"give a number from 0 to {config.max_nodes - 1}",
        )
    if options.rank is not None and rank != options.rank:
        return rank, (f"rdzv_configs={{'rank': {options.rank}}} is ignored: node_rank={rank} is used",)
    return rank, ()


def _run_id(config: LaunchConfig, fresh_id: str) -> tuple[str, tuple[str, ...]]:
    if not config.run_id:
        if config.min_nodes > 1 or (config.rdzv_backend == "static" and config.max_nodes > 1):
            raise ConfigError.of_setting(
                "run_id", "'': nodes find each other's job by its id: give the same one on all of them"
            )
        return fresh_id, (f"run_id is empty: this job is called {fresh_id}, so no other node can join it",)
    if config.run_id == DEFAULT_RUN_ID and config.max_nodes > 1 and config.rdzv_backend != "static":
        return config.run_id, (
            f"run_id={DEFAULT_RUN_ID!r}: jobs with the same id and endpoint are one job; "
            "give each job an id of its own (rdzv_id)",
        )
    return config.run_id, ()


def _wait_for(config: LaunchConfig, options: _options.Options) -> str:
    if options.wait_for is None:
        return config.wait_for
    if config.wait_for not in ("quiet", options.wait_for):
        raise ConfigError.of_setting(
            "wait_for",
            f"{config.wait_for!r} and rdzv_configs['wait_for']={options.wait_for!r} differ: give one of them",
        )
    return options.wait_for
