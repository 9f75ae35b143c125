"""Re-export: ``torch.distributed.elastic.rendezvous.etcd_store``. It imports torch only when the name is used."""

from typing import TYPE_CHECKING

from elasticlib import _lazy

if TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._etcd_store import EtcdStore as EtcdStore

__getattr__, __dir__, __all__ = _lazy.names(__name__, {"elasticlib.rendezvous.handlers._etcd_store": "EtcdStore"})
