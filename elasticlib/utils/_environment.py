"""Variables of the environment that somebody must have set."""

from __future__ import annotations

import os

from elasticlib.errors import ConfigError


def get_env_variable_or_raise(env_name: str) -> str:
    """
    The text of the variable *env_name*, also when that is empty.

    Raises `ConfigError` (a ``ValueError``) when it is not set. (torch:
    ``torch.distributed.elastic.utils.get_env_variable_or_raise``)
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ConfigError(f"the environment variable {env_name} is not set: export it, or start this by elasticrun")
    return value
