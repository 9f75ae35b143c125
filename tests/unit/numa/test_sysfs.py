"""Kernel's description of a machine, read from a tree of files like sysfs."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest

from elasticlib.numa import AffinityMode, BindingError
from elasticlib.numa._cpus import cpus_for, ranges
from elasticlib.numa._sysfs import parse_ranges, read_topology
from tests.unit.numa.machines import ALLOWED, EXPECTED, TWO_PACKAGES


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `TWO_PACKAGES`; tests that change them take a copy."""
    root = tmp_path_factory.mktemp("machine")
    TWO_PACKAGES.write(root)
    return root


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_each_mode_finds_its_cpus_on_a_machine_with_two_packages(tree: Path, mode: AffinityMode) -> None:
    topology = read_topology(TWO_PACKAGES.addresses, str(tree))

    found = [ranges(cpus_for(mode, gpu, topology, ALLOWED)) for gpu in range(len(TWO_PACKAGES.gpus))]

    assert EXPECTED[mode.value] == found


def test_nodes_packages_cores_and_caches_are_read(tree: Path) -> None:
    topology = read_topology(TWO_PACKAGES.addresses, str(tree))

    assert dict(enumerate(TWO_PACKAGES.nodes)) == topology.nodes
    assert {0: 0, 8: 1} == {cpu: topology.packages[cpu] for cpu in (0, 8)}
    assert {3, 15} == topology.cores[15]
    assert {9, 10, 11, 21, 22, 23} == topology.caches[10]
    assert (2, 0, 0, 0, 1) == topology.gpu_nodes


def test_gpus_are_found_by_the_index_of_their_address(tree: Path) -> None:
    """As where CUDA_VISIBLE_DEVICES turns their order round."""
    topology = read_topology(TWO_PACKAGES.addresses[::-1], str(tree))

    assert (1, 0, 0, 0, 2) == topology.gpu_nodes


def test_files_that_cores_and_caches_share_are_read_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    plain = builtins.open

    def noted(file: Any, *args: Any, **options: Any) -> Any:
        opened.append(str(file))
        return plain(file, *args, **options)

    monkeypatch.setattr(builtins, "open", noted)
    read_topology([], str(tree))

    assert len(TWO_PACKAGES.cores) == sum(path.endswith("thread_siblings_list") for path in opened)
    assert len(opened) == len(set(opened))


def test_a_machine_that_hides_its_caches_is_read_without_them(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy")
    for folder in (tmp_path / "copy/sys/devices/system/cpu").glob("cpu*/cache"):
        shutil.rmtree(folder)

    topology = read_topology(TWO_PACKAGES.addresses, str(tmp_path / "copy"))

    assert {} == topology.caches
    assert 24 == len(topology.cores)


def test_a_cpu_that_is_off_is_left_out(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/sys/devices/system/cpu/cpu5")
    (tmp_path / "copy/sys/devices/system/cpu/cpu17/topology/thread_siblings_list").write_text("17\n")

    topology = read_topology([], str(tmp_path / "copy"))

    assert 5 not in topology.packages
    assert 5 not in topology.cores
    assert {17} == topology.cores[17]


def test_gpu_without_a_reported_node_is_refused_with_the_file_name(tree: Path) -> None:
    with pytest.raises(
        BindingError, match=r"0000:ff:00.0/numa_node cannot be read, or does not contain the NUMA node of a GPU"
    ):
        read_topology(["0000:ff:00.0"], str(tree))


def test_a_machine_without_numa_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BindingError, match=r"reports no NUMA nodes: .*sys/devices/system/node"):
        read_topology([], str(tmp_path))


def test_this_machine_can_be_read() -> None:
    if not Path("/sys/devices/system/node").is_dir():
        with pytest.raises(BindingError):
            read_topology([])
        return
    topology = read_topology([])

    assert topology.packages.keys() <= frozenset().union(*topology.nodes.values())
    assert all(cpu in topology.cores[cpu] for cpu in topology.cores)


@pytest.mark.parametrize(("text", "numbers"), [("", set()), ("\n", set()), ("0-2,4, 6-7\n", {0, 1, 2, 4, 6, 7})])
def test_a_list_of_the_kernels_is_read(text: str, numbers: set[int]) -> None:
    assert numbers == parse_ranges(text)
