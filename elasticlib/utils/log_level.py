"""
Levels of logging: what a text such as that of ``LOGLEVEL`` means, and what is taken where nobody said.

(torch: ``torch.distributed.elastic.utils.log_level``)
"""

from __future__ import annotations

import logging
import re

from elasticlib.errors import ConfigError

__all__ = ["get_log_level"]

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
