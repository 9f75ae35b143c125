"""
The choice of CPUs for a worker. PURE: a topology in, a set of CPUs out.

Rules of this file: a worker gets only CPUs that the launcher itself may use. If there are none, or
if the machine does not report the data that a mode needs, a `BindingError` names the cause and a
remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from elasticlib._wording import counted
from elasticlib.numa._numa_options import AffinityMode, BindingError
from elasticlib.stacks import number_ranges


@frozen
class Topology:
    """CPUs and GPUs of a machine, without data that the kernel does not report."""

    nodes: Mapping[int, frozenset[int]]
    """CPUs of each NUMA node."""
    packages: Mapping[int, int]
    """Processor package of each CPU."""
    cores: Mapping[int, frozenset[int]]
    """For each CPU, the CPUs of its physical core, itself included."""
    caches: Mapping[int, frozenset[int]]
    """For each CPU, the CPUs that share its data cache of the highest level, itself included."""
    gpu_nodes: tuple[int, ...]
    """NUMA node of each GPU, by its index."""


def cpus_for(mode: AffinityMode, device_index: int, topology: Topology, allowed: frozenset[int]) -> frozenset[int]:
    """
    Return the CPUs of *allowed* for the worker with GPU *device_index*, at least one.

    Raises `BindingError` (a ``RuntimeError``) if the GPU does not exist, no CPU is left, or there
    are fewer cores than GPUs.
    """
    count = len(topology.gpu_nodes)
    if count == 0:
        raise BindingError(
            "each worker is bound to the CPUs near its GPU or other accelerator, but torch finds none here"
        )
    if not 0 <= device_index < count:
        raise BindingError(
            f"worker {device_index} has no GPU of its own, because torch finds only {count} here: start fewer workers"
        )

    node = topology.gpu_nodes[device_index]
    near = topology.nodes.get(node, frozenset())
    place = f"NUMA node {node}"
    if mode is AffinityMode.SOCKET:
        near, place = _of_package(topology, node)
    found = near & allowed
    if not near:
        raise BindingError(f"GPU {device_index} is on {place}, which has no CPUs: use another GPU")

    if not found:
        raise BindingError(
            f"GPU {device_index} is on {place} with the CPUs {ranges(near)}, but this launch may use only the CPUs "
            f"{ranges(allowed)}: allow it more CPUs (taskset, cpuset)"
        )

    peers = [gpu for gpu, its_node in enumerate(topology.gpu_nodes) if its_node == node]
    if mode is AffinityMode.EXCLUSIVE:
        return _share(peers.index(device_index), len(peers), _by(topology.cores, found, "cores"), node)

    if mode is AffinityMode.CORE_COMPLEX:
        caches = _by(topology.caches, found, "shared caches")
        # The GPUs of a node take turns with its caches, the largest first.
        largest_first = sorted(caches, key=lambda first: (-len(caches[first]), first))
        return caches[largest_first[peers.index(device_index) % len(caches)]]

    return found


def _of_package(topology: Topology, node: int) -> tuple[frozenset[int], str]:
    """Return the CPUs of all NUMA nodes in the package of *node*, and a name for messages."""
    # One CPU stands for its node. A node may have memory and no CPUs.
    packages = {number: topology.packages.get(min(cpus)) for number, cpus in topology.nodes.items() if cpus}
    package = packages.get(node)
    if node in packages and package is None:
        raise BindingError(
            f"this machine does not report the processor package of NUMA node {node}: use NUMA binding 'node'"
        )
    same = [topology.nodes[number] for number, its_package in packages.items() if its_package == package]
    return frozenset[int]().union(*same), f"the package of NUMA node {node}"


def _by(groups: Mapping[int, frozenset[int]], cpus: frozenset[int], what: str) -> dict[int, frozenset[int]]:
    """Return *cpus* by group, keyed and ordered by the lowest CPU of the whole group."""
    if silent := cpus - groups.keys():
        raise BindingError(
            f"this machine does not report the {what} of the CPUs {ranges(silent)}: use NUMA binding 'node'"
        )
    firsts = sorted({min(groups[cpu]) for cpu in cpus})
    return {first: frozenset(cpu for cpu in cpus if min(groups[cpu]) == first) for first in firsts}


def _share(position: int, gpus: int, cores: Mapping[int, frozenset[int]], node: int) -> frozenset[int]:
    """Return the CPUs of the GPU at *position* of a node's *gpus*; the first get surplus cores."""
    each, left_over = divmod(len(cores), gpus)
    if each == 0:
        raise BindingError(
            f"on NUMA node {node} this launch may use {counted(len(cores), 'core')} for {gpus} GPUs, so not "
            "every GPU gets a core of its own: use NUMA binding 'node'"
        )
    start = position * each + min(position, left_over)
    mine = list(cores.values())[start : start + each + (position < left_over)]
    return frozenset[int]().union(*mine)


def ranges(numbers: Iterable[int]) -> str:
    """Return *numbers* in the kernel's notation, such as ``0-3,8``; empty for none."""
    return number_ranges(numbers, ",")
