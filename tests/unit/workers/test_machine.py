"""Resources that the machine grants, read from made-up files of the kernel."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elasticlib.workers import _machine

V2 = "/sys/fs/cgroup"
V1_CPU = "/sys/fs/cgroup/cpu,cpuacct"
V1_MEMORY = "/sys/fs/cgroup/memory"
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this process see *files* only, and a mask of *cpus*."""

    def become(files: dict[str, str], cpus: int = 8) -> None:
        folders = {posixpath.dirname(path) for path in files}
        path = SimpleNamespace(join=posixpath.join, dirname=posixpath.dirname, isdir=lambda name: name in folders)
        fake = SimpleNamespace(path=path, sched_getaffinity=lambda pid: set(range(cpus)))
        monkeypatch.setattr(_machine, "os", fake)
        monkeypatch.setattr(_machine, "_read", lambda name: files.get(name, ""))

    return become


def test_without_a_quota_all_cpus_of_the_mask_may_be_used(machine: Machine) -> None:
    machine({"/proc/self/cgroup": "0::/\n"}, cpus=6)

    assert _machine.cpu_count() == 6.0


def test_cpu_count_is_the_mask_if_the_kernel_reports_nothing(machine: Machine) -> None:
    machine({}, cpus=3)

    assert _machine.cpu_count() == 3.0
    assert _machine.memory_kills() == 0


def test_a_quota_cuts_the_mask(machine: Machine) -> None:
    machine({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/cpu.max": "150000 100000\n"})

    assert _machine.cpu_count() == 1.5


def test_a_mask_below_the_quota_stays(machine: Machine) -> None:
    machine({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/cpu.max": "400000 100000\n"}, cpus=2)

    assert _machine.cpu_count() == 2.0


def test_a_quota_without_limit_is_none(machine: Machine) -> None:
    machine({"/proc/self/cgroup": "0::/job\n", f"{V2}/job/cpu.max": "max 100000\n"})

    assert _machine.cpu_count() == 8.0


def test_the_smallest_quota_above_a_group_holds(machine: Machine) -> None:
    machine(
        {
            "/proc/self/cgroup": "0::/outer/inner\n",
            f"{V2}/outer/inner/cpu.max": "400000 100000\n",
            f"{V2}/outer/cpu.max": "200000 100000\n",
        }
    )

    assert _machine.cpu_count() == 2.0


def test_a_quota_of_the_older_kind_of_group_cuts_the_mask(machine: Machine) -> None:
    machine(
        {
            "/proc/self/cgroup": "4:memory:/other\n3:cpu,cpuacct:/job\n",
            f"{V1_CPU}/job/cpu.cfs_quota_us": "250000\n",
            f"{V1_CPU}/job/cpu.cfs_period_us": "100000\n",
        }
    )

    assert _machine.cpu_count() == 2.5


def test_no_quota_of_the_older_kind_is_none(machine: Machine) -> None:
    machine(
        {
            "/proc/self/cgroup": "3:cpu,cpuacct:/job\n",
            f"{V1_CPU}/job/cpu.cfs_quota_us": "-1\n",
            f"{V1_CPU}/job/cpu.cfs_period_us": "100000\n",
        }
    )

    assert _machine.cpu_count() == 8.0


def test_kills_for_want_of_memory_are_counted(machine: Machine) -> None:
    machine(
        {"/proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.events": "low 0\noom 5\noom_kill 3\noom_group_kill 0\n"}
    )

    assert _machine.memory_kills() == 3


def test_kills_in_the_older_kind_of_group_are_counted(machine: Machine) -> None:
    machine(
        {
            "/proc/self/cgroup": "5:memory:/job\n3:cpu:/other\n",
            f"{V1_MEMORY}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        }
    )

    assert _machine.memory_kills() == 2


def test_kills_that_a_parent_counts_again_are_counted_once(machine: Machine) -> None:
    machine(
        {
            "/proc/self/cgroup": "0::/outer/inner\n",
            f"{V2}/outer/inner/memory.events": "oom_kill 2\n",
            f"{V2}/outer/memory.events": "oom_kill 2\n",
        }
    )

    assert _machine.memory_kills() == 2


def test_count_rises_by_a_kill_in_this_group_only(machine: Machine) -> None:
    files = {"/proc/self/cgroup": "0::/outer/inner\n", f"{V2}/outer/memory.events": "oom_kill 7\n"}
    machine({**files, f"{V2}/outer/inner/memory.events": "oom_kill 0\n"})
    before = _machine.memory_kills()

    machine({**files, f"{V2}/outer/inner/memory.events": "oom_kill 1\n", f"{V2}/outer/memory.events": "oom_kill 8\n"})
    after = _machine.memory_kills()

    assert after - before == 1


@pytest.mark.parametrize(("found", "expected"), [([], False), (["/dev/nvidiactl"], True)])
def test_devices_are_there_when_a_device_file_is(
    found: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_machine, "glob", SimpleNamespace(glob=lambda pattern: [f for f in found if f == pattern]))

    assert _machine.may_have_accelerators() is expected


# What the driver calls its GPUs.


def of_nvidia(machine: Machine, monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, str]) -> None:
    files = {
        f"/proc/driver/nvidia/gpus/0000:{number}0:00.0/information": (
            f"Model: \t\t {model}\nIRQ:   \t\t 63\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n"
        )
        for number, (model, uuid) in enumerate(gpus)
    }
    machine(files)
    monkeypatch.setattr(_machine, "glob", SimpleNamespace(glob=lambda pattern: sorted(files, reverse=True)))


def test_gpus_have_their_names_by_index(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nvidia(machine, monkeypatch, ("H100", "GPU-a"), ("H100", "GPU-b"))

    assert _machine.gpu_names({}) == {"0": "GPU-a", "1": "GPU-b"}


def test_different_gpus_are_named_only_in_pci_bus_order(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nvidia(machine, monkeypatch, ("A100", "GPU-a"), ("H100", "GPU-b"))

    assert _machine.gpu_names({}) == {}
    assert _machine.gpu_names({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {}
    assert _machine.gpu_names({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == {"0": "GPU-a", "1": "GPU-b"}


def test_no_gpu_names_are_known_if_one_is_missing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nvidia(machine, monkeypatch, ("H100", "GPU-a"), ("H100", ""))

    assert _machine.gpu_names({}) == {}
    of_nvidia(machine, monkeypatch)
    assert _machine.gpu_names({}) == {}
