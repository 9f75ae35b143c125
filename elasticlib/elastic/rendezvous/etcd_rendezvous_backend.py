"""Re-export: ``torch.distributed.elastic.rendezvous.etcd_rendezvous_backend``."""

from elasticlib.rendezvous.handlers._etcd import EtcdRendezvousBackend, create_backend

__all__ = ["EtcdRendezvousBackend", "create_backend"]
