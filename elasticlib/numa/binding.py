"""
The door for ``torch.numa.binding``: the same names, for programs that move over.

The functions with an underscore are those that launchers call in torch; their behaviour is told in `_apply`.
"""

from elasticlib.numa._apply import (
    bind_process as _maybe_apply_numa_binding_to_current_process,
    wrap_command as _maybe_wrap_command_args_with_numa_binding,
    wrap_function as _maybe_wrap_with_numa_binding,
)
from elasticlib.numa._options import AffinityMode, BindingError, NumaOptions

__all__ = [
    "AffinityMode",
    "BindingError",
    "NumaOptions",
    "_maybe_apply_numa_binding_to_current_process",
    "_maybe_wrap_command_args_with_numa_binding",
    "_maybe_wrap_with_numa_binding",
]
