"""Some processes of a node are stopped while its workers run on: these end before others get their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib import processes
from tests.process import pairs
from tests.process.pairs import LIMIT, Machine, of_world, starts
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

STOPPED = [
    ("launcher",),
    ("sidecar",),
    ("spawner",),
    ("launcher", "sidecar"),
    ("launcher", "spawner"),
    ("sidecar", "spawner"),
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with pairs.two(lambda port, name: Machine(tmp_path, port, name)) as made:
        yield made


@pytest.mark.parametrize("parts", STOPPED, ids=" and ".join)
def test_workers_end_before_others_get_their_ranks(
    pair: tuple[Machine, Machine], tmp_path: Path, parts: tuple[str, ...]
) -> None:
    host, other = pair
    wait_until(lambda: len(of_world(tmp_path, 2)) >= 2, LIMIT)
    worker = next(pid for rank, world, pid in starts(tmp_path) if (rank, world) == (1, 2))
    stopped = [other.part(name, worker) for name in parts]
    ending = processes.handle_of(worker)
    before = len(starts(tmp_path))
    pairs.stop(stopped)
    try:
        if parts != ("spawner",):  # with that alone the contact is whole
            processes.wait_for_ends([ending], LIMIT)
            assert ending.has_ended(), "the worker runs on"
            assert before == len(starts(tmp_path))
            wait_until(lambda: len(starts(tmp_path)) > before, LIMIT)
    finally:
        ending.close()
        pairs.go_on(pid for pid in stopped if Path(f"/proc/{pid}").exists())

    wait_until(lambda: {0, 1} == {rank for rank, world, _ in starts(tmp_path)[before:] if world == 2} or
                    parts == ("spawner",), LIMIT)  # fmt: skip
    (tmp_path / "go").touch()
    assert [0, 0] == [host.launcher.wait(LIMIT), other.launcher.wait(LIMIT)]
