"""Workers whose log files, or whose error files, have no room left on their disk."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from elasticlib import ChildFailedError, DefaultLogsSpecs, LaunchConfig, Std, elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]


def launch(duty: object, disk: Path, tee: Std = Std.NONE) -> dict[int, object]:
    """Run *duty* on two workers whose streams go to *disk*."""
    specs = DefaultLogsSpecs(log_dir=str(disk), redirects=Std.ALL, tee=tee)
    return elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0, logs_specs=specs), duty)()  # type: ignore[arg-type]


def prints() -> None:
    """More than fits."""
    for _ in range(10_000):
        print("x" * 80)


def prints_from_a_buffer() -> None:
    """The same, by a stream that writes at its end only."""
    sys.stdout = open(1, "w", closefd=False, buffering=1 << 20)
    sys.stdout.write("x" * 500_000)


def logs() -> str:
    """The same, by a logger, which goes on where it cannot write."""
    logging.basicConfig(stream=sys.stdout)
    for _ in range(2000):
        logging.getLogger().warning("x" * 80)
    return "trained on"


@pytest.mark.parametrize("tee", [Std.NONE, Std.ALL])
def test_a_print_that_finds_no_room_is_the_error(tee: Std, small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is raised in the worker, and its report needs no room on that disk."""
    with pytest.raises(ChildFailedError) as caught:
        launch(prints, small_disk, tee)

    assert isinstance(caught.value.__cause__, OSError)
    assert all("No space left on device" in failure.message for failure in caught.value.failures.values())


def test_an_end_that_finds_no_room_is_explained(small_disk: Path) -> None:
    """Exit status 120 is the interpreter's for output that it could not write."""
    with pytest.raises(ChildFailedError) as caught:
        launch(prints_from_a_buffer, small_disk)

    _, failure = caught.value.get_first_failure()
    assert (120, True) == (failure.exitcode, "a full disk" in failure.hint)


def test_lines_that_a_logger_could_not_write_are_warned_of(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing failed, and yet lines are missing: the launcher says so."""
    assert {0: "trained on", 1: "trained on"} == launch(logs, small_disk)

    assert 1 == sum("lines that workers could not write are lost" in record.getMessage() for record in caplog.records)
