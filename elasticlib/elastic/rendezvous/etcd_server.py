"""Re-export: ``torch.distributed.elastic.rendezvous.etcd_server``."""

from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer, find_free_port, stop_etcd

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]
