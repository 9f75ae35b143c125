"""
The resources of this machine: CPUs, memory kills, accelerators.

Rules of this file: it only reads, and never loads an accelerator's library into the caller. If
the kernel gives no value, the answer is the generous one.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping

_DEVICE_FILES = (
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/accel/accel*",
    "/dev/davinci_manager",
    "/dev/hl[0-9]*",
    "/dev/dxg",
)


def may_have_accelerators() -> bool:
    """Return False if no device file of an accelerator exists, so that none can be counted."""
    return any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def gpu_count() -> int | None:
    """
    Return the number of NVIDIA's GPUs on this machine; None if there may be others, which were
    not counted.
    """
    found = glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*")
    if found:
        return len(found)
    return None if may_have_accelerators() else 0


def gpu_names(environment: Mapping[str, str]) -> dict[str, str]:
    """
    Return NVIDIA's UUIDs of the GPUs, by the index that CUDA gives them in *environment*; {} if
    they are not known.

    CUDA counts the fastest ones first, unless ``CUDA_DEVICE_ORDER`` asks for the order of
    addresses, which all tools use. GPUs of one model are ordered by address anyway. (source:
    CUDA's programming guide, CUDA_DEVICE_ORDER)
    """
    found = [_facts(_read(path)) for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information"))]
    names = [facts.get("GPU UUID", "") for facts in found]
    are_alike = len({facts.get("Model") for facts in found}) <= 1
    is_by_address = are_alike or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not is_by_address or not all(names):
        return {}
    return {str(index): name for index, name in enumerate(names)}


def _facts(text: str) -> dict[str, str]:
    """Return the values of ``name: value`` lines."""
    rows = [line.partition(":") for line in text.splitlines()]
    return {name.strip(): value.strip() for name, _, value in rows}


def cpu_count() -> float:
    """
    Return the number of CPUs that this process may use: the affinity mask, cut by the cgroup's
    quota.
    """
    count = float(len(os.sched_getaffinity(0)))
    return min([count, *_quotas()])


def _quotas() -> Iterator[float]:
    for folder in _cgroup_folders("cpu"):
        for quota in (_quota_of_version_2(folder), _quota_of_version_1(folder)):
            if quota is not None:
                yield quota


def _quota_of_version_2(folder: str) -> float | None:
    """Return the CPUs that the cgroup at *folder* may use, by version 2 of cgroups; None for no limit."""
    quota, _, period = _read(os.path.join(folder, "cpu.max")).partition(" ")
    if not period or quota == "max":
        return None
    return float(quota) / float(period)


def _quota_of_version_1(folder: str) -> float | None:
    """Return the same by version 1."""
    quota = _read(os.path.join(folder, "cpu.cfs_quota_us"))
    period = _read(os.path.join(folder, "cpu.cfs_period_us"))
    # A negative quota is no limit.
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def memory_kills() -> int:
    """
    Return the number of processes in this cgroup that the kernel's out-of-memory killer has
    ended.

    0 if it is not counted.
    """
    for folder in _cgroup_folders("memory"):
        texts = (_read(os.path.join(folder, name)) for name in ("memory.events", "memory.oom_control"))
        counted = re.search(r"^oom_kill (\d+)$", "\n".join(texts), re.MULTILINE)
        if counted:
            # The innermost group counts: those above include other programs.
            return int(counted[1])
    return 0


def _cgroup_folders(controller: str) -> Iterator[str]:
    """
    Yield folders of this process's cgroup for *controller*, innermost first, with those above it.
    """
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for root in _roots(controllers, controller):
            yield from _folders_up_to(root, path)


def _roots(controllers: str, controller: str) -> tuple[str, ...]:
    """Return the folders where the hierarchy of some *controllers* may be mounted; () if it has no *controller*."""
    # The line of version 2, which hybrid systems mount beside the folders of version 1.
    if controllers == "":
        return ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    if controller in controllers.split(","):
        return (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}")
    return ()


def _folders_up_to(root: str, path: str) -> Iterator[str]:
    inner = os.path.join(root, path.lstrip("/"))
    while len(inner) >= len(root):
        # In a container the path may be that of the host: only folders that exist here count.
        if os.path.isdir(inner):
            yield inner
        inner = os.path.dirname(inner.rstrip("/"))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
