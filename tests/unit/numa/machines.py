"""
A machine that is not there: its CPUs, caches, NUMA nodes and GPUs, as data and as a tree of files like sysfs.

`TWO_PACKAGES` has what makes the modes differ: hyper-threads, two NUMA nodes in a package, caches of different sizes,
three GPUs on one node, and one GPU of which the kernel does not know where it is.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from elasticlib.numa._cpus import ranges


@frozen
class Machine:
    """Topology of a machine as the kernel reports it, as lists of CPUs."""

    nodes: tuple[frozenset[int], ...]
    packages: tuple[frozenset[int], ...]
    cores: tuple[frozenset[int], ...]
    caches: tuple[frozenset[int], ...]
    gpus: tuple[int, ...]
    """Of each GPU the NUMA node as the kernel tells it: -1 where it does not know."""

    def address(self, gpu: int) -> str:
        """PCI address of a GPU: its bus is its index and 16, so that there is a message in the number."""
        return f"0000:{self.bus(gpu):02x}:00.0"

    def bus(self, gpu: int) -> int:
        return 26 + gpu

    @property
    def addresses(self) -> list[str]:
        return [self.address(gpu) for gpu in range(len(self.gpus))]

    def write(self, root: Path) -> None:
        """Make the files below *root*."""
        system = root / "sys/devices/system"
        for number, cpus in enumerate(self.nodes):
            _file(system / f"node/node{number}/cpulist", ranges(cpus))
        _file(system / "node/possible", ranges(range(len(self.nodes))))
        _file(system / "node/has_cpu", "0")
        for number, cpus in enumerate(self.packages):
            for cpu in cpus:
                _file(system / f"cpu/cpu{cpu}/topology/physical_package_id", str(number))
        for cpus in self.cores:
            for cpu in cpus:
                _file(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", ranges(cpus))
                own = ranges(cpus)
                levels = [("Data", 1, own), ("Instruction", 1, own), ("Unified", 2, own)]
                levels += [("Unified", 3, ranges(shared)) for shared in self.caches if cpu in shared]
                # In no order, as a folder is listed; and an instruction cache of the highest level, which is no data's.
                levels += [("Instruction", 4, ranges(self.nodes[0]))]
                for index, (kind, level, shared_list) in enumerate(levels):
                    folder = system / f"cpu/cpu{cpu}/cache/index{index}"
                    _file(folder / "type", kind)
                    _file(folder / "level", str(level))
                    _file(folder / "shared_cpu_list", shared_list)
                _file(system / f"cpu/cpu{cpu}/cache/uevent", "")
        for gpu, node in enumerate(self.gpus):
            _file(root / f"sys/bus/pci/devices/{self.address(gpu)}/numa_node", str(node))


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _cpus(*spans: range) -> frozenset[int]:
    return frozenset(cpu for span in spans for cpu in span)


TWO_PACKAGES = Machine(
    nodes=(_cpus(range(4), range(12, 16)), _cpus(range(4, 8), range(16, 20)), _cpus(range(8, 12), range(20, 24))),
    packages=(_cpus(range(8), range(12, 20)), _cpus(range(8, 12), range(20, 24))),
    cores=tuple(frozenset({core, core + 12}) for core in range(12)),
    caches=(
        frozenset({0, 1, 12, 13}),
        frozenset({2, 3, 14, 15}),
        _cpus(range(4, 8), range(16, 20)),
        frozenset({8, 20}),
        frozenset({9, 10, 11, 21, 22, 23}),
    ),
    gpus=(2, 0, 0, -1, 1),
)
ALLOWED = frozenset(range(24)) - {12}
"""CPUs that the launcher may use: all but one hyper-thread of the first core."""
EXPECTED = {
    "node": ["8-11,20-23", "0-3,13-15", "0-3,13-15", "0-3,13-15", "4-7,16-19"],
    "socket": ["8-11,20-23", "0-7,13-19", "0-7,13-19", "0-7,13-19", "0-7,13-19"],
    # Four cores for three GPUs: the first one gets two.
    "exclusive": ["8-11,20-23", "0-1,13", "2,14", "3,15", "4-7,16-19"],
    # The cache with more CPUs that may be used comes first, and the third GPU gets it again.
    "core-complex": ["9-11,21-23", "2-3,14-15", "0-1,13", "2-3,14-15", "4-7,16-19"],
}
"""CPUs of `TWO_PACKAGES` within `ALLOWED`, by mode and GPU."""
