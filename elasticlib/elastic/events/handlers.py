"""Re-export: ``torch.distributed.elastic.events.handlers``."""

from elasticlib.events._destinations import get_logging_handler, handlers as _log_handlers

__all__ = ["_log_handlers", "get_logging_handler"]
