"""Rows 197 to 200: binding of workers to CPUs, on a machine whose sysfs and devices are made up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checklist.peers import Peer
from tests.unit.numa.machines import ALLOWED, EXPECTED, TWO_PACKAGES

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

PROGRAM = """
import builtins, inspect, json, os, sys, types
import torch

facts = json.loads(sys.argv[1])
plain_open, plain_listdir = builtins.open, os.listdir

def here(path):
    return facts["root"] + path if str(path).startswith("/sys/") else path

builtins.open = lambda file, *args, **options: plain_open(here(file), *args, **options)
os.listdir = lambda path=".": plain_listdir(here(path))
os.sched_getaffinity = lambda pid: set(facts["allowed"])
torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = torch.accelerator.device_count = lambda: len(facts["buses"])
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
    pci_domain_id=0, pci_bus_id=facts["buses"][index], pci_device_id=0
)

from {numa} import binding

wrap = binding._maybe_wrap_command_args_with_numa_binding
NAME = facts.get("name") or next(name for name in inspect.signature(wrap).parameters if name.endswith("_index"))

def wrapped(mode, gpu, *fall_back):
    options = binding.NumaOptions(binding.AffinityMode(mode), *fall_back)
    try:
        return wrap(("train", "--fast"), numa_options=options, **{NAME: gpu})
    except Exception as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}

print(json.dumps([wrapped(*call) for call in facts["calls"]]))
"""


def wrapped(
    peer: Peer, folder: Path, *calls: tuple[Any, ...], allowed: frozenset[int] = ALLOWED, path: str = ""
) -> Any:
    """Return the wrapped command for each (mode, GPU, fallback) on the machine of the tests."""
    TWO_PACKAGES.write(folder / "machine")
    buses = [TWO_PACKAGES.bus(gpu) for gpu in range(len(TWO_PACKAGES.gpus))]
    facts = {"root": str(folder / "machine"), "buses": buses, "allowed": sorted(allowed), "calls": calls}
    done = peer.python(PROGRAM, json.dumps(facts), env={"PATH": path})
    assert done.returncode == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.fixture
def numactl(tmp_path: Path) -> str:
    """A folder for PATH in which numactl is."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/numactl").touch(0o755)
    return str(tmp_path / "programs")


@pytest.fixture
def one_cpu() -> Iterator[set[int]]:
    """This process, and so what it starts, may use one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield {max(before)}
    os.sched_setaffinity(0, before)


@pytest.mark.row(197)
def test_without_the_option_workers_have_the_launchers_cpus(peer: Peer, one_cpu: set[int]) -> None:
    script = peer.script("import os; os.write(1, f'cpus {sorted(os.sched_getaffinity(0))}\\n'.encode())")

    done = peer.run("--nproc-per-node", "2", script)

    assert 2 == done.out.count(f"cpus {sorted(one_cpu)}"), done.err


@pytest.mark.row(198)
def test_each_mode_computes_the_cpus_of_each_gpu(peer: Peer, tmp_path: Path, numactl: str) -> None:
    gpus = range(len(TWO_PACKAGES.gpus))

    found = wrapped(peer, tmp_path, *[(mode, gpu) for mode in EXPECTED for gpu in gpus], path=numactl)

    commands = iter(found)
    assert EXPECTED == {mode: [next(commands)[1].removeprefix("--physcpubind=") for _ in gpus] for mode in EXPECTED}


@pytest.mark.row(198)
def test_fewer_cores_than_gpus_cannot_be_divided(peer: Peer, tmp_path: Path, numactl: str) -> None:
    [error] = wrapped(peer, tmp_path, ("exclusive", 1), allowed=frozenset({0, 12, 1, 8}), path=numactl)

    assert "RuntimeError" in error["kinds"]


@pytest.mark.row(199)
def test_without_numactl_a_command_is_refused_or_left_as_it_is(peer: Peer, tmp_path: Path) -> None:
    refused, fallen_back = wrapped(peer, tmp_path, ("node", 0, False), ("node", 0, True), path=str(tmp_path))

    assert "RuntimeError" in refused["kinds"]
    assert "numactl" in refused["text"]
    assert ["train", "--fast"] == fallen_back


@pytest.mark.row(200)
def test_a_command_is_run_through_numactl_with_compact_ranges(peer: Peer, tmp_path: Path, numactl: str) -> None:
    allowed = frozenset({0, 1, 2, 12, 14, 15, 9})

    [command] = wrapped(peer, tmp_path, ("node", 1, False), allowed=allowed, path=numactl)

    assert ["numactl", "--physcpubind=0-2,12,14-15", "train", "--fast"] == command
