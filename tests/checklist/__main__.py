"""
The table of the checklist: row, test, status with elasticlib, with torchrun, and with a launcher that does nothing.

    python -m tests.checklist                       elasticlib alone
    python -m tests.checklist --peer --nothing      all three
    python -m tests.checklist --rows 87-102 --peer  a part
    python -m tests.checklist --peer-python P       with the torchrun of interpreter P, which may have another torch

A row is held when its tests pass with elasticlib, fail with nothing, and, with torchrun, pass, or fail where the row
is an improvement. Ends with status 1 when a row is missing or not held.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import Any

HERE = pathlib.Path(__file__).parent
ROWS = range(1, 229)


def outcomes(launcher: str, tests: list[str], python: str = sys.executable) -> dict[str, dict[str, Any]]:
    """Run *tests* (all when empty) by *python* with one launcher; by test, what its row says and how it went."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report")
        path.touch()
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--whole", *(tests or [str(HERE)])],
            cwd=HERE.parents[1],
            env={**os.environ, "ELASTICLIB_PEER": launcher, "ELASTICLIB_CHECKLIST_REPORT": str(path)},
            stdout=sys.stderr,
            check=False,
        )
        found: dict[str, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            facts = json.loads(line)
            before = found.setdefault(facts["test"], facts)
            if facts["outcome"] == "failed":
                before["outcome"] = "failed"
        return found


def wanted(text: str) -> set[int]:
    """Rows of a text such as ``1-20,88``."""
    rows = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        rows |= set(range(int(first), int(last or first) + 1))
    return rows


def status(found: list[str]) -> str:
    """One word for all tests of a row."""
    if not found:
        return "-"
    return "failed" if "failed" in found else "skipped" if "skipped" in found else "passed"


def outcome(row: dict[str, Any], ours: str, peers: str, nothings: str) -> str:
    """Empty when the row is held, else what is wrong with it."""
    if ours != "passed":
        return f"elasticlib: {ours}"
    if nothings == "passed":
        return "passes with nothing"
    if peers in ("-", "skipped"):
        return ""
    if row["improvement"]:
        return "" if peers == "failed" else "no improvement over torchrun"
    return "" if peers == "passed" else "fails with torchrun"


def collect(rows: set[int]) -> list[str]:
    """The tests of some rows."""
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "--whole", "-p", "tests.checklist.rows", str(HERE)],
        cwd=HERE.parents[1],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for line in shown.splitlines():
        if line.startswith("row "):
            _, numbers, test = line.split(" ", 2)
            if rows & {int(number) for number in numbers.split(",")}:
                found.append(test)
    return found


def main() -> int:
    """Print the table; 0 when every row that was asked for is held."""
    parser = argparse.ArgumentParser(prog="python -m tests.checklist", description="The table of the checklist.")
    parser.add_argument("--peer", action="store_true", help="run the rows with torchrun too")
    parser.add_argument(
        "--peer-python",
        metavar="PYTHON",
        default="",
        help="as --peer, with this interpreter's torchrun; needs pytest there",
    )
    parser.add_argument("--nothing", action="store_true", help="and with a launcher that does nothing")
    parser.add_argument("--rows", type=wanted, default=set(ROWS), help="such as 1-20,88")
    options = parser.parse_args()
    tests = collect(options.rows)
    results = {"elasticlib": outcomes("elasticlib", tests)}
    with_peer = options.peer or options.peer_python
    results["torchrun"] = outcomes("torchrun", tests, options.peer_python or sys.executable) if with_peer else {}
    results["nothing"] = outcomes("nothing", tests) if options.nothing else {}
    by_row: dict[int, list[str]] = defaultdict(list)
    for test, facts in results["elasticlib"].items():
        for number in facts["rows"]:
            by_row[number].append(test)
    peers = {number: facts["peer_cannot"] for facts in results["torchrun"].values() for number in facts["rows"]}
    wrong = 0
    print("| row | test | elasticlib | torchrun | nothing | |\n|---|---|---|---|---|---|")
    for number in sorted(options.rows):
        names = by_row.get(number, [])
        if not names:
            wrong += 1
            print(f"| {number:03} | | missing | | | |")
            continue
        row = results["elasticlib"][names[0]]
        statuses = {
            each: status([found[name]["outcome"] for name in names if name in found]) for each, found in results.items()
        }
        fault = outcome(row, statuses["elasticlib"], statuses["torchrun"], statuses["nothing"])
        wrong += bool(fault)
        note = fault or ("improvement" if row["improvement"] else peers.get(number, ""))
        title = ", ".join(dict.fromkeys(name.partition("[")[0].rpartition("::")[2] for name in names))
        columns = " | ".join(statuses[each] for each in ("elasticlib", "torchrun", "nothing"))
        print(f"| {number:03} | {title} | {columns} | {note} |")
    passed = len(options.rows) - wrong
    print(f"\n{passed} of {len(options.rows)} rows held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
