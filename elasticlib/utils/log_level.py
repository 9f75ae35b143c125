"""
Levels of logging: what the text of ``LOGLEVEL`` means, the default, and loggers of that level.

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
    The level that *text*, a value of ``LOGLEVEL``, names: in any case, or as a number.

    Raises `ConfigError` (a ``ValueError``) where it names none.
    """
    name = text.strip()
    if re.fullmatch(r"[0-9]+", name):
        return int(name)
    for each in (name, name.upper()):
        level = logging.getLevelName(each)
        if isinstance(level, int):
            return level
    raise ConfigError(
        f"{LOG_LEVEL_VARIABLE}={text!r} is no level of logging: "
        "give one of DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number"
    )


def get_log_level() -> str:
    """The name of the level that `get_logger` takes where ``LOGLEVEL`` is not set: ``WARNING``."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """
    The logger called *name*, or like the module that calls this; its level is that of ``LOGLEVEL``, else WARNING.

    Raises `ConfigError` (a ``ValueError``) when ``LOGLEVEL`` names no level.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(level_of(os.environ.get(LOG_LEVEL_VARIABLE) or get_log_level()))
    return logger
