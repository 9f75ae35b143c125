"""A configuration of torch's class: taken by its fields, or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import pytest

from elasticlib._torch_config import as_launch_config
from elasticlib.errors import ConfigError
from elasticlib.numa import AffinityMode, NumaOptions
from elasticlib.spec import LaunchConfig, LogsDest, LogsSpecs, Std


class Logs(LogsSpecs):
    """Stands in for one of torch's."""

    def reify(self, envs: Any) -> LogsDest:
        return LogsDest()

    @property
    def root_log_dir(self) -> str:
        return "logs"


LOGS = Logs()
THEIRS: dict[str, Any] = {
    "min_nodes": 2,
    "max_nodes": 3,
    "nproc_per_node": 4,
    "logs_specs": LOGS,
    "run_id": "job7",
    "role": "trainer",
    "rdzv_endpoint": "node0:2379",
    "rdzv_backend": "etcd",
    "rdzv_configs": {"timeout": 60},
    "rdzv_timeout": 60,
    "max_restarts": 5,
    "monitor_interval": 0.5,
    "start_method": "spawn",
    "log_line_prefix_template": "${rank}: ",
    "metrics_cfg": {"handler": "null"},
    "local_addr": "10.0.0.7",
    "event_log_handler": "console",
    "numa_options": NumaOptions(AffinityMode.NODE),
    "signals_to_handle": "SIGTERM",
    "duplicate_stdout_filters": ["loss"],
    "duplicate_stderr_filters": ["error"],
    "virtual_local_rank": True,
    "shutdown_timeout": 7,
}


def theirs(more: Any = (), name: str = "LaunchConfig", **values: Any) -> Any:
    """A dataclass with torch's name and fields, and *more* of them."""
    given = {**THEIRS, **values}
    fields = [(each, Any) for each in given]
    return dataclasses.make_dataclass(name, [*fields, *more])(**given)


def test_all_fields_of_torchs_are_known() -> None:
    assert list(THEIRS) == [each.name for each in attrs.fields(LaunchConfig) if not each.kw_only]


def test_torchs_configuration_is_taken_field_by_field() -> None:
    mine = as_launch_config(theirs())

    assert mine == LaunchConfig(**THEIRS)
    assert THEIRS == {each.name: getattr(mine, each.name) for each in attrs.fields(LaunchConfig) if not each.kw_only}


def test_torchs_configuration_is_not_changed() -> None:
    configs: dict[str, Any] = {}
    given = theirs(rdzv_configs=configs, rdzv_timeout=-1)

    as_launch_config(given).run_id = "other"

    assert (configs, given.run_id) == ({}, "job7")


def test_our_own_configuration_is_the_same_object() -> None:
    mine = LaunchConfig()

    assert as_launch_config(mine) is mine


def test_a_subclass_of_torchs_is_taken_by_torchs_fields() -> None:
    kind = type("Theirs", (type(theirs()),), {"extra": 5})

    assert as_launch_config(kind(**THEIRS)) == LaunchConfig(**THEIRS)


def test_fields_that_a_release_of_torch_lacks_have_our_defaults() -> None:
    kind = dataclasses.make_dataclass("LaunchConfig", [("min_nodes", int), ("max_nodes", int), ("nproc_per_node", int)])

    assert as_launch_config(kind(1, 1, 2)) == LaunchConfig(1, 1, 2)


def test_unread_field_is_named_unless_it_has_its_default(caplog: pytest.LogCaptureFixture) -> None:
    more = [
        ("redirects", Any, dataclasses.field(default=Std.NONE)),
        ("tags", Any, dataclasses.field(default_factory=dict)),
    ]
    silent = theirs(more)
    speaks = theirs(more)
    speaks.redirects = Std.ALL

    assert as_launch_config(silent) == LaunchConfig(**THEIRS)
    assert "" == caplog.text
    assert as_launch_config(speaks) == LaunchConfig(**THEIRS)
    assert "redirects=<Std.ALL: 3> has no effect" in caplog.text


def test_a_value_that_breaks_a_rule_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="min_nodes=0"):
        as_launch_config(theirs(min_nodes=0))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (7, "config=7"),
        (LaunchConfig, "config=<class"),
        (None, "config=None"),
        ({"token": "s3cret"}, "config, a dict,"),
        (theirs(name="Config"), "config, a Config,"),
        (type("LaunchConfig", (), {})(), "config, a LaunchConfig that is not a dataclass,"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}.* not a LaunchConfig: give one, such as") as caught:
        as_launch_config(value)

    assert "s3cret" not in str(caught.value)
