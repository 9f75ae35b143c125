"""Which tests a command runs: a sample of the long ones, unless somebody wants more or others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = "tests/frameworks"
FILE = f"{FOLDER}/test_trainers.py"


def chosen(*args: str, **environment: str) -> set[str]:
    """The tests of `FOLDER` that ``pytest`` *args* would run."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "ELASTICLIB_SAMPLE")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith(FOLDER)}


@pytest.fixture(scope="module")
def whole() -> set[str]:
    return chosen(FOLDER, "--whole")


@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_a_seeded_sample_of_the_long_tests_is_the_default_everywhere(whole: set[str]) -> None:
    """In CI it is the same: what a newcomer waits for is what a change waits for."""
    sample = chosen(FOLDER)

    assert set() < sample < whole
    assert sample == chosen(FOLDER, CI="true")
    assert sample != chosen(FOLDER, ELASTICLIB_SAMPLE="another")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("args", [(FILE,), (FOLDER, "-k", "test_trainers.py")])
def test_command_that_names_files_or_tests_runs_all_of_them(args: tuple[str, ...], whole: set[str]) -> None:
    assert chosen(*args) == {test for test in whole if test.startswith(FILE)}
