"""
The campaign of ends: each kind of end that a worker's function can have, again and again, beside busy processors.

``python -m tests.benchmarks.ends`` runs all of it: 50 ends of each kind under ``spawn``, beside four processes that do
nothing but compute. No worker may abort, and the launcher must say of each what is so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.benchmarks.job import ROOT
from tests.benchmarks.jobs.ends import KINDS, WORKERS

LIMIT = 240.0
"""Seconds for one launch, beside all that else runs."""
_CRASHES = ("terminate called", "Fatal Python error", "Exception ignored", "while its last objects were finalized")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run *count* processes that compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(kind: str, method: str, rounds: int) -> list[str]:
    """Launch *kind* so often; what went wrong, each in a line."""
    command = [sys.executable, "-m", "tests.benchmarks.jobs.ends", method, str(rounds), kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    limit = LIMIT * rounds
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, cwd=ROOT)
    crashes = [line for line in done.stderr.splitlines() if any(word in line for word in _CRASHES)]
    if done.returncode:
        return [f"the launcher ended with {done.returncode}: {done.stderr[-2000:]}"]
    return [*crashes, *(text for _, text in json.loads(done.stdout.splitlines()[-1]))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["forkserver", "spawn", "fork"], default="spawn")
    parser.add_argument("--ends", type=int, default=50, help="of each kind")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute meanwhile")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=sorted(KINDS), metavar="KIND")
    chosen = parser.parse_args(argv)
    rounds = -(-chosen.ends // WORKERS)
    wrong = 0
    with busy(chosen.busy):
        for kind in chosen.only:
            found = run(kind, chosen.method, rounds)
            wrong += len(found)
            print(f"{kind}: {rounds * WORKERS} ends, {len(found)} wrong", *found[:3], sep="\n  ", flush=True)
    print(f"{len(chosen.only)} kinds, {wrong} wrong ends")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
