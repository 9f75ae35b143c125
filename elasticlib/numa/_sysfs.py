"""
The machine's topology, read from sysfs.

Rules of this file: it only reads, below a root that tests may choose. Each cache and core is read
once, not once for each CPU. Data that some modes do not need may be missing (a virtual machine
often hides its caches); that is not an error here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence

from elasticlib.numa._cpus import Topology
from elasticlib.numa._numa_options import BindingError

_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"
_DATA_CACHES = ("Data", "Unified")


def read_topology(gpu_addresses: Sequence[str], root: str = "/") -> Topology:
    """
    Return the topology of the machine whose sysfs is below *root*.

    *gpu_addresses* are PCI addresses such as ``0000:dc:00.0``, by index. Raises `BindingError` (a
    ``RuntimeError``) if sysfs does not have the NUMA nodes, or the node of a GPU.
    """
    nodes = _nodes(os.path.join(root, _NODES))
    cpus = sorted(frozenset[int]().union(*nodes.values()))
    folder = os.path.join(root, _CPUS)
    return Topology(
        nodes=nodes,
        packages={cpu: package for cpu in cpus if (package := _package(folder, cpu)) is not None},
        cores=_groups(cpus, lambda cpu: _list(os.path.join(folder, f"cpu{cpu}/topology/thread_siblings_list"))),
        caches=_groups(cpus, lambda cpu: _highest_cache(os.path.join(folder, f"cpu{cpu}/cache"))),
        gpu_nodes=tuple(_gpu_node(address, root) for address in gpu_addresses),
    )


def parse_ranges(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part.strip():
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _nodes(folder: str) -> dict[int, frozenset[int]]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BindingError(f"this machine reports no NUMA nodes: {error}") from error

    found = {}
    for name in names:
        match = re.fullmatch(r"node(\d+)", name)
        if match and (cpus := _list(os.path.join(folder, name, "cpulist"))) is not None:
            found[int(match[1])] = cpus

    return found


def _gpu_node(address: str, root: str) -> int:
    path = os.path.join(root, "sys/bus/pci/devices", address, "numa_node")
    text = _read(path)
    if text is None or not re.fullmatch(r"-?\d+", text):
        raise BindingError(f"{path} cannot be read, or does not contain the NUMA node of a GPU")
    # The kernel reports -1 if there is only one node.
    return max(int(text), 0)


def _package(folder: str, cpu: int) -> int | None:
    text = _read(os.path.join(folder, f"cpu{cpu}/topology/physical_package_id"))
    return None if text is None else int(text)


def _highest_cache(folder: str) -> frozenset[int] | None:
    """Return the CPUs that share the highest level of data cache in *folder*, or None."""
    levels: dict[int, frozenset[int]] = {}
    # Folders are listed in any order, so all levels are read before one is chosen.
    for cache in _cache_folders(folder):
        kind, level, shared = (_read(os.path.join(cache, fact)) for fact in ("type", "level", "shared_cpu_list"))
        if kind in _DATA_CACHES and level and shared:
            levels[int(level)] = parse_ranges(shared)
    return levels[max(levels)] if levels else None


def _cache_folders(folder: str) -> list[str]:
    """Return the folders of a CPU's caches; empty if the machine hides them."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"index\d+", name)]


def _groups(cpus: Sequence[int], read: Callable[[int], frozenset[int] | None]) -> dict[int, frozenset[int]]:
    found: dict[int, frozenset[int]] = {}
    for cpu in cpus:
        # One file has the group of all its CPUs.
        if cpu not in found and (group := read(cpu)):
            found.update(dict.fromkeys(group, group))
    return found


def _list(path: str) -> frozenset[int] | None:
    text = _read(path)
    return None if text is None else parse_ranges(text)


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        return file.read().strip()
    return None
