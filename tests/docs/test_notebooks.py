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


PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    # Without torch's C++, which says that no name server answers.
    assert (done.returncode, re.sub(r"\[W\d+ .*\n", "", done.stderr)) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_program_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    *shown, results, left = run(PROGRAMS[0], tmp_path).splitlines()

    assert ("{0: 0.02, 1: 0.02}", "[]") == (results, left)
    assert [f"rank 0: step {step}" for step in range(50)] == [line for line in shown if line.startswith("rank 0")]


@pytest.mark.slow
def test_pool_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    promised = re.findall(r"# (\{0.*|\[0.*)", PROGRAMS[1])

    shown = run(PROGRAMS[1], tmp_path).splitlines()

    assert [line for line in shown if line.startswith(("{", "["))][-2:] == promised


def test_page_names_every_method_of_a_job() -> None:
    own = {
        "begin",
        "run",
        "attach",
        "attach_elsewhere",
        "sink",
        "inbox",
        "started",
        "ends_with_program",
        "note_engine",
        "is_handed_over",
        "ask_to_stop",
    }  # for whoever carries it out
    public = {name for name in vars(Job) if not name.startswith("_")} - own

    assert {name for name in public if f"`job.{name}(" not in PAGE} == set()
