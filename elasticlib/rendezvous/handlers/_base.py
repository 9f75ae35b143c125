"""
The public rendezvous API, for code that calls it directly: handler, parameters, result.

Rules of this file: names, order of arguments and meaning are those of
``torch.distributed.elastic.rendezvous``. A bad value is a `ConfigError` (a ``ValueError``) that
names value, rule and fix. Only `RendezvousStoreInfo.build` communicates, through the store that it
is given.
"""

from __future__ import annotations

import abc
import socket
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, frozen

from elasticlib.errors import ConfigError, RendezvousStateError
from elasticlib.rendezvous._rdzv_options import NO, YES
from elasticlib.utils import get_free_port

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@define
class RendezvousStoreInfo:
    """Address of the store that the workers of a round use to set up their process group."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Store, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """
        Publish rank 0's address through *store*, and return it on all ranks; other ranks wait as
        long as *store* does.

        The address is *local_addr*, else this machine's name. The port is *server_port*, else one
        that was free a moment ago: to be sure of a port, bind it first and pass it. Raises
        `RendezvousStateError` when the store holds something else.
        """
        if rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, local_addr or socket.getfqdn())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or get_free_port()))

        addr, port = (
            bytes(store.get(key)) for key in (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)
        )
        try:
            return RendezvousStoreInfo(addr.decode(), int(port))
        except ValueError:
            raise RendezvousStateError(
                f"the store holds {addr[:80]!r} as MASTER_ADDR and {port[:80]!r} as MASTER_PORT, "
                "which are not a valid address and port"
            ) from None


@frozen
class RendezvousInfo:
    """One node's place in a round."""

    store: Store
    """A store that the nodes of this round share; its keys belong to the round alone."""
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo


class RendezvousHandler(abc.ABC):
    """
    A way for nodes to find each other; calls may block.

    (torch: ``torch.distributed.elastic.rendezvous.RendezvousHandler``)
    """

    @abc.abstractmethod
    def get_backend(self) -> str:
        """Return the name under which the backend is registered."""

    @property
    def use_agent_store(self) -> bool:
        """
        True if workers may use the store at the round's `bootstrap_store_info`, which lives with
        the agent.
        """
        return False

    @abc.abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """
        Wait for the next round and return this node's place in it.

        Raises:

        * `RendezvousClosedError` when the job is over
        * `RendezvousTimeoutError` when too few nodes came
        * `RendezvousConnectionError` when the store cannot be reached
        * `RendezvousStateError` when the store holds data that this job did not write
        * `RendezvousGracefulExitError` when this node was a spare and the job succeeded
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job is known to be over; other nodes may know earlier."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """
        Return the number of nodes that wait for a round.

        If it is above 0, stop the workers and call `next_rendezvous` again.
        """

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """Return the job's id."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Close the job and free all resources; return whether that worked."""


def check_nodes(min_nodes: Any, max_nodes: Any) -> None:
    """Raise `ConfigError` unless the numbers are a valid range of nodes."""
    for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
        # True is an int in Python, but not a number of nodes.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r} must be a whole number")
        if name == "min_nodes" and value < 1:
            raise ConfigError(f"min_nodes={value} must be at least 1")
    if max_nodes < min_nodes:
        raise ConfigError(f"max_nodes={max_nodes} is below min_nodes={min_nodes}: raise max_nodes")


class RendezvousParameters:
    """
    Parameters of a handler; the keywords are the backend's own options (``--rdzv-conf``).

    Raises `ConfigError` for an empty *backend*, invalid numbers of nodes, ``min_nodes < 1`` and
    ``max_nodes < min_nodes``.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ConfigError(f"backend={backend!r} is not the name of a rendezvous backend: give one, such as 'c10d'")

        check_nodes(min_nodes, max_nodes)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def __repr__(self) -> str:
        nodes = f"{self.min_nodes}:{self.max_nodes}"
        return f"RendezvousParameters({self.backend!r}, {self.endpoint!r}, run_id={self.run_id!r}, nodes={nodes})"

    def get(self, key: str, default: Any = None) -> Any:
        """Return the option *key*, else *default*."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the option *key* as yes or no, also from a number or a word; else *default*."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).strip().lower() if isinstance(value, (int, str)) else ""
        if text not in YES | NO:
            raise ConfigError(f"{key}={value!r} is neither yes nor no: give 1, true, t, yes, y or 0, false, f, no, n")
        return text in YES

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the option *key* as a whole number; else *default*."""
        value = self.get(key, default)
        if value is None:
            return value
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{key}={value!r} must be a whole number") from None
