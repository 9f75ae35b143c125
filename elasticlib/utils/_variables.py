"""Variables of the environment, and macros in the arguments of workers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

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


class macros:  # noqa: N801 - torch's name
    """
    What may stand in an argument, and how it is filled in.

    (torch: ``torch.distributed.elastic.utils.macros``)
    """

    local_rank = "${local_rank}"
    """Stands for the worker's rank on its node, whatever ``LOCAL_RANK`` says."""

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """
        The arguments with ``${local_rank}`` and ``$local_rank`` replaced; what is no text is passed through.

        Differs from torch's: everything else with a dollar stays as it is, ``$$`` too, so that a password
        arrives as it was typed.
        """
        # By a function: the rank is text to insert, not a pattern with backslashes.
        return [_LOCAL_RANK.sub(lambda _: str(local_rank), arg) if isinstance(arg, str) else arg for arg in args]


_LOCAL_RANK = re.compile(r"\$(?:\{local_rank\}|local_rank(?![A-Za-z0-9_]))")
