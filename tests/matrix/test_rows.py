"""The table of environments has a row for every promise, and says what came of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.interpreters import ROOT, find, promised, settings
from tests.matrix.rows import ROWS, Row, judge, run, table

PURE_PYTHON = ("attr", "attrs", "cloudpickle", "typing_extensions.py")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
LIMIT = 120.0


def test_every_python_that_is_promised_has_a_row_and_no_other() -> None:
    assert promised() == [row.python for row in ROWS if row.torch is None]
    assert settings()["options"]["python_requires"] == f">={promised()[0]}"


def test_linter_and_type_checker_assume_the_oldest_python() -> None:
    oldest = promised()[0]

    assert f'target-version = "py{oldest.replace(".", "")}"' in (ROOT / ".ruff.toml").read_text()
    assert oldest == settings()["mypy"]["python_version"]


def test_the_torch_that_the_constraints_pin_has_a_row_and_a_newer_one() -> None:
    pinned = (ROOT / "tests" / "constraints.txt").read_text().strip().removeprefix("torch==")

    torches = [row.torch for row in ROWS if row.torch]

    assert pinned == torches[0]
    assert [int(part) for part in torches[-1].split(".")] > [int(part) for part in pinned.split(".")]


def test_a_python_that_is_not_here_is_a_row_and_no_failure(tmp_path: Path) -> None:
    outcome = run(Row("3.99"), tmp_path, lambda text: None)

    assert not outcome.is_bad
    assert table([outcome]).splitlines()[-1].startswith("| 3.99 | - |")
    assert table([outcome]).endswith("| not here |")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("status", "counts", "bad", "verdict"),
    [
        (0, 'tests="9" failures="0" errors="0" skipped="2"', False, "| 7 | 0 | 2 | 3 | good |"),
        (0, 'tests="9" failures="1" errors="1" skipped="0"', True, "| 7 | 2 | 0 | 3 | tests fail: "),
        (0, 'tests="0" failures="0" errors="0" skipped="0"', True, "| 0 | 0 | 0 | 3 | tests fail: "),
        (1, 'tests="9" failures="0" errors="0" skipped="0"', True, "| 9 | 0 | 0 | 3 | imports fail |"),
    ],
)
def test_a_row_is_good_when_all_is_imported_and_no_test_fails(
    tmp_path: Path, status: int, counts: str, bad: bool, verdict: str
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite {counts}/></testsuites>")

    outcome = judge(Row("3.12", "2.15.0"), "200 modules", status, report, tmp_path / "log", 3.0)

    assert bad == outcome.is_bad
    assert f"| 3.12 | 2.15.0 | 200 modules {verdict}" in table([outcome])


def test_a_row_whose_tests_did_not_even_begin_is_bad(tmp_path: Path) -> None:
    outcome = judge(Row("3.12"), "200 modules", 0, tmp_path / "none.xml", tmp_path / "log", 3.0)

    assert outcome.is_bad
    assert str(tmp_path / "log") in outcome.verdict


@pytest.fixture
def pure_packages(tmp_path: Path) -> str:
    """A folder with what every elasticlib needs, which any Python can import."""
    for name in PURE_PYTHON:
        (place,) = [Path(entry, name) for entry in sys.path if Path(entry, name).exists()][:1]
        (tmp_path / name).symlink_to(place)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in promised() if version == HERE or find(version)])
def test_every_module_is_importable_by_every_promised_python_here(version: str, pure_packages: str) -> None:
    python = sys.executable if version == HERE else str(find(version))

    done = subprocess.run(
        [python, "-B", "-S", str(ROOT / "tests" / "matrix" / "import_all.py")],
        env={"PYTHONPATH": pure_packages},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert 0 == done.returncode, done.stderr
    assert done.stdout.endswith(" 0 failed\n")
