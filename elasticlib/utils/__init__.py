"""
Small helpers that worker scripts and launchers share: variables, ports, macros; stores, samplers, loggers beside them.

Rules of this package: the ground floor, which nothing but `errors` lies below; torch is imported only where a
function or class that needs it is first used.

(torch: ``torch.distributed.elastic.utils``)
"""

from __future__ import annotations

from elasticlib.utils._environment import get_env_variable_or_raise
from elasticlib.utils._macros import macros
from elasticlib.utils._ports import get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
