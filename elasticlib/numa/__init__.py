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
    from elasticlib.numa._options import (
        AffinityMode as AffinityMode,
        BindingError as BindingError,
        NumaOptions as NumaOptions,
        as_numa_options as as_numa_options,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__, {"elasticlib.numa._options": "AffinityMode BindingError NumaOptions as_numa_options"}
)
