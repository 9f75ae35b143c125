"""What projects do when they are imported has the same effect in each run's workers as in a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

SCRIPT = str(Path(__file__).parent / "scripts" / "habits.py")
RUN = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "1", "--max-restarts", "1"]


def seen(*command: str) -> list[dict[str, Any]]:
    """What each attempt of a program printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_thirty_habits_have_the_same_effect_in_each_run_and_restart() -> None:
    [plain] = seen(sys.executable, "-u", SCRIPT)

    runs = [*seen(*RUN, SCRIPT), *seen(*RUN, SCRIPT, "fails once"), *seen(*RUN, "--preload", "", SCRIPT)]

    assert 30 == len(plain)
    assert 4 == len(runs)
    for run in runs:
        assert {} == {name: (plain[name], run[name]) for name in plain if plain[name] != run[name]}
