"""Destinations of measured values, and the metrics of a function that measures itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib import metrics
from elasticlib.errors import ConfigError
from elasticlib.metrics import _metric_streams


class Kept(metrics.MetricHandler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.data: list[metrics.MetricData] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.data.append(metric_data)

    def values(self) -> dict[str, float]:
        return {each.name: each.value for each in self.data}

    def __len__(self) -> int:
        return 0  # an empty container is a handler all the same


@pytest.fixture(autouse=True)
def former_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_metric_streams, "_handlers", {None: metrics.NullMetricHandler()})  # as before any test


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    metrics.configure(handler, "input")
    yield handler


def test_a_value_reaches_the_handler_of_its_group_with_its_time(kept: Kept) -> None:
    before = time.time()

    metrics.put_metric("rows", 512, "input")

    (data,) = kept.data
    assert (data.group_name, data.name, data.value) == ("input", "rows", 512)
    assert before <= data.timestamp <= time.time()


def test_a_group_without_a_handler_uses_the_common_one(kept: Kept) -> None:
    common = Kept()
    metrics.configure(common)

    metrics.put_metric("a", 1)
    metrics.put_metric("b", 1, "input")

    assert (["a"], ["b"]) == ([each.name for each in common.data], [each.name for each in kept.data])
    assert common.data[0].group_name == "torchelastic"


def test_values_are_dropped_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.put_metric("a", 1)

    assert isinstance(metrics.getStream("torchelastic").handler, metrics.NullMetricHandler)
    assert capsys.readouterr() == ("", "")


def test_the_console_gets_a_line_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "input", "rows", 512))

    assert capsys.readouterr().out == "[1.5][input]: rows=512\n"


def test_a_handler_without_emit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no method emit"):
        metrics.configure(print)  # type: ignore[arg-type]


@metrics.prof(group="input")
def load(fails: bool = False) -> str:
    """Load it."""
    if fails:
        raise KeyError("no such row")
    return "rows"


class Loader:
    @metrics.prof(group="input")
    def load(self, error: BaseException | None = None) -> None:
        if error is not None:
            raise error


def test_measured_function_emits_its_success_and_its_duration(kept: Kept) -> None:
    assert load() == "rows"

    assert set(kept.values()) == {"test_streams.load.success", "test_streams.load.duration.ms"}
    assert kept.values()["test_streams.load.success"] == 1
    assert kept.values()["test_streams.load.duration.ms"] >= 0


def test_measured_function_emits_its_failure_and_raises(kept: Kept) -> None:
    with pytest.raises(KeyError, match="no such row"):
        load(fails=True)

    assert set(kept.values()) == {"test_streams.load.failure", "test_streams.load.duration.ms"}


def test_a_method_is_called_by_its_class(kept: Kept) -> None:
    Loader().load()

    assert set(kept.values()) == {"Loader.load.success", "Loader.load.duration.ms"}


def test_an_interrupt_is_neither_success_nor_failure(kept: Kept) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loader().load(KeyboardInterrupt())

    assert set(kept.values()) == {"Loader.load.duration.ms"}


def test_a_measured_function_keeps_its_name_and_its_text() -> None:
    assert (load.__name__, load.__doc__) == ("load", "Load it.")


def test_prof_needs_no_parentheses() -> None:
    common = Kept()
    metrics.configure(common)

    @metrics.prof
    def work() -> int:
        return 7

    assert work() == 7
    assert [each.group_name for each in common.data] == ["torchelastic", "torchelastic"]


def test_durations_are_whole_milliseconds(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0129])
    monkeypatch.setattr("elasticlib.metrics._metric_streams.monotonic", lambda: next(times))

    Loader().load()

    assert kept.values()["Loader.load.duration.ms"] == 12


def test_elapsed_time_is_in_whole_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.5019)

    assert metrics.get_elapsed_time_ms(10.0) == 2501


def test_profile_is_deprecated_and_takes_the_bare_name(kept: Kept) -> None:
    with pytest.warns(FutureWarning, match="prof"):
        decorated = metrics.profile("input")

    decorated(Loader().load)()

    assert "load.success" in kept.values()


def test_publish_metric_is_deprecated_and_puts_the_value(kept: Kept) -> None:
    with pytest.warns(FutureWarning, match="put_metric"):
        metrics.publish_metric("input", "rows", 3)

    assert kept.values() == {"rows": 3}


@pytest.mark.parametrize("params", [None, {}, {"handler": "null"}])
def test_a_configuration_may_ask_for_no_handler(params: dict[str, str] | None) -> None:
    metrics.initialize_metrics(metrics.MetricsConfig(params))

    assert isinstance(metrics.getStream("any").handler, metrics.NullMetricHandler)


def test_a_configuration_may_ask_for_the_console() -> None:
    metrics.initialize_metrics(metrics.MetricsConfig({"handler": "console"}))

    assert isinstance(metrics.getStream("any").handler, metrics.ConsoleMetricHandler)


def test_without_a_configuration_nothing_changes(kept: Kept) -> None:
    metrics.initialize_metrics()
    metrics.initialize_metrics(metrics.MetricsConfig())

    assert metrics.getStream("input").handler is kept


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"a": "b"}, "the key 'a' is unknown"),
        ({"handler": "console", "url": "x"}, "the key 'url' is unknown"),
        ({"handler": "statsd"}, "'statsd' is unknown: give one of console, null"),
        ({"handler": ["console"]}, "is unknown: give one of console, null"),
    ],
)
def test_a_configuration_that_nothing_reads_is_named(params: Any, named: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics.initialize_metrics(metrics.MetricsConfig(params))

    assert 1 == len(caplog.records)
    assert named in caplog.text
