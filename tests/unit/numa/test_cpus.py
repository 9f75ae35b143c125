"""Which CPUs a worker gets: the four modes, and what is refused."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from elasticlib.numa import AffinityMode, BindingError
from elasticlib.numa._cpus import Topology, cpus_for, ranges
from elasticlib.numa._sysfs import parse_ranges

ALL = frozenset(range(8))
TOPOLOGY = Topology(
    nodes={0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 5, 6, 7})},
    packages=dict.fromkeys(range(8), 0),
    cores={cpu: frozenset({cpu & ~1, cpu | 1}) for cpu in range(8)},
    caches={cpu: frozenset(range(4)) if cpu < 4 else frozenset(range(4, 8)) for cpu in range(8)},
    gpu_nodes=(0, 1),
)
"""Two nodes of two cores with two threads each in one package, a GPU at each node."""


@pytest.mark.parametrize(
    ("mode", "cpus"),
    [
        (AffinityMode.NODE, {4, 5, 6, 7}),
        (AffinityMode.SOCKET, set(range(8))),
        (AffinityMode.EXCLUSIVE, {4, 5, 6, 7}),
        (AffinityMode.CORE_COMPLEX, {4, 5, 6, 7}),
    ],
)
def test_a_worker_gets_cpus_near_its_gpu(mode: AffinityMode, cpus: set[int]) -> None:
    assert cpus == cpus_for(mode, 1, TOPOLOGY, ALL)


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_only_cpus_that_the_launcher_may_use_are_given_out(mode: AffinityMode) -> None:
    assert {1, 2} == cpus_for(mode, 0, TOPOLOGY, frozenset({1, 2}))


@st.composite
def exclusive_machines(draw: st.DrawFn) -> tuple[Topology, frozenset[int]]:
    """One node with cores of one to three threads, GPUs here and on another node, and CPUs that may be used."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=9))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cores = [frozenset(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    of_cpu = {cpu: core for core in cores for cpu in core}
    gpus = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(lambda nodes: 0 in nodes))
    allowed = draw(st.sets(st.sampled_from(sorted(of_cpu)), min_size=1))
    nodes = {0: frozenset(of_cpu), 1: frozenset({1000})}
    return Topology(nodes, {}, of_cpu, of_cpu, tuple(gpus)), frozenset(allowed)


@given(exclusive_machines())
def test_the_gpus_of_a_node_divide_its_cores_without_overlap_or_rest(machine: tuple[Topology, frozenset[int]]) -> None:
    topology, allowed = machine
    here = [gpu for gpu, node in enumerate(topology.gpu_nodes) if node == 0]
    usable = {min(topology.cores[cpu]) for cpu in allowed}
    if len(usable) < len(here):
        with pytest.raises(BindingError, match=f"may use {len(usable)} cores? for {len(here)} GPUs"):
            cpus_for(AffinityMode.EXCLUSIVE, here[0], topology, allowed)
        return

    shares = [cpus_for(AffinityMode.EXCLUSIVE, gpu, topology, allowed) for gpu in here]

    counts = [len({min(topology.cores[cpu]) for cpu in share}) for share in shares]
    assert sum(map(len, shares)) == len(frozenset().union(*shares))
    assert allowed == frozenset().union(*shares)
    assert sum(counts) == len(usable)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(exclusive_machines())
def test_each_gpu_of_a_node_gets_one_whole_cache_largest_first(
    machine: tuple[Topology, frozenset[int]],
) -> None:
    topology, allowed = machine
    here = [gpu for gpu, node in enumerate(topology.gpu_nodes) if node == 0]
    caches = {topology.caches[cpu] & allowed for cpu in allowed}

    found = [cpus_for(AffinityMode.CORE_COMPLEX, gpu, topology, allowed) for gpu in here]

    sizes = [len(cpus) for cpus in found[: len(caches)]]
    assert set(found) <= caches
    assert len(set(found)) == min(len(here), len(caches))
    assert sizes == sorted(sizes, reverse=True)


# Refused, each with the value and the mend.


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_a_machine_without_gpus_is_refused(mode: AffinityMode) -> None:
    with pytest.raises(RuntimeError, match="torch finds none here"):
        cpus_for(mode, 0, evolve(TOPOLOGY, gpu_nodes=()), ALL)


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_a_worker_beyond_the_gpus_is_refused(mode: AffinityMode) -> None:
    with pytest.raises(
        BindingError, match="worker 2 has no GPU of its own, because torch finds only 2 here: start fewer workers"
    ):
        cpus_for(mode, 2, TOPOLOGY, ALL)


@pytest.mark.parametrize("mode", [AffinityMode.NODE, AffinityMode.EXCLUSIVE, AffinityMode.CORE_COMPLEX])
def test_a_launcher_that_may_use_no_cpu_near_the_gpu_is_refused(mode: AffinityMode) -> None:
    with pytest.raises(
        BindingError, match=r"GPU 1 is on NUMA node 1 with the CPUs 4-7, .* only the CPUs 0-2: .*taskset"
    ):
        cpus_for(mode, 1, TOPOLOGY, frozenset({0, 1, 2}))


def test_a_node_that_may_not_be_used_leaves_the_rest_of_its_package() -> None:
    assert {0, 1} == cpus_for(AffinityMode.SOCKET, 1, TOPOLOGY, frozenset({0, 1}))


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_a_gpu_at_a_node_without_cpus_is_refused(mode: AffinityMode) -> None:
    """Memory alone can be a node too."""
    topology = evolve(TOPOLOGY, nodes={**TOPOLOGY.nodes, 2: frozenset()}, gpu_nodes=(2,))

    with pytest.raises(BindingError, match=r"GPU 0 is on .*NUMA node 2, which has no CPUs: use another GPU"):
        cpus_for(mode, 0, topology, ALL)


def test_a_node_of_memory_alone_does_not_disturb_the_others() -> None:
    topology = evolve(TOPOLOGY, nodes={**TOPOLOGY.nodes, 2: frozenset()})

    assert ALL == cpus_for(AffinityMode.SOCKET, 0, topology, ALL)


@pytest.mark.parametrize(
    ("mode", "hidden"),
    [
        (AffinityMode.SOCKET, {"packages": {}}),
        (AffinityMode.EXCLUSIVE, {"cores": {}}),
        (AffinityMode.CORE_COMPLEX, {"caches": {}}),
    ],
)
def test_machine_that_does_not_report_what_a_mode_needs_is_refused(
    mode: AffinityMode, hidden: dict[str, dict[int, int]]
) -> None:
    """As in many virtual machines."""
    topology = evolve(TOPOLOGY, **hidden)

    with pytest.raises(BindingError, match=r"does not report .*use NUMA binding 'node'"):
        cpus_for(mode, 0, topology, ALL)
    assert {0, 1, 2, 3} == cpus_for(AffinityMode.NODE, 0, topology, ALL)


# Lists of CPUs.


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([5], "5"), ([0, 1, 2], "0-2"), ([3, 1, 2, 7, 9, 8], "1-3,7-9"), ([0, 2, 4], "0,2,4"), ([1, 2], "1-2")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert text == ranges(numbers)


@given(st.sets(st.integers(0, 300)))
def test_written_ranges_are_parsed_to_the_same_numbers(numbers: set[int]) -> None:
    assert numbers == parse_ranges(ranges(numbers))
