"""Re-export: ``torch.distributed.elastic.events.api``."""

from elasticlib.events._event import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
