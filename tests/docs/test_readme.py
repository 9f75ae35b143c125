"""README's snippets run as pasted, and print what README shows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.test_testing import run
from tests.test_packaging import settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 90
FUNCTION, TEST = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_function_of_the_readme_prints_what_the_readme_shows(tmp_path: Path) -> None:
    [promised] = re.findall(r"# (\{0: .*\})$", FUNCTION, re.MULTILINE)
    (tmp_path / "program.py").write_text(FUNCTION)

    done = run(tmp_path, "program.py")

    assert (0, f"{promised}\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.slow
def test_its_test_passes_as_pasted(tmp_path: Path) -> None:
    (tmp_path / "test_pasted.py").write_text(TEST)

    done = run(tmp_path, "-m", "pytest", "-p", "elasticlib.testing.pytest_plugin", "-p", "no:cacheprovider")

    assert re.search(r"^=+ 1 passed in", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_extras_are_installed_from_the_checkout() -> None:
    """There is no package of this name to install extras of."""
    sources = [*(ROOT / "elasticlib").rglob("*.py"), *(ROOT / "elasticlib").rglob("*.md"), ROOT / "README.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}

    assert [] == [path.name for path, text in texts.items() if "elasticlib[" in text]
    named = re.findall(r"PATH_OF_THIS_CHECKOUT\[(\w+)\]", "".join(texts.values()))
    assert {"pytest"} == set(named)
    assert set(named) <= set(settings()["options.extras_require"])


FAILS = """import os


def train():
    settings = {}
    if os.environ["RANK"] == "1":
        settings["learning_rate"]


train()
"""


@pytest.mark.slow
def test_its_lines_of_a_report_are_those_of_this_failure(tmp_path: Path) -> None:
    section = README.partition("## A failure\n")[2].partition("\n## ")[0]
    [sample] = re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(FAILS)

    done = run(tmp_path, "-m", "elasticlib.run", "--nproc-per-node", "2", "train.py")

    shown = done.stderr.replace(os.uname().nodename, "node0").splitlines()
    lines = sample.splitlines()
    assert "Two lines of the report:" in README and 2 == len(lines)
    assert lines == [line for line in shown if line in lines]
