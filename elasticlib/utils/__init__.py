"""
Small helpers that worker scripts and launchers share: variables, ports, macros; stores, samplers, loggers beside them.

Rules of this package: the ground floor, which nothing but `errors` lies below; torch is imported only where a
function or class that needs it is first used.

(torch: ``torch.distributed.elastic.utils``)
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.utils._ports import get_socket_with_port as get_socket_with_port
    from elasticlib.utils._variables import (
        get_env_variable_or_raise as get_env_variable_or_raise,
        macros as macros,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.utils._ports": "get_socket_with_port",
        "elasticlib.utils._variables": "get_env_variable_or_raise macros",
    },
)
