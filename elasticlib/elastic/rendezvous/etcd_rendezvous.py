"""Re-export: ``torch.distributed.elastic.rendezvous.etcd_rendezvous``."""

from elasticlib import _lazy
from elasticlib.rendezvous.handlers._etcd import (
    EtcdRendezvous as EtcdRendezvous,
    EtcdRendezvousHandler as EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure as EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately as EtcdRendezvousRetryImmediately,
    create_rdzv_handler as create_rdzv_handler,
)

_lazy.offer(__name__)
