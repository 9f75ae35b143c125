"""Re-export: ``torch.distributed.elastic.rendezvous.etcd_rendezvous``."""

from __future__ import annotations

from elasticlib.rendezvous.handlers._etcd import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
    create_rdzv_handler,
)

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]
