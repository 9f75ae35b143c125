"""The training script of `notebooks/` under the launcher: it learns, and a lost worker costs it nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "notebooks" / "train_digits.py"
LIMIT = 120.0
"""Seconds that any single run may take."""
LAUNCHER = ("-m", "elasticlib.run", "--nproc-per-node", "2", "--max-restarts", "1")
LOSS = ("--fail-rank", "1", "--fail-epoch", "3")


def run(*command: str | Path) -> str:
    """Run the command, check that it succeeds, and return its output."""
    names = ("PET_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    ended = subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def accuracy(printed: str, epochs: int, world_size: int) -> float:
    found = re.search(rf"^test accuracy ([01]\.\d+) after {epochs} epochs \(world size {world_size}\)$", printed, re.M)
    assert found is not None, printed
    return float(found[1])


def checkpoint(folder: Path, epoch: int) -> dict[str, object]:
    state: dict[str, object] = torch.load(folder / f"epoch-{epoch:04d}.pt", weights_only=True)
    return state


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and checkpoints of a run of 8 epochs that lost rank 1 in the third epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    return run(*LAUNCHER, SCRIPT, "--checkpoint-dir", folder, *LOSS), folder


def test_a_run_that_loses_a_worker_learns_the_digits(interrupted: tuple[str, Path]) -> None:
    printed, _ = interrupted

    assert accuracy(printed, epochs=8, world_size=2) >= 0.95


def test_restarted_run_continues_after_its_newest_checkpoint(interrupted: tuple[str, Path]) -> None:
    printed, folder = interrupted

    assert f"resumed from epoch 2 in {folder} (restart 1)" in printed.splitlines()
    assert [str(epoch) for epoch in range(1, 9)] == re.findall(r"^epoch (\d+)/8 loss", printed, re.M)


def test_the_last_two_checkpoints_are_kept_and_nothing_half_written(interrupted: tuple[str, Path]) -> None:
    _, folder = interrupted

    assert ["epoch-0007.pt", "epoch-0008.pt"] == sorted(path.name for path in folder.iterdir())


@pytest.mark.sampled(0.1)
def test_a_lost_worker_changes_no_bit_of_what_is_learned(interrupted: tuple[str, Path], tmp_path: Path) -> None:
    printed = run(*LAUNCHER, SCRIPT, "--checkpoint-dir", tmp_path)

    assert "resumed" not in printed
    torch.testing.assert_close(checkpoint(tmp_path, 8), checkpoint(interrupted[1], 8), rtol=0, atol=0)


@pytest.mark.sampled(0.1)
def test_script_continues_alone_past_a_truncated_checkpoint(interrupted: tuple[str, Path], tmp_path: Path) -> None:
    """Also: another number of workers than the checkpoint's can take it up."""
    whole, cut = (interrupted[1] / f"epoch-000{epoch}.pt" for epoch in (7, 8))
    (tmp_path / whole.name).write_bytes(whole.read_bytes())
    (tmp_path / cut.name).write_bytes(cut.read_bytes()[:1000])

    printed = run(SCRIPT, "--checkpoint-dir", tmp_path)

    assert f"resumed from epoch 7 in {tmp_path} (restart 0)" in printed.splitlines()
    assert accuracy(printed, epochs=8, world_size=1) >= 0.95
