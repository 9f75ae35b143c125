"""Nodes of a Ray cluster: Ray places one agent in each bundle of a placement group."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from elasticlib.engines._kept_agents import KeepsAgents
from elasticlib.engines._protocol import AgentCommand, Placement
from elasticlib.engines._ray_placement import (
    AgentPlaces,
    RayPlacement,
    RendezvousServer,
    ray_module,
    reason,
    start_server,
)
from elasticlib.errors import ConfigError, StartError

_connecting = threading.Lock()
"""Held while a thread connects this program to a cluster."""


class Ray(KeepsAgents):
    """
    Nodes of a Ray cluster, with one agent each.

    *nodes* is their number, and *bundle* has the resources of each, such as ``{"GPU": 8, "CPU": 16}`` (None: one CPU).
    ``LaunchConfig(nproc_per_node="auto")`` starts a worker for each GPU of the bundle, else for each CPU.
    *placement_group* is one of yours, whose first *nodes* bundles get the agents; None: a group that puts each bundle
    on a node of its own, and ends with the call.

    The call connects to the cluster of ``RAY_ADDRESS`` or of this machine, unless the program has called ``ray.init``.
    Ray's head node hosts the rendezvous, from the first call until the program, or the block, ends.

    ``with Ray(nodes=3) as cluster:`` keeps the nodes, with what is imported on them, until the end of the block. It
    allows one call at a time.
    """

    def __init__(
        self, nodes: int, bundle: Mapping[str, float] | None = None, placement_group: Any | None = None
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the package ray is not installed: pip install ray")
        if type(nodes) is not int or nodes < 1:
            raise ConfigError.of_setting("nodes", f"{nodes!r} must be a whole number of at least 1")
        if bundle is not None and placement_group is not None:
            raise ConfigError.of_setting(
                "bundle",
                f"{bundle!r} cannot be combined with placement_group, which has bundles: leave one out",
            )
        self.nodes = nodes
        self.placement_group = placement_group
        self.bundles = _bundles_of(placement_group, nodes) if placement_group else [_checked(bundle)] * nodes
        self.token = secrets.token_hex(16)
        """Token of all jobs of this engine: their rendezvous is one server."""
        self._server: RendezvousServer | None = None
        self._lock = threading.Lock()
        """Held while the server starts: several threads may make calls."""

    def __repr__(self) -> str:
        return f"Ray(nodes={self.nodes})"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.end()

    @property
    def endpoint(self) -> str:
        """Endpoint of the rendezvous on Ray's head node; "" before the first call."""
        return "" if self._server is None else self._server.endpoint

    def place(self, agents: int, command: AgentCommand) -> Placement:
        """Start *command* in the first *agents* bundles, or let the kept agents run it."""
        _connect()
        return super().place(agents, command)

    def is_in_contact(self) -> bool:
        """Return True if this program is connected as it was when its agents were started, and they can meet."""
        return self._server is not None and self._server.is_usable()

    def start(self, agents: int, command: AgentCommand) -> RayPlacement:
        """Start *command* in the first *agents* bundles."""
        places = self._places(agents)
        placement = RayPlacement(places, command, lambda: _remove(places))
        try:
            # Ray starts the agents meanwhile.
            placement.depend_on(self._running_server())
        except BaseException:
            placement.close()
            raise
        return placement

    def _places(self, agents: int) -> AgentPlaces:
        bundles = self.bundles[:agents]
        if self.placement_group is not None:
            return AgentPlaces(self.placement_group, bundles, is_own=False)
        group = ray_module("ray.util").placement_group([dict(each) for each in bundles], strategy="STRICT_SPREAD")
        return AgentPlaces(group, bundles, is_own=True)

    def _running_server(self) -> RendezvousServer:
        with self._lock:
            if self._server is None or not self._server.is_usable():
                self._server = start_server(self.token)
            return self._server


def _checked(bundle: Mapping[str, float] | None) -> dict[str, float]:
    if bundle is None:
        return {"CPU": 1}
    if not isinstance(bundle, Mapping) or not bundle:
        raise ConfigError.of_setting("bundle", f"{bundle!r} must have the resources of a node, such as {{'GPU': 8}}")

    wrong = [f"{name}: {count!r}" for name, count in bundle.items() if not _is_amount(count)]
    if wrong:
        raise ConfigError.of_setting("bundle", f"{wrong[0]} must be a number above 0")

    _check_gpus(bundle.get("GPU", 0))
    return dict(bundle)


def _check_gpus(count: float) -> None:
    if count % 1:
        raise ConfigError.of_setting("bundle", f"GPU: {count!r} must be a whole number: a worker has one GPU")


def _is_amount(count: Any) -> bool:
    return isinstance(count, (int, float)) and not isinstance(count, bool) and 0 < count < math.inf


def _bundles_of(group: Any, nodes: int) -> Sequence[Mapping[str, float]]:
    """Return the bundles of a placement group for *nodes* agents."""
    bundles = getattr(group, "bundle_specs", None)
    if bundles is None:
        raise ConfigError.of_setting("placement_group", f"{group!r} is not one of ray.util.placement_group")
    if len(bundles) < nodes:
        raise ConfigError.of_setting("placement_group", f"it has {len(bundles)} bundles for {nodes} nodes: add some")
    return [_checked(each) for each in bundles[:nodes]]


def _connect() -> None:
    """Connect to the cluster, unless this program is connected. Raises `StartError`."""
    ray = ray_module()
    # Ray fails if two threads connect at the same time.
    with _connecting:
        if ray.is_initialized():
            return
        try:
            ray.init(address="auto", logging_level=logging.WARNING)
        except ConnectionError as error:
            raise StartError(
                f"no Ray cluster is reachable ({reason(error)}): start one with `ray start --head`, or set RAY_ADDRESS"
            ) from error
        except RuntimeError as error:
            raise StartError(f"cannot connect to the Ray cluster: {reason(error)}") from error


def _remove(places: AgentPlaces) -> None:
    if places.is_own:
        with contextlib.suppress(Exception):
            ray_module("ray.util").remove_placement_group(places.group)
