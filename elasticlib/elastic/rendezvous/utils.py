"""Re-export: ``torch.distributed.elastic.rendezvous.utils``."""

from elasticlib.rendezvous.net._endpoint import parse_rendezvous_endpoint

__all__ = ["parse_rendezvous_endpoint"]
