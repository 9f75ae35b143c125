"""
Calls on thousands of machines with faults of the engine: ``python -m tests.benchmarks.engine_faults --calls 100``.

For nights. Each call is a history in simulated time with the real supervisor: agents lost, lost and late, replacements
that are never placed, two agents of one place, outcomes lost after the success. It prints the ends of the calls, the
decisions, and the time that the supervisor took for an event.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter

from elasticlib.engines import CallRules
from tests.sim.engines import CallEnd, EngineFaults, SimulatedCall
from tests.sim.simulator import InvariantBroken


def main() -> int:
    """Search; 0 when nothing was found, 1 when something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.engine_faults", description=main.__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=(1000, 10_000))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for nodes in options.nodes:
        ends = list[CallEnd]()
        rules = CallRules(nodes, nodes * 95 // 100)
        for seed in range(options.seed, options.seed + options.calls):
            try:
                ends.append(SimulatedCall(rules, EngineFaults(), seed).run())
            except InvariantBroken as error:
                print(f"SimulatedCall({rules}, EngineFaults(), {seed}): {error}")
                return 1
        print(report(nodes, ends), flush=True)
    return 0


def report(nodes: int, ends: list[CallEnd]) -> str:
    """Return what has become of the calls on so many *nodes*."""
    kinds = Counter(end.kind for end in ends)
    actions = sum((end.actions for end in ends), Counter[str]())
    micro = statistics.median(end.computed / end.events * 1e6 for end in ends)
    return "\n".join(
        [
            f"{nodes} nodes, {len(ends)} calls: no rule was broken",
            f"  ends: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}",
            f"  decisions: {', '.join(f'{count} {kind}' for kind, count in actions.most_common())}",
            f"  supervisor: {micro:.1f} us an event (median), {max(end.computed for end in ends):.2f} s a call at most",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
