"""
Histories with an adversary at the store: ``python -m tests.benchmarks.adversary --hours H --seed S``.

For nights. Each history is a simulated job with faults of all kinds and one who reads and writes whatever lies in the
store: with a token and without, under both coordinators. What breaks a rule is made as short as it goes, and printed
as code that a test can keep.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.adversaries import TOKEN, case, shortest
from tests.sim.simulator import InvariantBroken


def main() -> int:
    """Search; 0 when nothing was found, 1 when something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.adversary", description=main.__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--token", choices=("both", "with", "without"), default="both")
    parser.add_argument("--coordinator", nargs="+", default=("fixed", "elected"), choices=("fixed", "elected"))
    options = parser.parse_args()
    tokens = {"both": (TOKEN, ""), "with": (TOKEN,), "without": ("",)}[options.token]
    began, runs, ends = time.monotonic(), 0, Counter[str]()
    while time.monotonic() < began + options.hours * 3600:
        each = case(options.seed * 10_000_000 + runs, tokens, tuple(options.coordinator))
        runs += 1
        try:
            cluster = each.run()
        except InvariantBroken:
            short = shortest(each)
            print(f"{runs} histories with seed {options.seed}: a rule was broken\n{short.breaks()}")
            return 1
        ends.update(outcome.kind for outcome in cluster.outcomes.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in ends.most_common())
    print(f"{runs} histories in {time.monotonic() - began:.0f} s with seed {options.seed}: no rule was broken")
    print(f"how agents ended: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
