"""Variables of the environment, and macros in the arguments of workers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from elasticlib.errors import ConfigError


def get_env_variable_or_raise(env_name: str) -> str:
    """
    Return the value of the variable *env_name*, which may be empty.

    Raises `ConfigError` (a ``ValueError``) if it is not set. (torch:
    ``torch.distributed.elastic.utils.get_env_variable_or_raise``)
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ConfigError(
            f"the environment variable {env_name} is not set: export it, or start the program with elasticrun"
        )
    return value


class macros:  # noqa: N801 - torch's name
    """
    Macros in arguments, and their substitution.

    (torch: ``torch.distributed.elastic.utils.macros``)
    """

    local_rank = "${local_rank}"
    """Macro for the worker's rank on its node; it does not depend on ``LOCAL_RANK``."""

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """
        Return the arguments with ``${local_rank}`` and ``$local_rank`` replaced.

        Arguments that are not text are passed through. Unlike in torch, all other dollar signs stay
        unchanged, also ``$$``, so that a password arrives as it was typed.
        """
        # A function, because the rank is inserted as text, not as a pattern with backslashes.
        return [_LOCAL_RANK.sub(lambda _: str(local_rank), arg) if isinstance(arg, str) else arg for arg in args]


_LOCAL_RANK = re.compile(r"\$(?:\{local_rank\}|local_rank(?![A-Za-z0-9_]))")
