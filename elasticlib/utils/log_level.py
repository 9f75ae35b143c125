"""
Logging levels: the values of ``LOGLEVEL``, the default, and loggers with that level.

(torch: ``torch.distributed.elastic.utils.log_level``, ``...utils.logging``)
"""

from __future__ import annotations

import logging
import os
import re
import sys

from elasticlib.errors import ConfigError

__all__ = ["get_log_level", "get_logger"]

LOG_LEVEL_VARIABLE = "LOGLEVEL"


def level_of(text: str) -> int:
    """
    Return the level that *text*, a value of ``LOGLEVEL``, names: in upper or lower case, or a number.

    Raises `ConfigError` (a ``ValueError``) for an invalid value.
    """
    name = text.strip()
    if re.fullmatch(r"[0-9]+", name):
        return int(name)

    for each in (name, name.upper()):
        level = logging.getLevelName(each)
        if isinstance(level, int):
            return level

    raise ConfigError(
        f"{LOG_LEVEL_VARIABLE}={text!r} is not a log level: give one of DEBUG, INFO, WARNING, ERROR, "
        "CRITICAL, or a number"
    )


def get_log_level() -> str:
    """Return the level of `get_logger` if ``LOGLEVEL`` is not set: ``WARNING``."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """
    Return the logger *name*, by default of the calling module, with the level of ``LOGLEVEL``.

    The default level is WARNING. Raises `ConfigError` (a ``ValueError``) for an invalid
    ``LOGLEVEL``.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(level_of(os.environ.get(LOG_LEVEL_VARIABLE) or get_log_level()))
    return logger
