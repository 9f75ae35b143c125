"""
Binding of workers to the CPUs near their GPUs.

`AffinityMode` and `NumaOptions` (``LaunchConfig(numa_options=...)``) have the names and meaning of
``torch.numa.binding``.

Rules of this package: `_numa_options` has the options and their checks. `_sysfs` reads the topology
once, into frozen data, and `_cpus` computes the CPUs from it. Only `binding` changes anything.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.numa._cpus import cpus_for as cpus_for
    from elasticlib.numa._gpu_addresses import gpu_addresses_here as gpu_addresses_here
    from elasticlib.numa._numa_options import (
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
        "elasticlib.numa._gpu_addresses": "gpu_addresses_here",
        "elasticlib.numa._numa_options": "AffinityMode BindingError NumaOptions as_numa_options",
        "elasticlib.numa._sysfs": "read_topology",
        "elasticlib.numa.binding": "_maybe_wrap_command_args_with_numa_binding binding_attempt",
    },
)
