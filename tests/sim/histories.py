"""
Simulated jobs by which a wrong session, or wrong mail of a coordinator, is caught: the likeliest to do so first.

A history ends as it must, or raises; that its invariants hold is checked by the simulated cluster itself. Besides
jobs drawn by number these are the tests of this folder that need nothing but a cluster.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType

import pytest
from attrs import frozen

from elasticlib.testing import FailWorker, FaultPlan, PauseStore
from tests.sim.adversaries import TOKEN, Case, case, plain
from tests.sim.checks import CheckedCluster
from tests.sim.promises import DISTURBING, must_succeed, verdicts_of_steady_nodes
from tests.sim.simulator import Fenced, Rules
from tests.sim.simulator.invariants import NO_MEMORY

RULES = Rules(2, 3, 3, last_call=2.0, heartbeat=10.0)
PLAIN, TAMPERED = 24, 16
"""Jobs of each sort."""
FEW = 6
"""Number of jobs that run before each test runs once."""
VARIANTS = 4
"""Of each test of sessions, at most: the first two, and some of the others. Of other tests two are enough."""
MODULES = ("test_session", "test_cluster", "test_adversary", "test_size", "test_flatness")
"""Those of this folder whose tests are histories."""
LONG = (
    "thousand", "drawn", "does_not_grow", "do_not_grow", "nothing_but_delay", "no_step_breaks", "is_caught",
    "without_a_mutant", "operations_and_bytes", "room_for_ten_thousand", "near_the_limits",
    "keeps_leaving", "takes_effect_once", "an_empty_job", "too_few_are_left", "same_arguments", "in_its_turn",
    "grows_only_by_names",
)  # fmt: skip
"""Words in the names of tests that take long, or are about something else."""


@frozen(eq=False)
class History:
    """One job, or a test with several; `run` raises an `AssertionError` when something is wrong."""

    name: str
    run: Callable[[], object]


def histories() -> Iterator[History]:
    """All of them."""
    for coordinator in ("fixed", "elected"):
        yield History(f"a job that nothing happens to, {coordinator}", functools.partial(calm, coordinator))
    jobs = [History(f"plain job {each}", functools.partial(keeps_its_promises, plain(each))) for each in range(PLAIN)]
    jobs += [History(f"tampered job {number}", case(number, (TOKEN,)).run) for number in range(TAMPERED)]
    tried = list(tests(MODULES))
    first = [each for each in tried if each.name.endswith(" 0")]
    yield from jobs[:FEW]
    yield from first
    yield from jobs[FEW:]
    yield from (each for each in tried if each not in first)


def calm(coordinator: str) -> None:
    """Three nodes, whose workers fail once."""
    cluster = CheckedCluster(RULES, 3, FaultPlan([FailWorker(1, 5.0)]), coordinator).run()
    assert ["succeeded"] * 3 == [outcome.kind for outcome in cluster.outcomes.values()]


def keeps_its_promises(job: Case) -> None:
    """
    Steady nodes succeed where they must, and are told of no loss of contact where nothing was lost.

    Nobody says that the job's memory is gone, which nobody has touched, unless all others are: it goes with the last.
    """
    cluster = job.run()
    ends = list(cluster.outcomes.values())
    puzzled = [end for end in ends if end is not None and any(why in end.why for why in NO_MEMORY)]
    last = max((end.at for end in ends if end is not None and end not in puzzled), default=0.0)
    assert all(None not in ends and end.at > last for end in puzzled), cluster.describe()
    if must_succeed(cluster):
        ends = {outcome.kind if outcome else None for outcome in verdicts_of_steady_nodes(cluster)}
        assert {"succeeded"} == ends, cluster.describe()
    if not any(isinstance(fault, (*DISTURBING, PauseStore)) for fault in cluster.plan):
        fenced = [record for record in cluster.history if isinstance(record, Fenced)]
        assert [] == fenced, cluster.describe()


def tests(modules: tuple[str, ...]) -> Iterator[History]:
    """The tests of these modules, each with all that it is to be run with, but for those that take long."""
    for name in modules:
        most = VARIANTS if name == MODULES[0] else 2
        for test in vars(importlib.import_module(f"tests.sim.{name}")).values():
            if isinstance(test, FunctionType) and test.__name__.startswith("test_") and _is_history(test):
                for number, arguments in _some(list(enumerate(_variants(test))))[:most]:
                    yield History(f"{name}.{test.__name__} {number}", functools.partial(_call, test, arguments))


def _some(variants: list[tuple[int, dict[str, object]]]) -> list[tuple[int, dict[str, object]]]:
    """Few of them, always the same."""
    others = variants[2:]
    return variants[:2] + random.Random(0).sample(others, min(VARIANTS - 2, len(others)))


def _call(test: FunctionType, arguments: dict[str, object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wanted = inspect.signature(test).parameters
        test(**arguments, **({"monkeypatch": patch} if "monkeypatch" in wanted else {}))


def _is_history(test: FunctionType) -> bool:
    drawn = hasattr(test, "hypothesis") or hasattr(test, "is_hypothesis_test")
    return not drawn and not any(part in test.__name__ for part in LONG)


def _variants(test: FunctionType) -> Iterator[dict[str, object]]:
    """The arguments of each run, as its marks say."""
    given: list[list[dict[str, object]]] = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].split(", ") if isinstance(mark.args[0], str) else mark.args[0]
            values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            given.append([dict(zip(names, each, strict=True)) for each in values])
    for parts in itertools.product(*given):
        arguments: dict[str, object] = {name: value for part in parts for name, value in part.items()}
        if set(inspect.signature(test).parameters) - {"monkeypatch"} == set(arguments):
            yield arguments


def main() -> int:
    """Run them until one is not as it must be: 0 when all are, 1 when one is not, which is named."""
    for history in histories():
        try:
            history.run()
        except Exception as error:
            print(f"{history.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]:.300}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
