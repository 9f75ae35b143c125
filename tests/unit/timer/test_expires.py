"""`expires`: what is asked of the client, however the block ends."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Iterator

import pytest

from elasticlib import timer
from elasticlib.errors import ConfigError, TimerError
from elasticlib.timer import _api

HERE = pathlib.Path(__file__).name


class Client(timer.TimerClient):
    def __init__(self) -> None:
        self.acquired: list[tuple[str, float]] = []
        self.released: list[str] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.acquired.append((scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.released.append(scope_id)


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_api, "_client", None)
    yield


def test_without_a_client_the_block_is_not_entered() -> None:
    with pytest.raises(TimerError, match=r"timer\.configure") as caught, timer.expires(after=1):
        pytest.fail("the block was entered")

    assert isinstance(caught.value, RuntimeError)


def test_the_configured_client_is_used_and_a_given_one_beats_it() -> None:
    first, second = Client(), Client()
    timer.configure(first)

    with timer.expires(after=1, scope="a"):
        pass
    with timer.expires(after=1, scope="b", client=second):
        pass

    assert (["a"], ["b"]) == (first.released, second.released)


def test_the_deadline_is_wall_clock_time_from_the_entry_on() -> None:
    client = Client()
    countdown = timer.expires(after=60, client=client)
    before = time.time()

    with countdown:
        after = time.time()

    ((_, deadline),) = client.acquired
    assert before + 60 <= deadline <= after + 60


def test_the_scope_is_the_callers_line_unless_it_has_a_name() -> None:
    client = Client()

    with timer.expires(after=1, client=client):
        pass

    file, _, line = client.acquired[0][0].rpartition("#")
    assert HERE == pathlib.Path(file).name
    assert "timer.expires(after=1, client=client)" in pathlib.Path(__file__).read_text().splitlines()[int(line) - 1]


def test_a_timer_is_released_when_the_block_raises() -> None:
    client = Client()

    with pytest.raises(KeyError), timer.expires(after=1, scope="a", client=client):
        raise KeyError("b")

    assert ["a"] == client.released


def test_decorated_function_has_a_timer_for_each_call() -> None:
    client = Client()

    @timer.expires(after=5, scope="work", client=client)
    def work() -> int:
        return len(client.acquired)

    assert (1, 2) == (work(), work())
    assert ["work", "work"] == client.released


@pytest.mark.parametrize("after", [math.nan, "5", None, 10**400])
def test_invalid_number_of_seconds_is_refused(after: object) -> None:
    with pytest.raises(ConfigError, match=r"after=.* must be a number of seconds"):
        timer.expires(after=after)  # type: ignore[arg-type]


def test_requests_with_equal_content_are_equal() -> None:
    assert timer.TimerRequest(1, "a", 2.0) == timer.TimerRequest(1, "a", 2.0)
    assert timer.TimerRequest(1, "a", 2.0) != timer.TimerRequest(1, "a", 3.0)
    assert timer.FileTimerRequest(1, "a", 2.0, 9) == timer.FileTimerRequest(1, "a", 2.0, 9)
    assert timer.FileTimerRequest(1, "a", 2.0, 9) != timer.FileTimerRequest(1, "a", 2.0, 15)
    assert timer.TimerRequest(1, "a", 2.0) != "a"


class Broken(Client):
    """Its server went away meanwhile."""

    def release(self, scope_id: str) -> None:
        raise BrokenPipeError("no server")


def test_a_release_that_fails_does_not_hide_what_the_block_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="b"), timer.expires(after=1, scope="a", client=Broken()):
        raise KeyError("b")

    assert "timer 'a' could not be released: BrokenPipeError: no server" in caplog.text


def test_a_release_that_fails_after_a_block_that_ended_well_is_raised() -> None:
    with pytest.raises(BrokenPipeError, match="no server"), timer.expires(after=1, scope="a", client=Broken()):
        pass
