"""Events as JSON, and the loggers and handlers that they go through."""

from __future__ import annotations

import json
import logging
import pickle
import uuid
from collections.abc import Iterator

import pytest

from elasticlib import events
from elasticlib.elastic.events import handlers
from elasticlib.errors import ConfigError, UnknownNameError
from elasticlib.events import _destinations
from tests.patching import replace_everywhere


class Kept(logging.Handler):
    """Keeps the texts that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.levels: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        assert not record.args, "the text is JSON, not a format"
        self.texts.append(record.msg)
        self.levels.add(record.levelno)


@pytest.fixture(autouse=True)
def former_handlers() -> Iterator[None]:
    before = dict(_destinations.handlers)
    yield
    _destinations.handlers.clear()
    _destinations.handlers.update(before)


@pytest.fixture
def name() -> str:
    """A destination that no other test has used: loggers live as long as the program."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def kept(name: str) -> Kept:
    handler = Kept()
    events.add_logging_handler(name, handler)
    return handler


EVENT = events.Event("epoch", events.EventSource.WORKER, 12, {"number": 3, "share": 0.5, "last": False, "why": None})
STEP = events.RdzvEvent("file:function", "job", "joined", "host", 7, events.NodeState.RUNNING, rank=1)


def test_an_event_survives_json() -> None:
    assert events.Event.deserialize(EVENT.serialize()) == EVENT
    assert str(EVENT) == EVENT.serialize()
    assert json.loads(str(EVENT))["source"] == "WORKER"


def test_an_event_of_a_rendezvous_survives_json() -> None:
    assert events.RdzvEvent.deserialize(STEP.serialize()) == STEP
    assert str(STEP) == STEP.serialize()


def test_deserialize_returns_an_object_that_is_already_an_event() -> None:
    assert events.Event.deserialize(EVENT) is EVENT
    assert events.RdzvEvent.deserialize(STEP) is STEP


def test_fields_that_are_left_out_have_their_defaults() -> None:
    event = events.Event.deserialize('{"name": "a", "source": "AGENT"}')

    assert event == events.Event("a", events.EventSource.AGENT, 0, {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "no 'source'"),
        ('{"name": "a"}', "no 'source'"),
        ('{"name": "a", "source": "NOBODY"}', "'NOBODY' is not a valid EventSource: give one of AGENT, WORKER"),
        ('{"name": "a", "source": ["AGENT"]}', "not a valid EventSource"),
        ('{"name": "a", "source": "AGENT", "colour": 1}', "colour"),
        ('{"source": "AGENT"}', "name"),
        (7, "string that serialize"),
    ],
)
def test_value_that_is_not_an_event_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        events.Event.deserialize(text)


def test_an_unknown_state_is_refused_with_the_known_ones() -> None:
    text = STEP.serialize().replace("RUNNING", "FLYING")

    with pytest.raises(UnknownNameError, match=r"FLYING.*INIT, RUNNING, SUCCEEDED, FAILED"):
        events.RdzvEvent.deserialize(text)


def test_an_event_reaches_the_handler_of_its_destination_as_json(name: str, kept: Kept) -> None:
    events.record(EVENT, name)

    assert kept.texts == [EVENT.serialize()]
    assert kept.levels == {logging.INFO}


def test_events_stay_out_of_the_programs_other_loggers(name: str, kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    events.record(EVENT, name)

    assert caplog.records == []
    assert not logging.getLogger(f"torchelastic-events-{name}").propagate


def test_event_is_not_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    events.record(EVENT)

    assert capfd.readouterr() == ("", "")


def test_the_console_is_what_stderr_is_by_then(capsys: pytest.CaptureFixture[str]) -> None:
    events.record(EVENT, "console")

    assert capsys.readouterr() == ("", EVENT.serialize() + "\n")


def test_a_program_without_stderr_has_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)

    events.record(EVENT, "console")


def test_a_destination_may_get_another_handler_later(name: str, kept: Kept) -> None:
    events.record(EVENT, name)
    other = Kept()
    events.add_logging_handler(name, other)

    events.record(EVENT, name)

    assert (len(kept.texts), len(other.texts)) == (1, 1)


def test_handlers_may_be_added_to_the_table_as_in_torch(name: str) -> None:
    handlers._log_handlers[name] = kept = Kept()

    events.record(EVENT, name)

    assert events.get_logging_handler(name) is kept
    assert len(kept.texts) == 1


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ERROR", logging.ERROR),
        ("error", logging.ERROR),
        ("40", 40),
        (" warning ", logging.WARNING),
        ("", logging.INFO),
    ],
)
def test_the_level_is_that_of_the_environment(
    name: str, kept: Kept, monkeypatch: pytest.MonkeyPatch, text: str, level: int
) -> None:
    monkeypatch.setenv("LOGLEVEL", text)

    events.record(EVENT, name)

    assert logging.getLogger(f"torchelastic-events-{name}").level == level


def test_invalid_log_level_logs_a_warning_and_events_are_still_shown(
    name: str, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOGLEVEL", "chatty")

    events.record(EVENT, name)
    events.record(EVENT, name)

    assert len(kept.texts) == 2
    (warning,) = caplog.messages
    assert warning.startswith("LOGLEVEL='chatty' is not a log level")


def test_an_unknown_destination_is_a_key_error_that_lists_the_known_ones() -> None:
    with pytest.raises(KeyError) as caught:
        events.record(EVENT, "nowhere")

    assert isinstance(caught.value, ConfigError)
    assert "'nowhere' is unknown: give one of console, dynamic_rendezvous, null" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("destination", ["", None])
def test_a_handler_needs_a_name(destination: str) -> None:
    with pytest.raises(ConfigError, match="destination"):
        events.add_logging_handler(destination, logging.NullHandler())


def test_only_handlers_of_logging_are_taken(name: str) -> None:
    with pytest.raises(ConfigError, match=r"logging\.Handler"):
        events.add_logging_handler(name, print)  # type: ignore[arg-type]


def test_no_event_of_a_rendezvous_is_made_while_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[events.RdzvEvent] = []
    replace_everywhere(monkeypatch, _destinations, "record_rdzv_event", made.append)

    events.construct_and_record_rdzv_event("job", "joined", events.NodeState.RUNNING)

    assert made == []


@pytest.fixture
def steps() -> Kept:
    """Takes the events of rendezvous."""
    handler = Kept()
    events.add_logging_handler("dynamic_rendezvous", handler)
    return handler


def test_an_event_of_a_rendezvous_names_its_place_in_the_code(steps: Kept) -> None:
    events.construct_and_record_rdzv_event("job", "joined", events.NodeState.RUNNING, hostname="h", pid=7, rank=2)

    (event,) = map(events.RdzvEvent.deserialize, steps.texts)
    assert event == events.RdzvEvent(
        "test_destinations.py:test_an_event_of_a_rendezvous_names_its_place_in_the_code",
        "job",
        "joined",
        "h",
        7,
        events.NodeState.RUNNING,
        rank=2,
    )


def test_failed_rendezvous_is_recorded_with_its_traceback(steps: Kept) -> None:
    try:
        raise ValueError("no store")
    except ValueError:
        events.construct_and_record_rdzv_event("job", "failed", events.NodeState.FAILED, name="join")

    (event,) = map(events.RdzvEvent.deserialize, steps.texts)
    assert event.name == "test_destinations.py:join"
    assert "ValueError: no store" in event.error_trace
    assert event.hostname
    assert event.pid > 0


def test_torchs_module_of_handlers_is_ours() -> None:
    assert handlers.get_logging_handler is events.get_logging_handler
