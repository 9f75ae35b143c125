"""
One node's part in a job's rendezvous: plain data, checked, ready to be sent to another process.

Rules of this file: data only. `_rdzv_options` computes the numbers, and a backend reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, asdict, field, fields_dict, frozen

from elasticlib.rendezvous._rdzv_options import JobOptions, Options
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._messages import Terms


@frozen(kw_only=True)
class NodeJob(JobOptions):
    """One node's part in one job."""

    run_id: str
    node: str
    """
    Name of this node in the job, different from that of any other: host, process and a random part.
    """
    backend: str
    """``c10d``, ``static``, ``etcd``, ``etcd-v2`` or ``etcd-v3``."""
    endpoint: str
    """As given: ``host:port``, a URL's host and port, or a path for a file store."""
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 3
    work: str = ""
    """The program of the workers: nodes of one role with another program belong to another job."""
    command: str = ""
    """`work` with its arguments, for people; equal for equal commands; empty: unknown."""
    token: str | None = field(default=None, repr=False)
    node_rank: int | None = None
    """Fixed place of this node (static)."""
    is_scheduled: bool = False
    """True if a scheduler set `node_rank`."""
    local_addr: str | None = None
    wait_for: str = "quiet"
    sidecars: int = 0
    """Number of sidecars that this node has lost so far."""
    after: str = ""
    """The reason for which the last of them ended."""
    presence_port: int = 0
    """Port of the socket that all processes of this node hold; 0: there is none."""
    hosts: Sequence[str] = Factory(list)
    """Names of the machines on which an engine has started the job's nodes, by `node_rank`; empty if unknown."""
    ends_together: bool = False
    """True if an engine may end the other nodes soon after the first one has ended."""
    options: Mapping[str, Any] = Factory(dict)
    """More options of the backend: TLS files, prefixes."""

    @property
    def terms(self) -> Terms:
        """Settings that must be the same on all nodes."""
        return self.rules.terms

    @property
    def rules(self) -> Rules:
        """The coordinator's settings."""
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
            hosts=tuple(self.hosts),
            ends_together=self.ends_together,
        )

    def plain(self) -> dict[str, Any]:
        """Return a JSON object; ``Job(**plain)`` makes the job again."""
        return asdict(self)

    @classmethod
    def of(cls, options: Options, *, backend: str, endpoint: str, node_rank: int | None, **given: Any) -> NodeJob:
        """Return the part in a job of *backend* with *options* and the other *given* fields."""
        own = {name: getattr(options, name) for name in fields_dict(JobOptions)}
        if backend == "static":
            # Ranks are given, so that every node is waited for, and the first one hosts the store.
            own["is_host"], given["min_nodes"] = node_rank == 0, given["max_nodes"]

        return cls(
            backend=backend,
            endpoint=endpoint.strip(),
            node_rank=node_rank,
            options=options.others,
            **own,
            **given,
        )
