"""Answers of torch about the launcher in a worker script: the same under both launchers."""

from __future__ import annotations

import re

import pytest

from tests.frameworks.starts import Seen, reports, run, script

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

DIFFERENT = {
    "MASTER_ADDR": "the loopback address itself, which needs no resolver; torchrun says localhost",
    "MASTER_PORT": "any free port",
    "TORCHELASTIC_RUN_ID": "drawn anew for each job",
    "TORCHELASTIC_ERROR_FILE": "below a folder that is drawn anew; its end is compared",
}
"""Variables whose values may differ, with the reason; every other is the same to the letter."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[Seen]]]:
    """By launcher: stderr and reports of a job whose last rank raises under torch's `record`."""
    found = {}
    folder = tmp_path_factory.mktemp("seen")
    for launcher in ("torch.distributed.run", "elasticlib.run"):
        options = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "--role=trainer"]
        err = run(launcher, *options, *script("seen", folder, 1), folder=folder, status=1)
        found[launcher] = err, reports(folder)
    return found


def test_a_script_sees_the_same_under_both_launchers(runs: dict[str, tuple[str, list[Seen]]]) -> None:
    torchs, ours = (seen for _, seen in runs.values())

    assert [True, True] == [seen["launched"] for seen in ours]
    assert [without(seen, DIFFERENT) for seen in torchs] == [without(seen, DIFFERENT) for seen in ours]


def test_the_variables_that_differ_are_there_and_mean_the_same(runs: dict[str, tuple[str, list[Seen]]]) -> None:
    torchs, ours = (seen for _, seen in runs.values())

    for their, our in zip(torchs, ours, strict=True):
        assert set(DIFFERENT) == {name for name in DIFFERENT if name in their["environment"]} & set(our["environment"])
        (end,) = {seen["environment"]["TORCHELASTIC_ERROR_FILE"].split("/attempt_")[1] for seen in (their, our)}
        assert f"0/{our['rank']}/error.json" == end
    assert "127.0.0.1" == ours[0]["environment"]["MASTER_ADDR"]


def test_an_error_that_torchs_record_wrote_is_in_the_summary(runs: dict[str, tuple[str, list[Seen]]]) -> None:
    for err, _ in runs.values():
        summary = err[err.index("Root Cause") :]
        assert re.search(r"rank +: 1 \(local_rank: 1\)", summary), summary
        assert re.search(r"exitcode +: 1 ", summary), summary
        assert "ValueError: no such digit: 11" in summary
        assert 'seen.py", line' in summary


def without(seen: Seen, names: dict[str, str]) -> Seen:
    environment = {name: value for name, value in seen["environment"].items() if name not in names}
    return {**seen, "environment": environment}
