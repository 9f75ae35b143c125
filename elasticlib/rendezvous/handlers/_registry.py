"""
Handlers by the name of their backend: elasticlib's own, those that a program registers, those of
plug-ins.

Rules of this file: errors in the parameters of elasticlib's own backends are raised here, by
parameter name. Nothing is contacted. A plug-in is looked up when a handler is first made or asked
for, never at import. A broken plug-in costs one warning that names it, and nothing else.

(torch: ``torch.distributed.elastic.rendezvous.registry`` and ``static_tcp_rendezvous``)
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from attrs import evolve

from elasticlib._rules import is_unicode
from elasticlib.engines import scheduler_index
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import _rdzv_options
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._own_token import token_of
from elasticlib.rendezvous.handlers._base import RendezvousHandler, RendezvousParameters
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.net._endpoint import parse_rendezvous_endpoint, spell

RendezvousHandlerCreator: TypeAlias = Callable[[RendezvousParameters], RendezvousHandler]

PLUGINS = "torchrun.handlers"
"""Group of entry points; each is called without arguments and returns a `RendezvousHandlerCreator`."""
BUILT_IN = ("c10d", "static", "etcd", "etcd-v2", "etcd-v3")

_log = logging.getLogger("elasticlib")


def job_of(params: RendezvousParameters, backend: str, *, index: int | None = None) -> NodeJob:
    """
    Return the job of *params* with that *backend*; log a warning for each option without effect.
    """
    options = _rdzv_options.read(backend, params.config)
    for why in options.idle:
        _log.warning(why)
    return NodeJob.of(
        options,
        run_id=params.run_id,
        node=node_name(params.local_addr),
        backend=backend,
        endpoint=params.endpoint,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        wait_for=options.wait_for or "quiet",
        node_rank=options.rank if backend == "static" else index,
        local_addr=params.local_addr,
    )


def create_handler(params: RendezvousParameters) -> CoordinatedHandler:
    """
    Return the handler of *params* for one of elasticlib's own backends; nothing is contacted yet.

    Raises `ConfigError` for a value that breaks a rule; logs a warning for each option without
    effect.
    """
    job = job_of(params, params.backend, index=scheduler_index(os.environ))
    job = evolve(job, token=token_of(job, os.environ))
    if job.backend == "static":
        _check_static(params, job.node_rank)
    elif not params.run_id:
        raise ConfigError.of_setting(
            "run_id", f"{params.run_id!r}: nodes find each other by this id: give the same non-empty id on all nodes"
        )

    if not is_unicode(params.run_id):
        raise ConfigError.of_setting("run_id", f"{params.run_id!r} must be a string that can be encoded in UTF-8")

    return CoordinatedHandler(job)


def _check_static(params: RendezvousParameters, rank: int | None) -> None:
    if rank is None or not 0 <= rank < params.max_nodes:
        last = params.max_nodes - 1
        raise ConfigError(f"rank={rank}: with rdzv_backend='static' give each node a different rank, from 0 to {last}")
    # With two defaults: only a given port is the same twice.
    ports = {parse_rendezvous_endpoint(params.endpoint, default)[1] for default in (1, 2)}
    if not params.endpoint.strip() or len(ports) > 1 or ports == {0}:
        raise ConfigError(f"endpoint={params.endpoint!r}: rdzv_backend='static' needs host:port, such as node0:29500")


class StaticTCPRendezvous(CoordinatedHandler):
    """
    Node *rank* of *world_size* nodes; rank 0 hosts the store at *master_addr*:*master_port*.

    *timeout* is in seconds, for finding, connecting and ranks together.

    Differs from torch's: when one node calls `next_rendezvous` again, `num_nodes_waiting` is
    positive on the others, so that all can meet again. The keys of the round before are gone then.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: float
    ) -> None:
        endpoint = spell(master_addr, master_port)
        params = RendezvousParameters("static", endpoint, run_id, world_size, world_size, rank=rank, timeout=timeout)
        super().__init__(create_handler(params).job)


class RendezvousHandlerRegistry:
    """
    Creators of handlers by the name of their backend; with a *group*, those of its entry points too.

    (torch: ``torch.distributed.elastic.rendezvous.RendezvousHandlerRegistry``)
    """

    def __init__(self, group: str | None = None) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}
        self._group = group
        self._lock = threading.RLock()

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """
        Register *creator* for the handlers of *backend*. Raises `ConfigError` if the backend has
        another creator.
        """
        if not backend:
            raise ConfigError(f"backend={backend!r} is not a name for a rendezvous backend: give a non-empty string")
        with self._lock:
            # One step: if two threads register a name, one of them gets the error.
            known = self._creators.setdefault(backend, creator)
        if known != creator:
            raise ConfigError(
                f"backend={backend!r} is already registered, to {known!r}: register {creator!r} under another name"
            )

    def renew(self) -> None:
        """Replace the lock in a process that was just forked: another thread may have held it."""
        self._lock = threading.RLock()

    def names(self) -> tuple[str, ...]:
        """Return the backends that have a creator, including plug-ins."""
        self._load_plugins()
        return tuple(sorted(self._creators))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """
        Return a new handler of ``params.backend``.

        Raises `ConfigError` if the backend has no creator. Raises a ``RuntimeError`` if the
        handler is one of another backend, which is a mistake of the plug-in.
        """
        if params.backend not in self._creators:
            self._load_plugins()
        creator = self._creators.get(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._creators)) or "none"
            raise ConfigError.of_setting(
                "rdzv_backend",
                f"{params.backend!r} is not registered: give one of {known}, or install its plug-in "
                f"(entry-point group {PLUGINS})",
            )

        handler = creator(params)
        if (made := handler.get_backend()) != params.backend:
            raise RuntimeError(
                f"the creator of backend {params.backend!r} returned a handler whose get_backend() is {made!r}: "
                f"it must be {params.backend!r}"
            )

        return handler

    def _load_plugins(self) -> None:
        with self._lock:
            # Once, and before the look-up: a plug-in may use this registry while it loads.
            group, self._group = self._group, None
            if group is None:
                return
            for plugin in importlib.metadata.entry_points(group=group):
                try:
                    self.register(plugin.name, plugin.load()())
                except Exception as error:  # any exception of other people's code
                    reason = f"{type(error).__name__}: {error}"
                    _log.warning(
                        "rendezvous plug-in %r (%s) is ignored: %s", plugin.name, plugin.value, reason, exc_info=True
                    )


rendezvous_handler_registry = RendezvousHandlerRegistry(PLUGINS)
os.register_at_fork(after_in_child=rendezvous_handler_registry.renew)
for _name in BUILT_IN:
    rendezvous_handler_registry.register(_name, create_handler)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """
    Return the handler for *params*; nothing is contacted before its first use. Raises as
    `create_handler`.
    """
    return rendezvous_handler_registry.create_handler(params)
