"""attrs classes as dataclasses: what programs written for torch do with its specifications and results."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pprint
from typing import Any

import attrs
import pytest

from elasticlib.errors import ConfigError, ProcessFailure, SpecError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import LaunchConfig, LogsDest, WorkerSpec
from elasticlib.state import RunResult, WorkerState
from elasticlib.utils._dataclasses import DataclassView
from elasticlib.workers import RunProcsResult

SPEC = WorkerSpec("trainer", 2, None, entrypoint="x.py", args=("-v",), max_restarts=1)
FAILED = RunResult(WorkerState.FAILED, {}, {1: ProcessFailure(1, 9, 3, "", message="m", timestamp=2.0)})
ALL = [
    LaunchConfig(run_id="r", rdzv_configs={"join_timeout": 3}, logs_specs=DefaultLogsSpecs()),
    SPEC,
    FAILED,
    RunProcsResult({0: "a"}, {}, {0: "/tmp/out"}, {}),
    LogsDest({0: "/tmp/out"}),
]


@pytest.mark.parametrize("each", ALL, ids=lambda each: type(each).__name__)
def test_torchs_dataclasses_are_dataclasses_here_too(each: Any) -> None:
    ours = [field.name for field in attrs.fields(type(each))]

    assert [field.name for field in dataclasses.fields(each)] == ours
    assert list(dataclasses.asdict(each)) == ours
    assert dataclasses.is_dataclass(each)
    assert dataclasses.is_dataclass(type(each))


@pytest.mark.parametrize("each", ALL, ids=lambda each: type(each).__name__)
def test_a_copy_with_nothing_replaced_is_equal_and_another(each: Any) -> None:
    other = dataclasses.replace(each)

    assert other == each
    assert other is not each


@pytest.mark.parametrize("each", ALL, ids=lambda each: type(each).__name__)
def test_pickling_copying_and_printing_of_values_are_unchanged(each: Any) -> None:
    assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each
    assert pprint.pformat(each, width=10_000) == repr(each)
    assert not hasattr(each, "__dict__")


def test_replace_changes_given_fields_and_keeps_the_rest() -> None:
    config = LaunchConfig(max_nodes=4, run_id="a", token="secret", rdzv_configs={"join_timeout": 3})

    other = dataclasses.replace(config, run_id="b", rdzv_timeout=7)

    assert (other.run_id, other.max_nodes, other.token) == ("b", 4, "secret")
    assert other.rdzv_configs == {"join_timeout": 3, "timeout": 7}
    assert config.rdzv_configs == {"join_timeout": 3, "timeout": 900}


def test_replaced_values_are_checked_and_converted_as_in_a_new_object() -> None:
    with pytest.raises(SpecError, match="max_nodes=1 is below min_nodes=2"):
        dataclasses.replace(LaunchConfig(), min_nodes=2)
    with pytest.raises(ConfigError, match="preload=3 must be module names"):
        dataclasses.replace(SPEC, preload=3)

    assert dataclasses.replace(SPEC, args=["-q"]).args == ("-q",)


def test_replacing_an_unknown_field_raises_type_error() -> None:
    with pytest.raises(TypeError, match="nnodes"):
        dataclasses.replace(LaunchConfig(), nnodes=2)


def test_dictionary_of_a_result_includes_failures_and_is_a_copy() -> None:
    found = dataclasses.asdict(FAILED)

    assert found["failures"][1]["message"] == "m"
    found["return_values"][0] = 1
    assert FAILED.return_values == {}


def test_fields_show_their_defaults_as_in_a_dataclass() -> None:
    by_name = {field.name: field for field in dataclasses.fields(LaunchConfig)}

    assert by_name["monitor_interval"].default == 0.1
    assert by_name["rdzv_configs"].default_factory is dict
    assert (by_name["token"].repr, by_name["token"].kw_only) == (False, True)
    assert next(iter(dataclasses.fields(WorkerSpec))).default is dataclasses.MISSING


def test_a_class_below_shows_its_own_fields_too() -> None:
    @attrs.define
    class Mine(LaunchConfig):
        team: str = attrs.field(default="", kw_only=True)

    other = dataclasses.replace(Mine(run_id="a", team="x"), team="y")

    assert (other.run_id, other.team) == ("a", "y")
    assert "team" not in {field.name for field in dataclasses.fields(LaunchConfig)}


def test_a_plain_dataclass_below_is_checked_and_converted_too() -> None:
    @dataclasses.dataclass
    class Below(LaunchConfig):
        team: str = ""

    Mine: Any = Below  # noqa: N806 - a type checker knows the fields of this very class only
    mine = Mine(run_id="a", rdzv_timeout=7, preload="os,re", module=True, team="x")

    assert (mine.run_id, mine.team, mine.preload, mine.rdzv_configs) == ("a", "x", ("os", "re"), {"timeout": 7})
    assert Mine(rdzv_configs={"timeout": 5}).rdzv_configs == {"timeout": 5}
    assert Mine().rdzv_configs == {"timeout": 900}
    with pytest.raises(SpecError, match="max_nodes=1 is below min_nodes=2"):
        Mine(min_nodes=2)
    with pytest.raises(ConfigError, match="leave one out"):
        dataclasses.replace(mine, no_python=True)


def test_a_plain_dataclass_below_looks_at_the_whole_when_it_is_there() -> None:
    @dataclasses.dataclass
    class Below(WorkerSpec):
        team: str = ""

    mine: Any = Below
    with pytest.raises(SpecError, match="entrypoint=None"):
        mine("trainer", 2, None, team="x")


def test_class_without_fields_is_not_a_dataclass() -> None:
    assert not dataclasses.is_dataclass(DataclassView)
