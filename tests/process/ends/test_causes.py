"""A restart is reported with its root cause, though consequences of it are often seen first."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from tests.process import duties
from tests.process.launches import hold_second_start

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("while_starting", [False, True])
def test_the_death_of_the_spawner_is_reported_as_that(
    while_starting: bool, restarts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where it dies before the last worker is started: the round has begun all the same."""
    config = LaunchConfig(
        nproc_per_node=2, max_restarts=restarts, start_method="fork" if while_starting else "forkserver"
    )
    starts = tmp_path / "starts the second worker"
    if while_starting:
        hold_second_start(monkeypatch, starts, seconds=60)

    with contextlib.nullcontext() if restarts else pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, duties.loses_its_spawner)(starts if while_starting else None)

    if caught is not None:
        assert str(caught.value).startswith("the ")
        assert "process   : spawner of elasticlib" in str(caught.value)
        assert str(caught.value.get_first_failure()[1].message) == str(caught.value.__cause__)
    else:
        (line,) = [record.getMessage() for record in caplog.records if "ended:" in record.getMessage()]
        assert re.fullmatch(r"round 0 ended: the .*process.* on node .*; restart 1 of 1", line)


@pytest.mark.parametrize("ranks", [2, 4])
def test_restart_names_the_killed_rank_though_its_peers_fail_first(
    ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel closes the sockets of a killed process, frees what it holds, and only then lets others see its end."""
    caplog.set_level(logging.WARNING, "elasticlib")
    config = LaunchConfig(nproc_per_node=ranks, max_restarts=1)

    results = elastic_launch(config, duties.dies_slowly_in_a_collective)(ranks - 1)

    assert dict.fromkeys(range(ranks), "1") == results
    (line,) = [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]
    assert re.fullmatch(
        rf"round 0 ended: rank {ranks - 1} on node .* was ended by SIGKILL \(signal 9\); restart 1 of 1", line
    )
