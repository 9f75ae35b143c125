"""
Small helpers of worker scripts and launchers: variables, ports, macros, stores, samplers, loggers.

Rules of this package: it uses only `errors` and `stacks`. A function or class that needs torch
imports it at its first use. (torch: ``torch.distributed.elastic.utils``)
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.utils._dataclasses import DataclassView as DataclassView
    from elasticlib.utils._process_settings import process_settings as process_settings
    from elasticlib.utils._variables import get_env_variable_or_raise as get_env_variable_or_raise, macros as macros
    from elasticlib.utils.distributed import (
        get_free_port as get_free_port,
        get_socket_with_port as get_socket_with_port,
    )
    from elasticlib.utils.log_level import LOG_LEVEL_VARIABLE as LOG_LEVEL_VARIABLE, level_of as level_of
    from elasticlib.utils.process_state import (
        is_uninterruptible_state as is_uninterruptible_state,
        read_proc_state as read_proc_state,
        stat_words as stat_words,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.utils._dataclasses": "DataclassView",
        "elasticlib.utils.distributed": "get_free_port get_socket_with_port",
        "elasticlib.utils._process_settings": "process_settings",
        "elasticlib.utils._variables": "get_env_variable_or_raise macros",
        "elasticlib.utils.log_level": "LOG_LEVEL_VARIABLE level_of",
        "elasticlib.utils.process_state": "is_uninterruptible_state read_proc_state stat_words",
    },
)
