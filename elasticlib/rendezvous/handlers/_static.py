"""
The rendezvous for nodes with given ranks, made directly.

(torch: ``torch.distributed.elastic.rendezvous.static_tcp_rendezvous``)
"""

from __future__ import annotations

from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.handlers._registry import create_handler
from elasticlib.rendezvous.net._endpoint import spell


class StaticTCPRendezvous(CoordinatedHandler):
    """
    Node *rank* of *world_size* nodes; rank 0 hosts the store at *master_addr*:*master_port*.

    *timeout* seconds are for finding, connecting and ranks together. Differs from torch's: after a call of
    `next_rendezvous` on one node `num_nodes_waiting` is positive on the others, so that all can meet again, and
    the keys of the round before are gone then.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: float
    ) -> None:
        endpoint = spell(master_addr, master_port)
        params = RendezvousParameters("static", endpoint, run_id, world_size, world_size, rank=rank, timeout=timeout)
        super().__init__(create_handler(params).job)


def create_rdzv_handler(params: RendezvousParameters) -> CoordinatedHandler:
    """The handler of *params*, whose options hold the ``rank``; raises `ConfigError` without rank, host or port."""
    return create_handler(params)
