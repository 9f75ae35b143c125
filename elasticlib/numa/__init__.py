"""
Workers on the CPUs that are near their GPUs.

`AffinityMode` and `NumaOptions` say what is wanted (``LaunchConfig(numa_options=...)``); names and meaning are those of
``torch.numa.binding``. Rules of this package: what the machine looks like is read once, into frozen data (`_sysfs`);
which CPUs follow from it is computed without looking again (`_cpus`); only `binding` changes anything.
"""

from elasticlib.numa._options import AffinityMode, BindingError, NumaOptions

__all__ = ["AffinityMode", "BindingError", "NumaOptions"]
