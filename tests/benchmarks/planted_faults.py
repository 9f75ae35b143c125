"""
Faults planted into the session and the outbox of a job, one at a time: does the simulation find each?

``python -m tests.benchmarks.planted_faults`` plants each into a copy of the package, runs the histories of
``tests.sim.histories`` there, and nothing else, and prints what was not found, with the reason where one is known
(``survivors.py``). What raises, breaks an invariant, ends as it must not or does not end in time is found.
``--count 30 --seed 1`` draws some of them.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from attrs import frozen

from tests.benchmarks.planter import Planted, faults, plant
from tests.benchmarks.survivors import BY_HAND, SURVIVORS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "elasticlib/rendezvous"
FILES = (
    *(f"node/_session{name}.py" for name in ("", "_liveness", "_memory")),
    *(f"node/_{name}.py" for name in ("identity", "own_heartbeats", "node_outbox")),
    *("protocol/_progress.py", "coordinator/_outbox.py"),
)
"""The session with what it is made of, and the coordinator's mail."""
GOAL = 0.85
"""Share that must be found."""
_SECONDS = 300
"""Of a processor, for all histories with one fault: several times what they need on a slow machine."""
_BYTES = 3 << 30
_COPIED = ("elasticlib", "tests/__init__.py", "tests/sim", "tests/benchmarks")


@frozen
class Found:
    """Result of one planted fault."""

    planted: Planted
    by: str
    """History or error that revealed the fault; empty if none did."""
    seconds: float


def sources() -> dict[str, str]:
    """The files that faults are planted into."""
    return {file: (ROOT / PACKAGE / file).read_text(encoding="utf-8") for file in FILES}


def everything() -> list[Planted]:
    """All faults."""
    found = [planted for file, source in sources().items() for planted in faults(file, source)]
    return found + [Planted(file, "by hand", what) for what, (file, _, _) in BY_HAND.items()]


def source_with(planted: Planted) -> str:
    """The source of its file with that fault."""
    source = sources()[planted.file]
    if planted.number >= 0:
        return plant(source, planted.number)
    _, old, new = BY_HAND[planted.what]
    return source.replace(old, new)


class Workplace:
    """A copy of the package, for one fault after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in _COPIED:
            place = ROOT / name
            if place.is_dir():
                shutil.copytree(place, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif place.exists():
                shutil.copy(place, folder / name)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=folder, check=True)

    def judge(self, planted: Planted) -> Found:
        """Run the histories with that fault."""
        path = self._folder / PACKAGE / planted.file
        sound = path.read_text(encoding="utf-8")
        self._write(path, source_with(planted))
        began = time.monotonic()
        try:
            by = self.histories()
        finally:
            self._write(path, sound)
        return Found(planted, by, time.monotonic() - began)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Of two versions that were written in the same second and are as long, Python would take one for the other.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def histories(self) -> str:
        """Which of them is not as it must be; empty when all are."""
        environment = os.environ | {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.sim.histories"],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=_bound,
        )
        if ended.returncode in (0, 1) and not ended.stderr:
            return ended.stdout.strip()
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        return f"ended by signal {-ended.returncode}" if ended.returncode < 0 else last or "no reason was given"


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))


def campaign(chosen: Sequence[Planted], side_by_side: int = 1, *, sound: bool = False) -> list[Found]:
    """Judge each of them. Raises `RuntimeError` where the histories break without a fault, unless they are *sound*."""
    free, found = SimpleQueue[Workplace](), list[Found]()

    def judge(planted: Planted) -> Found:
        place = free.get()
        try:
            return place.judge(planted)
        finally:
            free.put(place)

    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(side_by_side) as pool:
        for number in range(side_by_side):
            free.put(Workplace(Path(folder, str(number))))
        place = free.get()
        if not sound and (broken := place.histories()):
            raise RuntimeError(f"the histories break without a fault: {broken}")
        free.put(place)
        for each in pool.map(judge, chosen):
            found.append(each)
            report = f"{each.seconds:5.1f} s  {each.planted}\n         {each.by or 'NOT FOUND'}"
            print(report, file=sys.stderr, flush=True)
    return found


def table(found: list[Found]) -> str:
    """Return the number of faults found in each file, and the faults that were not found."""
    lines = []
    for file in dict.fromkeys(each.planted.file for each in found):
        here = [each for each in found if each.planted.file == file]
        lines.append(f"{file:28} {sum(map(bool, (each.by for each in here))):4} of {len(here):4}")
    left = [each.planted for each in found if not each.by]
    if left:
        lines.append("not found:")
        lines += [f"  {planted}\n      {SURVIVORS.get(str(planted), 'no reason is known')}" for planted in left]
    lines.append(f"{len(found) - len(left)} of {len(found)} found ({1 - len(left) / max(1, len(found)):.1%})")
    return "\n".join(lines)


def draw(count: int | None, seed: int, part: str = "") -> list[Planted]:
    """Some of all faults, or all, whose names hold that *part*."""
    chosen = [planted for planted in everything() if part in str(planted)]
    return chosen if count is None else random.Random(seed).sample(chosen, min(count, len(chosen)))


def main() -> int:
    """Plant faults; 0 when enough of them are found and the reason of each other one is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planted_faults", description=main.__doc__)
    parser.add_argument("--count", type=int, help="so many, drawn by the seed (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="WORD", help="those whose names hold it")
    parser.add_argument("--side-by-side", type=int, default=1, help="processes at a time (1)")
    options = parser.parse_args()
    began = time.monotonic()
    found = campaign(draw(options.count, options.seed, options.only), options.side_by_side)
    print(table(found))
    print(f"{time.monotonic() - began:.0f} s")
    known = all(each.by or str(each.planted) in SURVIVORS for each in found)
    share = sum(bool(each.by) for each in found) / max(1, len(found))
    return 0 if known and share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
