"""The rows of the table: which Python, which torch, what is run; and one row's way from nothing to its outcome."""

from __future__ import annotations

import os
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from tests.matrix.interpreters import ROOT, find, settings

PURE = ("tests/unit", "tests/sim", "tests/test_architecture.py", "tests/test_exports.py", "tests/test_packaging.py")
REAL = (*PURE, "tests/contract", "tests/process")
"""With real workers, of which the usual sample runs."""
NAMES = "tests/test_names.py"
"""Compares with the names of one torch: that of the constraints."""
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
LIMIT = 1800.0
"""Seconds that a row's tests may take."""
WITHOUT_TORCH = ("numpy",)
"""Packages that tests need and that torch usually installs."""


@frozen
class Row:
    """One environment."""

    python: str
    torch: str | None = None

    @property
    def name(self) -> str:
        """Names the environment's folder, and the row in ``--only``."""
        return f"{self.python}-torch{self.torch}" if self.torch else self.python

    @property
    def tests(self) -> tuple[str, ...]:
        """Return the paths of the tests to run."""
        if self.torch is None:
            return PURE
        return (*REAL, NAMES) if f"torch=={self.torch}" in CONSTRAINTS.read_text() else REAL

    @property
    def packages(self) -> list[str]:
        """Return the packages that pip installs."""
        extras = ["pytest", *(["dev"] if self.torch else [])]
        requirements = settings()["options"]["install_requires"].split()
        requirements += [each for extra in extras for each in settings()["options.extras_require"][extra].split()]
        kept = {each for each in requirements if each not in ("torch", "mypy", "ruff")} | {"hypothesis", "pytest>=8.2"}
        return sorted(kept | {f"torch=={self.torch}", "numpy"} if self.torch else kept | set(WITHOUT_TORCH))


ROWS = (
    Row("3.10"),
    Row("3.11"),
    Row("3.12"),
    Row("3.13"),
    Row("3.11", torch="2.13.0"),
    Row("3.12", torch="2.15.0"),
)


@frozen
class Outcome:
    """Result of a row."""

    row: Row
    verdict: str
    """``good``, or what was wrong."""
    imports: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Return whether elasticlib failed there; a missing interpreter is not a failure."""
        return self.verdict not in ("good", "not here")


def run(row: Row, cache: Path, say: Callable[[str], object]) -> Outcome:
    """Make the row's environment unless it is there, import everything in it, run the tests."""
    base = find(row.python)
    if base is None:
        return Outcome(row, "not here")
    began = time.monotonic()
    try:
        python = _environment(row, base, cache, say)
    except subprocess.CalledProcessError as error:
        return Outcome(row, f"no environment: {' '.join(map(str, error.cmd[-3:]))} ended with {error.returncode}")
    say(f"{row.name}: importing")
    imported = subprocess.run(
        [python, "-B", ROOT / "tests" / "matrix" / "import_all.py"], capture_output=True, text=True, check=False
    )
    say(imported.stderr)
    imports = imported.stdout.strip()
    say(f"{row.name}: testing")
    report, log = cache / f"{row.name}.xml", cache / f"{row.name}.log"
    report.unlink(missing_ok=True)
    with log.open("w") as file:
        command = [python, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", f"--junit-xml={report}", *row.tests]
        # Not CI: what a row lacks on purpose may be skipped.
        environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONPATH")}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return Outcome(row, f"not over after {LIMIT:.0f} s: {log}", imports)
    return judge(row, imports, imported.returncode, report, log, time.monotonic() - began)


def _environment(row: Row, base: Path, cache: Path, say: Callable[[str], object]) -> Path:
    """The Python of the row's environment, with all packages; made anew when another list of packages is asked for."""
    folder = cache / row.name
    python, done = folder / "bin" / "python", folder / "packages.txt"
    requested = "\n".join(row.packages)
    if not done.exists() or requested != done.read_text():
        say(f"{row.name}: installing {' '.join(row.packages)}")
        subprocess.run([base, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *row.packages], check=True)
        done.write_text(requested)
    return python


def judge(row: Row, imports: str, status: int, report: Path, log: Path, seconds: float) -> Outcome:
    """Return the outcome from the imports' exit *status* and pytest's *report*."""
    if not report.exists():
        return Outcome(row, f"no test was run: {log}", imports)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failed + errors
    verdict = "imports fail" if status else f"tests fail: {log}" if bad or not total else "good"
    return Outcome(row, verdict, imports, total - bad - skipped, bad, skipped, seconds)


def table(outcomes: list[Outcome]) -> str:
    """The rows as Markdown."""
    lines = ["| Python | torch | modules | tests passed | failed | skipped | s | outcome |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for each in outcomes:
        figures = f"{each.passed} | {each.failed} | {each.skipped} | {each.seconds:.0f}" if each.imports else " | | | "
        torch = each.row.torch or "-"
        lines.append(f"| {each.row.python} | {torch} | {each.imports} | {figures} | {each.verdict} |")
    return "\n".join(lines)
