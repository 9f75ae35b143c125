"""
How one node takes part in a job's rendezvous: plain data, checked, ready to be sent to another process.

Rules of this file: data only; `_options` made the numbers, a back end reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, asdict, field, frozen

from elasticlib.rendezvous._options import STORE_LINGER, Options
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._messages import Terms


@frozen(kw_only=True)
class Job:
    """One node's part in one job."""

    run_id: str
    node: str
    """Name of this node in the job, unlike that of any other: host, process and a random part."""
    backend: str
    """``c10d``, ``static``, ``etcd``, ``etcd-v2`` or ``etcd-v3``."""
    endpoint: str
    """As given: ``host:port``, a URL's host and port, or a path for a file store."""
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 3
    work: str = ""
    """What the workers run: nodes of one role that run something else belong to another job."""
    token: str | None = field(default=None, repr=False)
    node_rank: int | None = None
    """Fixed place of this node (static)."""
    local_addr: str | None = None
    join_timeout: float = 600.0
    """Seconds for finding, connecting, and the first ranks together."""
    last_call: float = 30.0
    wait_for: str = "quiet"
    heartbeat: float = 10.0
    """Seconds of silence after which a node is lost."""
    reconnect_timeout: float = 60.0
    """Seconds that a node which lost its store tries to find it again."""
    close_timeout: float = 30.0
    """Seconds that the node which hosts the store waits for the others to read how the job ended."""
    store_linger: float = STORE_LINGER
    """Seconds that the node which hosts the store stays for other jobs on it, once this one has ended."""
    store_type: str = "tcp"
    is_host: bool | None = None
    """Whether this node hosts the store; None: whoever can bind the endpoint does."""
    options: Mapping[str, Any] = Factory(dict)
    """What else the back end knows: TLS files, prefixes."""

    @property
    def terms(self) -> Terms:
        """What all nodes must have been told alike."""
        return Terms(self.min_nodes, self.max_nodes, self.max_restarts)

    @property
    def rules(self) -> Rules:
        """What the coordinator goes by."""
        return Rules(
            self.min_nodes,
            self.max_nodes,
            self.max_restarts,
            last_call=self.last_call,
            join_timeout=self.join_timeout,
            heartbeat=self.heartbeat,
            wait_for=self.wait_for,
            fixed_places=self.backend == "static",
            shared_store=self.backend == "static",
        )

    def plain(self) -> dict[str, Any]:
        """As a JSON object; ``Job(**plain)`` makes it again."""
        return asdict(self)

    @classmethod
    def of(
        cls,
        options: Options,
        *,
        run_id: str,
        node: str,
        backend: str,
        endpoint: str,
        nodes: tuple[int, int],
        wait_for: str,
        node_rank: int | None,
        token: str | None,
        local_addr: str | None,
        max_restarts: int = 3,
    ) -> Job:
        """The part of *node* in a job for so many *nodes*, at least and at most, with all that *options* say."""
        return cls(
            run_id=run_id,
            node=node,
            backend=backend,
            endpoint=endpoint.strip(),
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            max_restarts=max_restarts,
            token=token,
            node_rank=node_rank,
            local_addr=local_addr,
            join_timeout=options.join_timeout,
            last_call=options.last_call,
            wait_for=wait_for,
            heartbeat=options.heartbeat,
            reconnect_timeout=options.reconnect_timeout,
            close_timeout=options.close_timeout,
            store_linger=options.store_linger,
            store_type=options.store_type,
            is_host=node_rank == 0 if backend == "static" else options.is_host,
            options=options.others,
        )
