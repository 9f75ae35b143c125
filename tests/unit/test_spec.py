"""Defaults, order and rules of the specs."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import pathlib
import pickle
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import ConfigError, SpecError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.spec import LaunchConfig, Std, WorkerSpec, to_map


def spec(**facts: Any) -> WorkerSpec:
    return WorkerSpec(**{"role": "trainer", "local_world_size": 2, "rdzv_handler": None, "entrypoint": "x.py", **facts})


def positional(each: type) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(each).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


def test_a_worker_spec_takes_torchs_fields_in_torchs_order() -> None:
    assert [
        "role",
        "local_world_size",
        "rdzv_handler",
        "fn",
        "entrypoint",
        "args",
        "max_restarts",
        "monitor_interval",
        "master_port",
        "master_addr",
        "local_addr",
        "event_log_handler",
        "numa_options",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
    ] == positional(WorkerSpec)


def test_a_launch_config_works_alone() -> None:
    """Row 161, with our own defaults for one node."""
    config = LaunchConfig()

    assert (1, 1, "auto") == (config.min_nodes, config.max_nodes, config.nproc_per_node)
    assert ("c10d", "", "forkserver") == (config.rdzv_backend, config.rdzv_endpoint, config.start_method)
    assert (3, 0.1, "default_role") == (config.max_restarts, config.monitor_interval, config.role)
    assert ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", None) == (config.signals_to_handle, config.shutdown_timeout)
    assert (None, ("auto",)) == (config.logs_specs, config.preload)
    assert (None, "quiet", None) == (config.token, config.wait_for, config.node_rank)


def test_default_in_a_notebook_is_zero_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = LaunchConfig()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    inside = LaunchConfig()

    assert (3, 0) == (outside.max_restarts, inside.max_restarts)
    assert "max_restarts=0" in repr(inside)
    assert outside == LaunchConfig(max_restarts=3) == dataclasses.replace(inside, max_restarts=3)
    assert dataclasses.replace(outside, nproc_per_node=2).max_restarts == 3  # it was made elsewhere
    assert LaunchConfig(max_restarts=2).max_restarts == 2


@pytest.mark.parametrize(
    ("facts", "timeout"),
    [({}, 900), ({"rdzv_timeout": 7}, 7), ({"rdzv_configs": {"timeout": 5}}, 5)],
)
def test_the_rendezvous_timeout_is_900_unless_given(facts: dict[str, Any], timeout: int) -> None:
    """Rows 030 and 162."""
    assert timeout == LaunchConfig(**facts).rdzv_configs["timeout"]


def test_a_callers_dict_is_not_changed() -> None:
    mine: dict[str, Any] = {"join_timeout": 3}

    LaunchConfig(rdzv_configs=mine, rdzv_timeout=9)

    assert {"join_timeout": 3} == mine


def test_making_a_config_touches_no_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)

    LaunchConfig(run_id="job7")

    assert [] == list(tmp_path.iterdir())
    assert before == dict(os.environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_nodes", 0),
        ("max_nodes", 0),
        ("nproc_per_node", 0),
        ("nproc_per_node", 1.5),
        ("nproc_per_node", "2 gpus"),
        ("max_restarts", -1),
        ("monitor_interval", 0),
        ("start_method", "bogus"),
        ("shutdown_timeout", -1),
        ("exit_timeout", -1),
        ("wait_for", "all"),
        ("node_rank", -1),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_by_name_and_value(name: str, value: object) -> None:
    """Rows 002, 012 to 015, 019 and 109."""
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**{name: value})  # type: ignore[arg-type]

    assert f"{name}={value!r}" in str(caught.value)


def test_a_token_is_not_shown() -> None:
    assert "s3cret" not in repr(LaunchConfig(token="s3cret"))


@pytest.mark.parametrize("value", ["", "s3cret\0", b"s3cret", 5])
def test_a_token_that_is_none_is_refused_and_not_shown(value: Any) -> None:
    with pytest.raises(ConfigError, match="token must be a non-empty string") as caught:
        LaunchConfig(token=value)

    assert "s3cret" not in str(caught.value)


def test_rules_hold_for_assignment_too() -> None:
    config = LaunchConfig()

    with pytest.raises(SpecError, match="max_restarts=-1"):
        config.max_restarts = -1


def test_fewer_nodes_than_the_minimum_are_refused() -> None:
    with pytest.raises(SpecError, match="max_nodes=2 is below min_nodes=3"):
        LaunchConfig(3, 2)


def test_a_module_without_an_interpreter_is_refused() -> None:
    """Row 039."""
    with pytest.raises(ValueError, match=r"^no_python=True cannot be combined with module=True: "):
        LaunchConfig(module=True, no_python=True)


@pytest.mark.parametrize("text", ["auto", "cpu", "gpu", "xpu"])
def test_number_of_workers_may_be_a_text(text: str) -> None:
    assert text == LaunchConfig(nproc_per_node=text).nproc_per_node


@pytest.mark.parametrize(
    ("given_", "expected"), [("", ()), ("torch, numpy", ("torch", "numpy")), (["torch"], ("torch",)), ((), ())]
)
def test_preload_is_a_list_or_a_text_with_commas(given_: Any, expected: tuple[str, ...]) -> None:
    assert expected == LaunchConfig(preload=given_).preload


def test_specs_cross_processes() -> None:
    config, workers = LaunchConfig(run_id="job7"), spec(args=("a", 1))

    assert (config, workers) == pickle.loads(pickle.dumps((config, workers)))


@pytest.mark.parametrize(
    "facts",
    [{"local_world_size": 0}, {"monitor_interval": 0}, {"max_restarts": -1}],
)
def test_worker_spec_refuses_same_values_as_torch_and_states_why(facts: dict[str, Any]) -> None:
    """Row 166: torch raises an AssertionError without a word."""
    name, value = next(iter(facts.items()))

    with pytest.raises(AssertionError, match=f"{name}={value}"):
        spec(**facts)


def test_text_as_virtual_local_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="virtual_local_rank='no' must be True or False"):
        spec(virtual_local_rank="no")


def test_a_worker_spec_without_an_entry_point_is_refused() -> None:
    """Row 166."""
    with pytest.raises(AssertionError, match="entrypoint=None"):
        spec(entrypoint=None)


def test_fn_stands_in_for_the_entry_point() -> None:
    with pytest.warns(DeprecationWarning, match="WorkerSpec.fn is deprecated: give entrypoint"):
        made = spec(entrypoint=None, fn=spec)

    assert made.entrypoint is spec


def test_fn_beats_the_entry_point_as_in_torch() -> None:
    with pytest.warns(DeprecationWarning):
        made = spec(entrypoint="other.py", fn=spec)

    assert made.entrypoint is spec


@pytest.mark.parametrize("make", [LaunchConfig, spec])
@pytest.mark.parametrize("name", ["duplicate_stdout_filters", "duplicate_stderr_filters"])
@pytest.mark.parametrize("value", ["loss", b"loss", ["loss", 5], 5, ["\ud800"]])
def test_filters_that_are_not_lists_of_texts_are_refused_by_name(make: Any, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        make(**{name: value})


class Integer:
    """A whole number of another library, such as numpy's."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"nproc_per_node": Integer(), "min_nodes": Integer(), "max_nodes": Integer()}, (2, 2, 2)),
        ({"nproc_per_node": True, "min_nodes": True}, (1, 1, 1)),
    ],
)
def test_numbers_of_any_kind_are_taken_as_by_torch(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    made = LaunchConfig(**fields)

    found = (made.nproc_per_node, made.min_nodes, made.max_nodes)
    assert (expected, {int}) == (found, set(map(type, found)))


def is_number(each: attrs.Attribute[Any]) -> bool:
    return bool({"int", "float"} & set(str(each.type).split(" | ")))


@pytest.mark.parametrize("name", [each.name for each in attrs.fields(LaunchConfig) if is_number(each)])
def test_a_launch_takes_numbers_of_other_libraries(name: str) -> None:
    given_ = {"max_nodes": 2, name: Integer()} if "int" in LaunchConfig.__annotations__[name] else {name: Fraction(2)}

    found = getattr(LaunchConfig(**given_), name)

    assert (2, True) == (found, type(found) in (int, float))


@pytest.mark.parametrize("name", [each.name for each in attrs.fields(WorkerSpec) if is_number(each)])
def test_a_worker_spec_takes_numbers_of_other_libraries(name: str) -> None:
    found = getattr(spec(**{name: Integer() if "int" in WorkerSpec.__annotations__[name] else Fraction(2)}), name)

    assert (2, True) == (found, type(found) in (int, float))


def test_values_that_torch_treats_as_empty_become_empty() -> None:
    made = LaunchConfig(
        run_id=None,  # type: ignore[arg-type]
        rdzv_endpoint=None,  # type: ignore[arg-type]
        metrics_cfg=None,  # type: ignore[arg-type]
        virtual_local_rank=0,  # type: ignore[arg-type]
        monitor_interval=Fraction(1, 2),  # type: ignore[arg-type]
        duplicate_stdout_filters={"loss"},  # type: ignore[arg-type]
    )

    assert ("", "", {}, False) == (made.run_id, made.rdzv_endpoint, made.metrics_cfg, made.virtual_local_rank)
    assert (0.5, ["loss"]) == (made.monitor_interval, made.duplicate_stdout_filters)


def test_filters_given_as_a_list_are_copied() -> None:
    given_ = ["loss"]

    config = LaunchConfig(duplicate_stdout_filters=given_, duplicate_stderr_filters=("a", "b"))
    given_.append("error")

    assert (["loss"], ["a", "b"]) == (config.duplicate_stdout_filters, config.duplicate_stderr_filters)


def test_arguments_given_as_a_list_are_copied() -> None:
    mine = ["a"]
    made = spec(args=mine)
    mine.append("b")

    assert ("a",) == made.args


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("dir/train.py", "train.py"),
        (pathlib.Path("dir/train.py"), "train.py"),
        (positional, "positional"),
        (attrs.Factory(list), "Factory"),
    ],
)
def test_reports_call_an_entry_point_by_its_own_name(entrypoint: Any, name: str) -> None:
    assert name == spec(entrypoint=entrypoint).get_entrypoint_name()


@pytest.mark.parametrize(("text", "expected"), [("0", Std.NONE), ("1", Std.OUT), ("2", Std.ERR), ("3", Std.ALL)])
def test_a_stream_selector_may_be_one_number(text: str, expected: Std) -> None:
    """Row 178."""
    assert expected == Std.from_str(text)


@given(chosen=st.dictionaries(st.integers(0, 200), st.sampled_from(Std), min_size=1))
def test_a_stream_selector_may_map_ranks_of_any_size(chosen: dict[int, Std]) -> None:
    """Rows 067, 069 and 178."""
    text = ",".join(f"{rank}:{std.value}" for rank, std in chosen.items())

    assert chosen == Std.from_str(text)


@pytest.mark.parametrize("text", ["", "4", "-1", "0:1,", ",0:1", "0:4", "a:1", "0:1 ", "0;1", "1\n", "00"])
def test_a_bad_stream_selector_is_refused_by_name(text: str) -> None:
    """Row 068."""
    with pytest.raises(ValueError) as caught:
        Std.from_str(text)

    assert repr(text) in str(caught.value)


def test_ranks_that_a_map_leaves_out_are_not_redirected() -> None:
    """Rows 067 and 178."""
    assert {0: Std.NONE, 1: Std.ALL, 2: Std.NONE} == to_map({1: Std.ALL, 7: Std.OUT}, 3)


def test_one_selector_holds_for_all_ranks() -> None:
    assert {0: Std.ERR, 1: Std.ERR} == to_map(Std.ERR, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_nodes": 1.5},
        {"max_restarts": 1.5},
        {"rdzv_configs": None},
        {"preload": 5},
        {"preload": ["a", 5]},
        {"shutdown_timeout": "x"},
        {"shutdown_timeout": True},
        {"virtual_local_rank": "no"},
        {"shutdown_timeout": math.nan},
        {"exit_timeout": "x"},
        {"show": -1},
        {"show": "0"},
        {"show": [0.5]},
        {"show": {}.keys},
        {"devices": [-1]},
        {"devices": [0.5]},
        {"devices": ["0", ""]},
        {"devices": "0,,1"},
        {"devices": -1},
        {"devices": [None]},
        {"devices": 1.5},
        {"exit_timeout": math.inf},
        {"monitor_interval": math.inf},
        {"rdzv_timeout": "x"},
        {"signals_to_handle": None},
        {"log_line_prefix_template": 5},
        {"run_id": 5},
        {"run_id": "a\0b"},
        {"run_id": "\ud800"},
        {"role": None},
        {"logs_specs": 3},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_value(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        LaunchConfig(**fields)


def test_assignment_keeps_the_timeout_and_its_dictionary_together() -> None:
    config = LaunchConfig()

    config.rdzv_timeout = 7
    after_timeout = dict(config.rdzv_configs)
    config.rdzv_configs = {"a": 1}

    assert {"timeout": 7} == after_timeout
    assert {"a": 1, "timeout": 7} == config.rdzv_configs


def test_assignment_holds_the_rules_between_fields() -> None:
    config = LaunchConfig(no_python=True)

    with pytest.raises(ConfigError, match="no_python=True cannot be combined with module=True"):
        config.module = True
    with pytest.raises(ConfigError, match="below min_nodes=2"):
        config.min_nodes = 2


@pytest.mark.parametrize("value", [5, -1, "3", {"a": 1}, {0: 9}, None])
def test_streams_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a Std"):
        DefaultLogsSpecs(redirects=value)


def test_plain_numbers_name_streams_too() -> None:
    assert DefaultLogsSpecs(redirects=Std.ALL, tee={0: Std.OUT}) == DefaultLogsSpecs(redirects=3, tee={0: 1})  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize(
    ("preload", "why"),
    [("auto,numpy", ": 'auto' cannot be combined"), ("learn", " is no longer supported: use 'auto'")],
)
def test_auto_stands_alone_and_nothing_is_learned(preload: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"preload='{preload}'{why}"):
        LaunchConfig(1, 1, 1, preload=preload)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ((), ()),
        ("", ()),
        (0, (0,)),
        ([1, 0], (1, 0)),
        (range(2), (0, 1)),
        ("0, 1", (0, 1)),
        (["2", "GPU-8932f937"], (2, "GPU-8932f937")),
    ],
)
def test_devices_are_indices_or_names(given: object, expected: object) -> None:
    assert expected == LaunchConfig(devices=given).devices  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), ("all", "all"), (0, (0,)), ((), ()), ([1, 0], (1, 0)), (range(2), (0, 1))]
)
def test_ranks_that_are_shown_are_numbers_or_all(given: object, expected: object) -> None:
    assert expected == LaunchConfig(show=given).show  # type: ignore[arg-type]
