"""Changes of descriptors by a worker's code, without harm to its report or its files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch

pytestmark = pytest.mark.slow

METHODS = ["forkserver", "spawn", "fork"]
PAGE = b"of the user" * 20


def config(method: str) -> LaunchConfig:
    """A launch without restarts whose fork server imports nothing, so that it starts in milliseconds."""
    return LaunchConfig(nproc_per_node=1, preload=(), max_restarts=0, start_method=method)  # type: ignore[arg-type]


def memories() -> dict[str, int]:
    """The descriptors by which this worker's launcher learns of it, by name."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("/memfd:"):
            found[target.removeprefix("/memfd:").removesuffix(" (deleted)")] = int(number)
    return found


def puts_own_files_in_place(folder: Path) -> list[str]:
    """Close all descriptors and open own files under the numbers that were the launcher's; return their names."""
    found = memories()
    os.closerange(3, 4096)
    for name, number in found.items():
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        if file != number:
            os.dup2(file, number)
            os.close(file)
        os.write(number, PAGE)
    print("still at work", file=sys.stderr, flush=True)
    return sorted(found)


def puts_own_files_in_place_and_fails(folder: Path) -> None:
    raise ValueError(*puts_own_files_in_place(folder))


@pytest.mark.parametrize("method", METHODS)
def test_result_of_a_worker_that_reused_the_descriptors_arrives(method: str, tmp_path: Path) -> None:
    result: dict[int, Any] = elastic_launch(config(method), puts_own_files_in_place)(tmp_path)

    assert {"report", "tail", "faults"} <= set(result[0])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(result[0], PAGE)


@pytest.mark.parametrize("method", METHODS)
def test_exception_of_a_worker_that_reused_the_descriptors_arrives(method: str, tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(method), puts_own_files_in_place_and_fails)(tmp_path)

    assert isinstance(caught.value.__cause__, ValueError)
    assert {"report", "tail", "faults"} <= set(caught.value.__cause__.args)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {PAGE}
