"""A machine that sleeps, as a laptop or a paused virtual machine does: its clock stands still with it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import pairs
from tests.process.pairs import LIMIT, of_world, starts
from tests.shims import NEEDS_COMPILER, built
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment that loads the library that makes a clock stand still."""
    return built("still_clock", tmp_path_factory.mktemp("shim"))


class Machine(pairs.Machine):
    """One with a clock of its own."""

    def __init__(self, shim: dict[str, str], folder: Path, port: int, name: str) -> None:
        self._clock = folder / f"clock of {name}"
        self._clock.write_bytes(struct.pack("q", 0))
        super().__init__(folder, port, name, {**shim, "STILL_CLOCK": str(self._clock)})

    def sleep(self) -> None:
        """Every process stands still."""
        self._asleep, self._since = self.processes(), time.monotonic_ns()
        pairs.stop(self._asleep)

    def wake(self) -> None:
        """All go on, and know nothing of the time that went by."""
        self._clock.write_bytes(struct.pack("q", time.monotonic_ns() - self._since))
        pairs.go_on(self._asleep)


@pytest.fixture
def pair(shim: dict[str, str], tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with pairs.two(lambda port, name: Machine(shim, tmp_path, port, name)) as made:
        yield made


@pytest.mark.sampled(0.2)
def test_a_machine_that_slept_stops_its_workers_and_takes_part_again(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """By its own clock nothing has happened; without a look at the others' time it would work on for ever."""
    host, other = pair
    wait_until(lambda: len(of_world(tmp_path, 2)) >= 2, LIMIT)
    worker = next(pid for rank, world, pid in starts(tmp_path) if (rank, world) == (1, 2))
    alone = len(of_world(tmp_path, 1))
    other.sleep()
    wait_until(lambda: len(of_world(tmp_path, 1)) > alone, LIMIT)
    together = len(of_world(tmp_path, 2))
    other.wake()

    wait_until(lambda: not Path(f"/proc/{worker}").exists(), LIMIT)
    wait_until(lambda: len(of_world(tmp_path, 2)) >= together + 2, LIMIT)
    (tmp_path / "go").touch()

    assert [0, 0] == [host.launcher.wait(LIMIT), other.launcher.wait(LIMIT)]
