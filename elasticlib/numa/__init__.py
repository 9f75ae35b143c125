"""
Workers on the CPUs that are near their GPUs.

`AffinityMode` and `NumaOptions` say what is wanted (``LaunchConfig(numa_options=...)``); names and meaning are those of
``torch.numa.binding``. Rules of this package: what is wanted is values and their check (`_options`); what the machine
looks like is read once, into frozen data (`_sysfs`); which CPUs follow from it is computed without looking again
(`_cpus`); only `binding` changes anything.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.numa._cpus import cpus_for as cpus_for
    from elasticlib.numa._gpus import gpu_addresses_here as gpu_addresses_here
    from elasticlib.numa._options import (
        AffinityMode as AffinityMode,
        BindingError as BindingError,
        NumaOptions as NumaOptions,
        as_numa_options as as_numa_options,
    )
    from elasticlib.numa._sysfs import read_topology as read_topology
    from elasticlib.numa.binding import (
        _maybe_wrap_command_args_with_numa_binding as _maybe_wrap_command_args_with_numa_binding,
        binding_attempt as binding_attempt,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.numa._cpus": "cpus_for",
        "elasticlib.numa._gpus": "gpu_addresses_here",
        "elasticlib.numa._options": "AffinityMode BindingError NumaOptions as_numa_options",
        "elasticlib.numa._sysfs": "read_topology",
        "elasticlib.numa.binding": "_maybe_wrap_command_args_with_numa_binding binding_attempt",
    },
)
