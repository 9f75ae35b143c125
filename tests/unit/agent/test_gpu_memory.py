"""Waiting for the memory of workers that ended: the reading program is a real one, the driver behind it is not."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib import records
from elasticlib.agent import _gpu_memory
from elasticlib.agent._gpu_memory import LATE, LIMIT, TIMEOUT, TOLERANCE, GpuMemory
from elasticlib.processes import Process, spawn, wait_readable

pytestmark = pytest.mark.slow

SHIM = str(Path(__file__).parents[2] / "shims" / "nvml")
ANSWERS = 20.0
NO_ANSWER = 0.2
BLOCK = 4 * TOLERANCE
Make = Callable[..., GpuMemory]


class Machine:
    """A machine with two GPUs, and the time on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gpus.json"
        self.now = 100.0
        self.uses(0, 0)

    def uses(self, *used: int | None) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps([[f"GPU-{number}", each] for number, each in enumerate(used)]))
        fresh.replace(self.path)

    def hangs(self) -> None:
        self.path.unlink()
        os.mkfifo(self.path)


@pytest.fixture
def reported() -> list[records.Record]:
    return []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(_gpu_memory, "DRIVER", str(driver))
    monkeypatch.syspath_prepend(SHIM)
    return Machine(tmp_path)


@pytest.fixture
def make(machine: Machine, reported: list[records.Record]) -> Iterator[Make]:
    made = list[GpuMemory]()

    def new(**environment: str) -> GpuMemory:
        whole = {**os.environ, "NVML_STATE": str(machine.path), **environment}
        memory = GpuMemory(whole, reported.append, clock=lambda: machine.now)
        made.append(memory)
        memory.open()
        return memory

    yield new
    for memory in made:
        memory.close()


def answers(memory: GpuMemory) -> bool:
    """Return whether the program that reads the memory answers in time."""
    return bool(wait_readable([memory], ANSWERS))


def after_workers(memory: GpuMemory) -> GpuMemory:
    """It, once a first reading has come, and after a first round."""
    assert answers(memory)
    memory.begin()
    assert memory.look() is None  # nothing is waited for before the first round
    return memory


def looked(memory: GpuMemory) -> float | None:
    """Return the result of a look, once an answer has arrived."""
    assert answers(memory)
    return memory.look()


def test_free_memory_costs_one_reading(make: Make, reported: list[records.Record]) -> None:
    memory = after_workers(make())
    memory.begin()

    assert looked(memory) is None
    assert [records.GpuMemoryFree(0.0)] == reported


def test_workers_wait_until_driver_freed_memory_of_previous_workers(
    make: Make, machine: Machine, reported: list[records.Record]
) -> None:
    memory = after_workers(make())
    machine.uses(BLOCK, 0)
    memory.begin()

    assert pytest.approx(LIMIT + LATE) == memory.look()
    assert not wait_readable([memory], NO_ANSWER)
    machine.now += 0.5
    assert pytest.approx(LIMIT + LATE - 0.5) == memory.look()
    machine.uses(TOLERANCE, 0)
    assert looked(memory) is None

    assert [records.GpuMemoryFree(0.5)] == reported


def test_the_answer_to_an_interrupted_wait_does_not_end_the_next_one(
    make: Make, machine: Machine, reported: list[records.Record]
) -> None:
    memory = after_workers(make())
    machine.uses(BLOCK, 0)
    memory.begin()
    assert memory.look() is not None
    memory.begin()

    assert looked(memory) is not None
    machine.uses(0, 0)
    assert looked(memory) is None
    assert [records.GpuMemoryFree(0.0)] == reported


def test_memory_of_an_interrupted_wait_is_waited_for_again(make: Make, machine: Machine) -> None:
    memory = after_workers(make(**{TIMEOUT: "0.5"}))
    machine.uses(BLOCK, 0)
    memory.begin()
    assert answers(memory)  # nobody looks at it
    memory.begin()

    assert memory.look() is not None


def test_memory_never_freed_is_reported_once_and_not_awaited_again(
    make: Make, machine: Machine, reported: list[records.Record]
) -> None:
    memory = after_workers(make(**{TIMEOUT: "0.25"}))
    machine.uses(0, BLOCK)
    memory.begin()
    machine.now += 0.25
    assert looked(memory) is None
    memory.begin()
    assert looked(memory) is None

    assert [records.GpuMemoryHeld({"GPU 1": BLOCK}, 0.25), records.GpuMemoryFree(0.0)] == reported
    assert "GPU 1 holds 2,048 MiB more than before the first workers" in str(reported[0])


def test_a_driver_that_hangs_costs_the_limit_once(make: Make, machine: Machine, reported: list[records.Record]) -> None:
    memory = after_workers(make())
    machine.hangs()
    memory.begin()
    assert LIMIT + LATE == memory.look()
    machine.now += LIMIT + LATE
    assert memory.look() is None
    memory.begin()
    assert memory.look() is None

    assert [records.GpuMemoryUnknown("the driver has not answered for 30 s")] == reported


def test_a_driver_that_hung_from_the_first_is_never_waited_for(
    make: Make, machine: Machine, reported: list[records.Record]
) -> None:
    machine.hangs()
    memory = make()
    memory.begin()
    memory.begin()

    assert memory.look() is None
    assert [] == reported


def test_a_lost_gpu_does_not_hide_the_other(make: Make, machine: Machine) -> None:
    memory = after_workers(make())
    machine.uses(None, BLOCK)
    memory.begin()

    assert not wait_readable([memory], NO_ANSWER)
    assert memory.look() is not None


def test_gpus_that_workers_do_not_see_are_not_waited_for(make: Make, machine: Machine) -> None:
    memory = after_workers(make(CUDA_VISIBLE_DEVICES="GPU-1"))
    machine.uses(BLOCK, 0)
    memory.begin()

    assert looked(memory) is None


def test_driver_that_refuses_is_reported_once(make: Make, reported: list[records.Record]) -> None:
    memory = make(NVML_BREAKS="Driver/library version mismatch")
    assert answers(memory)
    memory.begin()
    memory.begin()

    assert memory.look() is None
    assert [records.GpuMemoryUnknown("NVMLError: Driver/library version mismatch")] == reported


def test_a_program_that_ends_before_its_first_request_keeps_its_reason(
    make: Make, reported: list[records.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(command: list[str], environment: dict[str, str], descriptor: int) -> Process:
        process = spawn(command, environment, descriptor)
        assert process.ends(ANSWERS)
        return process

    monkeypatch.setattr(_gpu_memory, "spawn", ended)
    memory = make(NVML_BREAKS="Driver/library version mismatch")
    assert answers(memory)
    memory.begin()

    assert memory.look() is None
    assert [records.GpuMemoryUnknown("NVMLError: Driver/library version mismatch")] == reported


def test_a_reading_program_that_is_killed_amid_a_wait_ends_the_wait(make: Make, reported: list[records.Record]) -> None:
    memory = after_workers(make())
    assert memory._process is not None
    memory._process.kill()
    memory.begin()

    assert memory.look() is None
    assert [records.GpuMemoryUnknown("the program that reads it has exited")] == reported


def test_nothing_of_it_is_left_after_its_end_even_where_the_driver_hangs(make: Make, machine: Machine) -> None:
    machine.hangs()
    memory = make()
    assert memory._process is not None
    pid = memory._process.pid
    memory.close()

    assert -1 == memory.fileno()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_reading_program_ends_when_its_agent_closes_the_link(make: Make) -> None:
    memory = after_workers(make())
    assert memory._process is not None
    assert memory._link is not None
    memory._link.close()

    assert memory._process.ends(ANSWERS)


def test_the_program_keeps_nothing_open_that_is_not_its_own(make: Make) -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    after_workers(make())
    os.close(theirs)

    assert b"" == os.read(ours, 1)  # whoever waits for the last writer of a pipe must not wait for it
    os.close(ours)


@pytest.mark.parametrize("missing", ["driver", "bindings", "place of the bindings", "time"])
def test_reading_program_is_not_started_if_nothing_can_be_waited_for(
    missing: str, make: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch, reported: list[records.Record]
) -> None:
    if missing == "driver":
        Path(_gpu_memory.DRIVER).unlink()
    elif missing == "bindings":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "place of the bindings":
        monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    memory = make(**({TIMEOUT: "0"} if missing == "time" else {}))
    memory.begin()
    memory.begin()

    assert (-1, None, None) == (memory.fileno(), memory.look(), memory._process)
    assert [] == reported


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_time_that_is_none_is_ignored_with_a_warning(text: str, make: Make, reported: list[Any]) -> None:
    make(**{TIMEOUT: text})

    assert [(TIMEOUT, text)] == [(each.name, each.value) for each in reported]


def test_no_signal_of_a_terminal_reaches_the_program(make: Make) -> None:
    memory = make()
    assert memory._process is not None

    assert os.getsid(memory._process.pid) != os.getsid(0)
    memory._process.send(signal.SIGKILL)
