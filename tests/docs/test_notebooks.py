"""The page about notebooks and programs: its program runs as it says, and it names every method of a job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import elasticlib
from elasticlib import Job

PAGE = (Path(elasticlib.__file__).parent / "docs" / "notebooks.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_program_runs_as_it_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "program.py").write_text(program)

    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    *shown, results, left = done.stdout.splitlines()
    assert ("{0: 0.02, 1: 0.02}", "[]") == (results, left)
    assert [f"rank 0: step {step}" for step in range(50)] == [line for line in shown if line.startswith("rank 0")]


def test_it_names_every_method_of_a_job() -> None:
    own = {"begin", "run", "attach", "sink", "inbox", "started", "ends_with_program"}  # for whoever carries it out
    public = {name for name in vars(Job) if not name.startswith("_")} - own

    assert {name for name in public if f"`job.{name}(" not in PAGE} == set()
