"""
Which handler a back end's name stands for: our own, those that a program registers, those of plug-ins.

Rules of this file: a plug-in is looked up when a handler is first made or asked for, never at import; one that
is broken costs one warning that names it, and nothing else.

(torch: ``torch.distributed.elastic.rendezvous.registry``)
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.handlers._base import RendezvousHandler, RendezvousParameters
from elasticlib.rendezvous.handlers._own import create_handler

RendezvousHandlerCreator: TypeAlias = Callable[[RendezvousParameters], RendezvousHandler]

PLUGINS = "torchrun.handlers"
"""Group of entry points; each is called without arguments and returns a `RendezvousHandlerCreator`."""
BUILT_IN = ("c10d", "static", "etcd", "etcd-v2", "etcd-v3")

_log = logging.getLogger(__name__)


class RendezvousHandlerRegistry:
    """
    Creators of handlers by the name of their back end; with a *group*, those of its entry points too.

    (torch: ``torch.distributed.elastic.rendezvous.RendezvousHandlerRegistry``)
    """

    def __init__(self, group: str | None = None) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}
        self._group = group
        self._lock = threading.RLock()

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Let *creator* make the handlers of *backend*. Raises `ConfigError` when another one does already."""
        if not backend:
            raise ConfigError(f"backend={backend!r} is no name for a rendezvous back end")
        with self._lock:
            known = self._creators.setdefault(backend, creator)
        if known != creator:
            raise ConfigError(
                f"backend={backend!r} is made by {known!r} already: register {creator!r} under another name"
            )

    def names(self) -> tuple[str, ...]:
        """The back ends that have a creator, plug-ins among them."""
        self._load_plugins()
        return tuple(sorted(self._creators))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """
        A new handler of ``params.backend``.

        Raises `ConfigError` when nobody makes such handlers, and a ``RuntimeError`` when the handler made is one
        of another back end: a mistake of the plug-in.
        """
        if params.backend not in self._creators:
            self._load_plugins()
        creator = self._creators.get(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._creators)) or "none"
            raise ConfigError(
                f"rdzv_backend={params.backend!r} is not registered: give one of {known}, or install the plug-in "
                f"that has it (entry-point group {PLUGINS})"
            )
        handler = creator(params)
        if (made := handler.get_backend()) != params.backend:
            raise RuntimeError(f"the creator of back end {params.backend!r} made a handler that calls itself {made!r}")
        return handler

    def _load_plugins(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            for plugin in importlib.metadata.entry_points(group=group):
                try:
                    self.register(plugin.name, plugin.load()())
                except Exception as error:  # whatever somebody else's code raises
                    reason = f"{type(error).__name__}: {error}"
                    _log.warning(
                        "rendezvous plug-in %r (%s) is left out: %s", plugin.name, plugin.value, reason, exc_info=True
                    )


rendezvous_handler_registry = RendezvousHandlerRegistry(PLUGINS)
for _name in BUILT_IN:
    rendezvous_handler_registry.register(_name, create_handler)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler that *params* ask for; nothing is contacted before its first use. Raises as `create_handler`."""
    return rendezvous_handler_registry.create_handler(params)
