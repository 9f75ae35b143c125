"""Arguments that an agent refuses when it is made, and its warnings about a subclass."""

from __future__ import annotations

import abc
import datetime
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib.agent import LocalElasticAgent, SimpleElasticAgent
from elasticlib.agent._health import HealthCheckServer
from elasticlib.errors import ConfigError
from elasticlib.launch import launch_agent
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.rendezvous import Rendezvous, Rules, open_local
from elasticlib.spec import LaunchConfig, WorkerSpec


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with open_local("job", Rules()) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("logs_specs", 5, "must be a LogsSpecs"),
        ("logs_specs", None, "must be a LogsSpecs"),
        ("log_line_prefix_template", 5, "must be a string"),
        ("log_line_prefix_template", b"x", "must be a string"),
        ("shutdown_timeout", "x", "must be a number of seconds, 0"),
        ("shutdown_timeout", -1, "must be a number of seconds, 0"),
        ("shutdown_timeout", float("nan"), "must be a number of seconds, 0"),
        ("shutdown_timeout", None, "must be a number of seconds, 0"),
        ("shutdown_timeout", datetime.timedelta(seconds=5), "must be a number of seconds, 0"),
        ("uninterruptible_state_timeout", "5m", "must be a number of seconds"),
        ("uninterruptible_state_timeout", float("nan"), "must be a number of seconds"),
        ("uninterruptible_state_timeout", [5], "must be a number of seconds"),
        ("health_check_server", 42, r"has no stop\(\) method"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_before_anything_is_prepared(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, name: str, value: object, rule: str
) -> None:
    prepared: list[object] = []
    monkeypatch.setattr("elasticlib.agent._local.prepare_workers", lambda *arguments: prepared.append(arguments))
    spec = WorkerSpec("trainer", 1, rendezvous, entrypoint=print)
    options: dict[str, Any] = {"logs_specs": DefaultLogsSpecs(), name: value}

    with pytest.raises(ConfigError, match=f"{name}=.*{rule}"):
        LocalElasticAgent(spec, **options)

    assert [] == prepared


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_line_prefix_template", ""),
        ("shutdown_timeout", 0),
        ("shutdown_timeout", 2.5),
        ("uninterruptible_state_timeout", 0),
        ("uninterruptible_state_timeout", -1),
        ("uninterruptible_state_timeout", "2.5"),
        ("health_check_server", HealthCheckServer(lambda: 0, 0, 60)),
    ],
)
def test_an_argument_that_can_be_is_taken(rendezvous: Rendezvous, name: str, value: Any) -> None:
    spec = WorkerSpec("trainer", 1, rendezvous, entrypoint=print)

    LocalElasticAgent(spec, DefaultLogsSpecs(), **{name: value})


def test_a_path_where_no_pipe_can_be_is_refused_before_the_nodes_meet(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", "/no/such/folder/timers")
    joined: list[object] = []
    monkeypatch.setattr(rendezvous.member, "join", lambda *arguments: joined.append(arguments))
    agent = LocalElasticAgent(WorkerSpec("trainer", 1, rendezvous, entrypoint=print), DefaultLogsSpecs())

    with pytest.raises(ConfigError, match="TORCHELASTIC_TIMER_FILE='/no/such/folder/timers'"):
        agent.run()

    assert [] == joined


def test_any_agent_refuses_a_shutdown_timeout_that_is_not_a_number(rendezvous: Rendezvous) -> None:
    agent: Any = type("Agent", (SimpleElasticAgent,), dict.fromkeys(SimpleElasticAgent.__abstractmethods__, print))

    with pytest.raises(ConfigError, match="shutdown_timeout='5s' must be a number of seconds, 0"):
        agent(WorkerSpec("trainer", 1, rendezvous, entrypoint=print), shutdown_timeout="5s")


def test_launch_refuses_an_invalid_health_check_server_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unwanted(*_: object) -> None:
        pytest.fail("the launch was prepared")

    monkeypatch.setattr("elasticlib.launch.prepare_workers", unwanted)
    server: Any = 42

    with pytest.raises(ConfigError, match=r"health_check_server=42 has no stop\(\) method"):
        launch_agent(LaunchConfig(nproc_per_node=1), print, (), server)


def test_unstoppable_health_check_server_does_not_hide_the_refusal() -> None:
    class Stubborn(HealthCheckServer):
        def stop(self) -> None:
            raise KeyError("x")

    config: Any = 5

    with pytest.raises(ConfigError):
        launch_agent(config, print, (), Stubborn(lambda: 0, 0, 60))


# Subclasses.

UNCALLED = (
    "_invoke_run",
    "_rendezvous",
    "_assign_worker_ranks",
    "_initialize_workers",
    "_restart_workers",
    "_exit_barrier",
)


@pytest.mark.parametrize("base", [SimpleElasticAgent, LocalElasticAgent])
@pytest.mark.parametrize("name", UNCALLED)
def test_unused_method_of_torchs_loop_is_a_warning_at_the_class(base: type[SimpleElasticAgent], name: str) -> None:
    with pytest.warns(UserWarning, match=f"Mine.*{name}.*this agent never calls") as caught:

        class Mine(base):  # type: ignore[misc, valid-type]
            locals()[name] = lambda self, *args: None

    (warning,) = caught
    assert __file__ == warning.filename
    for hook in ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"):
        assert hook in str(warning.message)


def test_several_such_methods_are_one_warning_and_a_mixins_count_too() -> None:
    class Mixin:
        def _exit_barrier(self) -> None:
            pass

    with pytest.warns(UserWarning, match="_rendezvous and _exit_barrier") as caught:

        class Mine(Mixin, SimpleElasticAgent, abc.ABC):
            def _rendezvous(self, worker_group: object) -> None:
                pass

    assert 1 == len(caught)

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Heir(Mine):  # said once already
            pass


def test_subclass_that_overrides_hooks_gets_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Mine(LocalElasticAgent):
            def _start_workers(self, worker_group: Any) -> dict[int, object]:
                return super()._start_workers(worker_group)
