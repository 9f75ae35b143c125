"""Re-export: ``torch.distributed.elastic.utils.logging``."""

from __future__ import annotations

from elasticlib.utils.logging import get_logger

__all__ = ["get_logger"]
