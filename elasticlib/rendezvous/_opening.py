"""
The rendezvous of a launch: chosen for this machine, and open while the launch runs.

Rules of this file: it reads the environment and the machine, so that `_choice` stays pure. Back
ends are imported only when they are opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterable, Iterator

from attrs import evolve

from elasticlib._clock import wall_time
from elasticlib.engines import EngineContext, engine_context, scheduler_index
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import _choice
from elasticlib.rendezvous._choice import Choice, PlugIn, Private
from elasticlib.rendezvous._membership import Requests
from elasticlib.rendezvous._names import host_name, node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._own_token import token_of
from elasticlib.rendezvous._rdzv_options import ETCD_BACKENDS
from elasticlib.spec import TOKEN_VARIABLE, LaunchConfig

_log = logging.getLogger("elasticlib")


def choose_rendezvous(config: LaunchConfig, *, work: str, command: str) -> Choice:
    """Return the rendezvous that *config* means on this machine; log hints for its user."""
    choice, warnings = _choice.choose(
        config,
        node=node_name(config.local_addr),
        fresh_id=uuid.uuid4().hex,
        token=config.token or os.environ.get(TOKEN_VARIABLE) or None,
        index=scheduler_index(os.environ),
    )
    if not isinstance(choice, NodeJob):
        _log_all(warnings)
        return choice

    # Before the warnings: one of them would say that the local server is used.
    has_endpoint = bool(config.rdzv_endpoint.strip())
    if choice.backend in ETCD_BACKENDS and not has_endpoint:
        _find_local_etcd(choice)
    _log_all(warnings)
    context = _engine_context()
    has_engines_id = context.run_id == choice.run_id
    return evolve(
        choice,
        work=work,
        command=command,
        token=token_of(choice, os.environ),
        hosts=list(context.hosts if has_engines_id else ()),
        ends_together=context.ends_together,
    )


def check_for_engine(config: LaunchConfig, nodes: int) -> None:
    """Raise `ConfigError` for settings that no node of a job of *nodes*, which an engine starts, could use."""
    # An id and an endpoint in the place of those that the engine gives; other backends are refused with it.
    complete = evolve(
        config,
        min_nodes=nodes,
        max_nodes=nodes,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:29400",
    )
    _choice.choose(complete, node="node", fresh_id="job", token=None, index=None)


def _engine_context() -> EngineContext:
    """Return the engine's context of this process; an empty one without an engine."""
    try:
        found = engine_context(os.environ, now=wall_time())
    except ConfigError:
        # This job was configured without the engine.
        found = None
    return found or EngineContext("none")


def _log_all(warnings: Iterable[str]) -> None:
    for warning in warnings:
        _log.warning(warning)


def _find_local_etcd(job: NodeJob) -> None:
    """
    Raise `ConfigError` unless a server listens at the default endpoint: without one no node would
    come.
    """
    # Only here: most launches need none.
    import socket

    host, _, port = job.endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError.of_setting(
            "rdzv_endpoint",
            f"'': rdzv_backend={job.backend!r} needs an etcd server, but none answers at the default address "
            f"{job.endpoint} ({error}): give the server's address, such as node0:2379",
        ) from error


@contextlib.contextmanager
def opened_rendezvous(choice: Choice, config: LaunchConfig, requests: Requests) -> Iterator[object]:
    """Open the rendezvous of *choice* for the length of the block; see `open_remote` for *requests*."""
    # Imported only now, while the fork server is at its own imports.
    from elasticlib.rendezvous import Rules, open_local, open_remote

    match choice:
        case Private(run_id, backend, port):
            rules = Rules(1, 1, config.max_restarts)
            with open_local(run_id, rules, backend=backend, node=host_name(config.local_addr), port=port) as rendezvous:
                yield rendezvous
        case NodeJob():
            with open_remote(choice, requests) as rendezvous:
                yield rendezvous
        case PlugIn(run_id, backend):
            from elasticlib.rendezvous.handlers._base import RendezvousParameters
            from elasticlib.rendezvous.handlers._registry import get_rendezvous_handler

            yield get_rendezvous_handler(
                RendezvousParameters(
                    backend,
                    config.rdzv_endpoint,
                    run_id,
                    int(config.min_nodes),
                    config.max_nodes,
                    config.local_addr or None,
                    **config.rdzv_configs,
                )
            )
