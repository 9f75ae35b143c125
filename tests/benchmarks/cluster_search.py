"""
Search for a plan of faults that breaks a rule: ``python -m tests.benchmarks.cluster_search --examples N --seed S``.

For nights. Plans are larger than in the tests; what is found is shrunk and printed as code that a test can keep. With
``--stranger`` jobs have a token, and somebody without it writes whatever he likes into their store.
"""

from __future__ import annotations

import argparse
import sys
import time

from hypothesis import HealthCheck, given, seed, settings, strategies as st

from elasticlib.testing import FaultPlan
from tests.sim.promises import must_succeed, verdicts_of_steady_nodes
from tests.sim.simulator import InvariantBroken, Rules, SimulatedCluster, strategies

NODES = 5


def search(
    examples: int, number: int, coordinators: tuple[str, ...], stranger: bool = False
) -> tuple[int, AssertionError | None]:
    """Return the number of runs, and the error of the smallest history that breaks a rule, if any."""
    runs = 0

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        rules=strategies.rules(NODES),
        nodes=st.integers(1, NODES),
        plan=strategies.fault_plans(NODES, size=10, stranger=stranger),
        coordinator=st.sampled_from(coordinators),
        chance=st.integers(0, 1000),
        work=st.sampled_from((5.0, 20.0, 60.0)),
    )
    def holds(rules: Rules, nodes: int, plan: FaultPlan, coordinator: str, chance: int, work: float) -> None:
        nonlocal runs
        runs += 1
        token = "secret" if stranger else ""
        cluster = SimulatedCluster(rules, nodes, plan, coordinator, chance, work, token=token).run()
        if not stranger and must_succeed(cluster):
            kinds = [outcome.kind if outcome else "none" for outcome in verdicts_of_steady_nodes(cluster)]
            if set(kinds) != {"succeeded"}:
                raise InvariantBroken(f"the job had to succeed, but: {cluster.outcomes}\n{cluster.describe()}")

    try:
        holds()
    except AssertionError as found:
        return runs, found
    return runs, None


def main() -> int:
    """Search; 0 when nothing was found, 1 when something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cluster_search", description=main.__doc__)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coordinator", nargs="+", default=("fixed", "elected"), choices=("fixed", "elected"))
    parser.add_argument("--stranger", action="store_true", help="who has no token writes to their store")
    options = parser.parse_args()
    began = time.monotonic()
    runs, found = search(options.examples, options.seed, tuple(options.coordinator), options.stranger)
    print(f"{runs} clusters in {time.monotonic() - began:.0f} s with seed {options.seed}: ", end="")
    print("no rule was broken" if found is None else f"a rule was broken\n{found}")
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
