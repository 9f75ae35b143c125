"""Binding without a launch: through numactl, or this process; no device is touched here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.numa import AffinityMode, BindingError, NumaOptions, _gpu_addresses, binding
from elasticlib.numa._sysfs import read_topology
from tests.unit.numa.machines import ALLOWED, TWO_PACKAGES

NODE = NumaOptions(AffinityMode.NODE)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process on `TWO_PACKAGES`, with numactl."""
    TWO_PACKAGES.write(tmp_path)
    (tmp_path / "numactl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binding, "_addresses", lambda: tuple(TWO_PACKAGES.addresses))
    topology = read_topology(TWO_PACKAGES.addresses, str(tmp_path))
    monkeypatch.setattr(binding, "read_topology", lambda addresses: topology)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(ALLOWED))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """CPUs by thread, as given to `os.sched_setaffinity`."""
    affinities: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: affinities.update({pid: set(cpus)}))
    return affinities


@pytest.mark.usefixtures("machine")
def test_a_command_runs_through_numactl_on_ranges_of_cpus() -> None:
    command = binding._maybe_wrap_command_args_with_numa_binding(("train", "--fast"), device_index=1, numa_options=NODE)

    assert ("numactl", "--physcpubind=0-3,13-15", "train", "--fast") == command


def test_without_options_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_cpus", None)

    assert ("train",) == binding._maybe_wrap_command_args_with_numa_binding(
        ("train",), device_index=9, numa_options=None
    )
    assert print is binding._maybe_wrap_with_numa_binding(print, device_index=9, numa_options=None)
    binding._maybe_apply_numa_binding_to_current_process(device_index=9, numa_options=None)


@pytest.mark.usefixtures("machine")
def test_a_command_without_numactl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(
        RuntimeError, match=r"numa_options=node: numactl, which binds commands to CPUs, is not on PATH: install numactl"
    ):
        binding._maybe_wrap_command_args_with_numa_binding(("train",), device_index=1, numa_options=NODE)


@pytest.mark.usefixtures("machine")
def test_with_fallback_a_command_that_cannot_be_bound_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")

    command = binding._maybe_wrap_command_args_with_numa_binding(
        ("train",), device_index=1, numa_options=NumaOptions(AffinityMode.NODE, True)
    )

    assert ("train",) == command
    assert [logging.WARNING] == [record.levelno for record in caplog.records]
    assert "is not on PATH: install numactl" in caplog.text


@pytest.mark.usefixtures("machine")
def test_an_error_that_nobody_foresaw_is_one_of_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, ...]:
        raise OSError("the driver hangs")

    monkeypatch.setattr(binding, "_addresses", broken)

    with pytest.raises(
        BindingError, match="numa_options=node: the driver hangs; without this option, workers start unbound"
    ):
        binding._maybe_wrap_command_args_with_numa_binding(("train",), device_index=1, numa_options=NODE)


@pytest.mark.usefixtures("machine")
def test_a_process_binds_its_threads_but_those_that_were_bound_before(
    bound: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.get_native_id()
    tasks = [[own, 11, 12], [own, 11, 12, 13], [own, 11, 12, 13]]  # 11 starts 13 before its turn has come
    monkeypatch.setattr(os, "listdir", lambda path: [str(thread) for thread in tasks.pop(0)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2} if pid == 12 else set(ALLOWED))

    binding._maybe_apply_numa_binding_to_current_process(device_index=0, numa_options=NODE)

    node = {8, 9, 10, 11, 20, 21, 22, 23}
    assert {0: node, own: node, 11: node, 13: node} == bound


@pytest.mark.usefixtures("machine")
def test_thread_that_ends_during_binding_is_not_an_error(
    bound: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def affinity(pid: int) -> set[int]:
        if pid != 0:
            raise ProcessLookupError
        return set(ALLOWED)

    monkeypatch.setattr(os, "sched_getaffinity", affinity)

    binding._maybe_apply_numa_binding_to_current_process(device_index=4, numa_options=NODE)

    assert [0] == list(bound)


@pytest.mark.usefixtures("machine")
def test_a_function_binds_its_process_before_it_runs(bound: dict[int, set[int]]) -> None:
    def train(rate: float, *, epochs: int) -> tuple[float, int, set[int]]:
        return rate, epochs, bound[0]

    wrapped = binding._maybe_wrap_with_numa_binding(train, device_index=4, numa_options=NODE)

    assert "train" == wrapped.__name__
    assert {} == bound
    assert (0.5, 2, {4, 5, 6, 7, 16, 17, 18, 19}) == wrapped(0.5, epochs=2)


# Where the GPUs are.


def test_addresses_are_those_of_torchs_devices_in_the_kernels_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [(0, 0xDC, 0), (0x1A2B3, 1, 0x1F)]
    made = torch_with(
        "cuda",
        get_device_properties=lambda index: SimpleNamespace(
            **dict(zip(("pci_domain_id", "pci_bus_id", "pci_device_id"), facts[index], strict=True))
        ),
    )
    made.accelerator.device_count = lambda: 2
    monkeypatch.setitem(sys.modules, "torch", made)

    assert ["0000:dc:00.0", "1a2b3:01:1f.0"] == _gpu_addresses.gpu_addresses_here()


def answer(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make *code* replace the program that asks torch."""
    binding._listed_by_program.cache_clear()
    monkeypatch.setattr(_gpu_addresses, "__file__", "-c")
    plain = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda args, **options: plain([*args, code], **options))


@pytest.mark.slow
def test_another_program_lists_gpus_if_no_device_is_open_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with("xpu", is_initialized=lambda: False))
    answer(monkeypatch, "print('noise'); print('[\"0000:01:00.0\"]')")

    assert ("0000:01:00.0",) == binding._addresses()


@pytest.mark.slow
def test_failure_of_the_program_that_lists_gpus_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    answer(monkeypatch, "raise SystemExit('CUDA driver is too old')")

    with pytest.raises(BindingError, match="torch cannot list the GPUs: CUDA driver is too old"):
        binding._addresses()


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_process_with_a_device_open_asks_itself(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The rule holds for any accelerator; variables may have changed since it was started."""
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    made = torch_with(kind, is_initialized=lambda: True, get_device_properties=lambda index: place)
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(binding, "_listed_by_program", None)

    assert ("0000:dc:01.0",) == binding._addresses()


def test_a_torch_without_accelerator_has_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(None))
    answer(monkeypatch, "print('[]')")

    assert () == binding._addresses()
    assert [] == _gpu_addresses.gpu_addresses_here()


def torch_with(kind: str | None, **module: Any) -> Any:
    """A torch with one accelerator of *kind*, whose module has *module*."""
    accelerator = SimpleNamespace(
        is_available=lambda: kind is not None, current_accelerator=lambda: kind, device_count=lambda: 1
    )
    return SimpleNamespace(accelerator=accelerator, get_device_module=lambda _: SimpleNamespace(**module))
