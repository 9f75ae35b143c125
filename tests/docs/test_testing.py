"""The page about tests: its files run as they stand, and it names every option and setting that there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elasticlib
from elasticlib.testing.ranks import _rank_options
from tests.test_packaging import settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (Path(elasticlib.__file__).parent / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
FAILS = {"test_deadlock.py": re.findall(r"^rank \d: test_deadlock.*", PAGE, re.M)}
"""Files of the page with a test that is to fail, and what that shows."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has all files of the page, with the lines at which they stand there in a file of their own."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(f"# {name}\n{code}")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def test_every_block_of_python_is_a_file() -> None:
    assert len(FILES) == PAGE.count("```python\n")


@pytest.mark.slow
@pytest.mark.sampled(0.4)
def test_its_files_run_as_they_stand(folder: Path) -> None:
    done = run(folder, "-m", "pytest", "-p", "elasticlib.testing.pytest_plugin", "-p", "no:cacheprovider", "-rf")

    failed = set(re.findall(r"^FAILED (\w+\.py)::", done.stdout, re.M))
    assert set(FAILS) == failed, done.stdout
    assert [] == [line for lines in FAILS.values() for line in lines if line not in done.stdout]
    assert re.search(r"^=+ 1 failed, \d+ passed in", done.stdout, re.M), done.stdout


@pytest.mark.slow
@pytest.mark.sampled(0.5)
def test_its_suite_runs_under_unittest(folder: Path) -> None:
    done = run(folder, "-m", "unittest", "test_suite")

    assert done.stderr.rstrip().endswith("OK"), done.stderr


def test_page_shows_where_both_ranks_of_its_deadlock_are() -> None:
    assert 2 == len(FAILS["test_deadlock.py"])


def test_page_names_every_option() -> None:
    assert [] == [name for name in _rank_options.NAMES if f"`{name}=" not in PAGE]


def test_page_names_every_setting() -> None:
    source = (ROOT / "elasticlib" / "testing" / "pytest_plugin" / "__init__.py").read_text(encoding="utf-8")
    found = re.findall(r'addini\("(\w+)"|addoption\("([\w-]+)"', source)

    assert found
    assert [] == [name or option for name, option in found if f"`{name or option}`" not in PAGE]


def test_the_extra_that_it_installs_is_there() -> None:
    assert "`pip install 'PATH_OF_THIS_CHECKOUT[pytest]'`" in PAGE
    assert settings()["options.extras_require"]["pytest"].split()
