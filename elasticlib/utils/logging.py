"""
Loggers whose level is that of the environment variable ``LOGLEVEL``.

(torch: ``torch.distributed.elastic.utils.logging``)
"""

from __future__ import annotations

import logging
import os
import sys

from elasticlib.errors import ConfigError
from elasticlib.utils.log_level import get_log_level

VARIABLE = "LOGLEVEL"


def get_logger(name: str | None = None) -> logging.Logger:
    """
    The logger called *name*, or like the module that calls this; its level is that of ``LOGLEVEL``, else WARNING.

    Raises `ConfigError` (a ``ValueError``) when ``LOGLEVEL`` names no level.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    level = os.environ.get(VARIABLE, get_log_level())
    try:
        logger.setLevel(level)
    except ValueError:
        known = ", ".join(sorted(logging.getLevelNamesMapping())) if sys.version_info >= (3, 11) else "DEBUG, INFO, ..."
        raise ConfigError(f"{VARIABLE}={level!r} is no level of logging: give one of {known}") from None
    return logger


__all__ = ["get_logger"]
