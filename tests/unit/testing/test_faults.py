"""Faults are data: they print as code, travel as JSON, and say what is wrong with them."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given

import elasticlib.testing
from elasticlib.errors import ConfigError
from elasticlib.testing import Break, Cut, FailWorker, FaultPlan, Kill, Pause, SetBack, Skew, Tamper
from tests.sim.simulator import strategies


@given(plan=strategies.fault_plans())
def test_a_plan_prints_as_the_code_that_makes_it(plan: FaultPlan) -> None:
    assert plan == eval(repr(plan), {name: getattr(elasticlib.testing, name) for name in elasticlib.testing.__all__})


@given(plan=strategies.fault_plans())
def test_a_plan_travels_as_json(plan: FaultPlan) -> None:
    assert plan == FaultPlan.from_json(plan.to_json())


def test_an_adversary_and_his_acts_print_as_code_and_travel_as_json() -> None:
    plan = FaultPlan([Tamper(1.0, 2.0, seed=7, where=["beat", "box"], acts=[3])])  # type: ignore[list-item]

    assert "FaultPlan((Tamper(1.0, 2.0, seed=7, where=('beat', 'box'), acts=(3,)),))" == repr(plan)
    assert plan == FaultPlan.from_json(plan.to_json())


def test_defaults_are_not_printed() -> None:
    plan = FaultPlan([Kill(1, at=12.0), Pause(0, at=3.0, seconds=20.0, what="agent")])

    assert "FaultPlan((Kill(1, 12.0), Pause(0, 3.0, 20.0, what='agent')))" == repr(plan)


def test_a_plan_is_over_when_its_last_fault_is() -> None:
    assert 23.0 == FaultPlan([Cut(1, at=3.0, seconds=20.0), Kill(0, at=9.0)]).last
    assert 30.0 == FaultPlan([SetBack(at=30.0, seconds=5.0), Skew(0, seconds=100.0)]).last


@pytest.mark.parametrize("at", [-1.0, float("nan"), float("inf"), "soon", None, True])
def test_a_moment_is_a_number_of_seconds(at: object) -> None:
    with pytest.raises(ConfigError, match=r"Kill\.at"):
        Kill(1, at=at)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Kill(-1, 2.0), "Kill.node=-1: give the number of a node, 0 for the first"),
        (lambda: Cut("0", 2.0, 1.0), "Cut.node='0': give the number of a node"),
        (lambda: Break(True, 2.0), "Break.node=True: give the number of a node"),
        (lambda: Kill(0, 2.0, "disk"), "Kill.what='disk': give one of 'machine', 'agent', 'rendezvous'"),
        (lambda: Pause(0, 2.0, math.inf), "Pause.seconds=inf: give a number of seconds, 0 or more"),
        (lambda: Skew(0, "fast"), "Skew.seconds='fast': give a number of seconds"),
        (lambda: Skew(0, 1.0, -2.0), "Skew.drift=-2.0: give seconds gained in each second, -0.1 or more"),
        (lambda: FailWorker(0, 1.0, "no"), "FailWorker.secondary='no': give True or False"),
        (lambda: Tamper(0.0, 1.0, seed=0.5), "Tamper.seed=0.5: give a whole number"),
        (lambda: Tamper(0.0, 1.0, every=0.0), "Tamper.every=0.0: give a number of seconds, 0.001 or more"),
        (lambda: Tamper(0.0, 1.0, where="disk"), "Tamper.where=('disk',): give some of 'hello', 'pulse'"),
        (lambda: Tamper(0.0, 1.0, acts=-1), "Tamper.acts=(-1,): give numbers of acts, 0 for the first"),
        (lambda: FaultPlan(Kill(0, 2.0)),
         r"FaultPlan.faults=Kill(0, 2.0): give a list of faults, even for a single fault"),
        (lambda: FaultPlan.from_json('{"v": 1, "faults": [{"fault": "Kill", "node": 1}]}'),
         "Kill has a missing or unknown field: its fields are node, at, what; required: at, node"),
        (lambda: FaultPlan.from_json('{"v": 1, "faults": [{"fault": "Kill", "node": 1, "at": 2, "when": 3}]}'),
         "Kill has a missing or unknown field: its fields are node, at, what"),
        (lambda: FaultPlan.from_json('{"v": 1, "faults": [{"fault": [], "node": 1}]}'), "is not a fault"),
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_names_the_value_and_what_to_give(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        make()


def test_a_plan_holds_faults_only() -> None:
    with pytest.raises(ConfigError, match="'crash' is not a fault"):
        FaultPlan(["crash"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"v": 2, "faults": []}',
        '{"v": 1, "faults": 3}',
        '{"v": 1, "faults": [3]}',
        '{"v": 1, "faults": [{"fault": "Explode", "node": 1, "at": 2.0}]}',
        '{"v": 1, "faults": [{"fault": "Kill", "node": 1}]}',
        '{"v": 1, "faults": [{"fault": "Kill", "node": -1, "at": 2.0}]}',
        "[" * 100_000,
    ],
)
def test_invalid_fault_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a fault plan cannot be read"):
        FaultPlan.from_json(text)


@pytest.mark.parametrize("names", ["FaultPlan", "ElasticTestCase", "RanksFailed, DirtyWorkerWarning"])
def test_the_package_loads_neither_torch_nor_hypothesis_nor_pytest(names: str) -> None:
    heavy = "{'torch', 'hypothesis', 'numpy', 'pytest', '_pytest'}"
    code = f"from elasticlib.testing import {names}\nimport sys\nprint({heavy} & set(sys.modules))"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "set()" == out.strip()
