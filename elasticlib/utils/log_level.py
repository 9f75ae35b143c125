"""
How much is logged where nobody said.

(torch: ``torch.distributed.elastic.utils.log_level``)
"""

from __future__ import annotations


def get_log_level() -> str:
    """The name of the level that `get_logger` takes where ``LOGLEVEL`` is not set: ``WARNING``."""
    return "WARNING"


__all__ = ["get_log_level"]
