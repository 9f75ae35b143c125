"""
Loggers whose level is that of the environment variable ``LOGLEVEL``.

(torch: ``torch.distributed.elastic.utils.logging``)
"""

from __future__ import annotations

import logging
import os
import sys

from elasticlib.utils.log_level import LOG_LEVEL_VARIABLE, get_log_level, level_of


def get_logger(name: str | None = None) -> logging.Logger:
    """
    The logger called *name*, or like the module that calls this; its level is that of ``LOGLEVEL``, else WARNING.

    Raises `ConfigError` (a ``ValueError``) when ``LOGLEVEL`` names no level.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(level_of(os.environ.get(LOG_LEVEL_VARIABLE) or get_log_level()))
    return logger


__all__ = ["get_logger"]
