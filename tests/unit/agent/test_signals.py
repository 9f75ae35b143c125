"""Signals as events: what is parsed, collected and put back."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from elasticlib._wire import wait_readable
from elasticlib.agent._signals import Signals, parse
from elasticlib.errors import ConfigError

LIMIT = 30.0


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """What a handler of the user's, installed for SIGUSR1 and SIGUSR2, was called with."""
    came: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    signums = (signal.SIGUSR1, signal.SIGUSR2)
    former = [signal.signal(signum, handler) for signum in signums]
    yield came
    for signum, handler_before in zip(signums, former, strict=True):
        signal.signal(signum, handler_before)


def test_names_become_signals_in_their_order() -> None:
    assert parse("SIGTERM,SIGINT,SIGUSR1") == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def test_blanks_and_empty_parts_are_no_signals() -> None:
    assert parse(" SIGTERM , ,SIGHUP,") == (signal.SIGTERM, signal.SIGHUP)
    assert parse("") == ()


def test_an_unknown_name_is_warned_of_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "elasticlib"):
        found = parse("SIGTERM,SIGNOSUCH")

    assert found == (signal.SIGTERM,)
    assert "SIGNOSUCH" in caplog.text


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_signal_that_cannot_be_caught_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse(f"SIGTERM,{name}")


def test_a_signal_is_collected_and_not_acted_on(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        signal.raise_signal(signal.SIGUSR1)
        taken = signals.take()

    assert taken == [signal.SIGUSR1]
    assert seen == []


def test_signals_are_taken_once_and_oldest_first(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1, signal.SIGUSR2)) as signals:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        first, second = signals.take(), signals.take()

    assert first == [signal.SIGUSR2, signal.SIGUSR1]
    assert second == []


def test_a_waiting_signal_makes_the_descriptor_readable_until_it_is_taken(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        before = wait_readable([signals], 0)
        signal.raise_signal(signal.SIGUSR1)
        while_waiting = wait_readable([signals], 0)
        signals.take()
        afterwards = wait_readable([signals], 0)

        assert (before, while_waiting, afterwards) == (set(), {signals.fileno()}, set())


def test_a_signal_ends_a_wait(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        sender = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
        sender.start()
        readable = wait_readable([signals], LIMIT)
        sender.join()

        assert readable == {signals.fileno()}


def test_other_signals_are_left_to_their_handlers(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)):
        signal.raise_signal(signal.SIGUSR2)

    assert seen == [signal.SIGUSR2]


def test_the_former_handlers_come_back(seen: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    with Signals((signal.SIGUSR1,)):
        meanwhile = signal.getsignal(signal.SIGUSR1)

    assert meanwhile != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_former_handlers_come_back_after_an_exception(seen: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    with pytest.raises(RuntimeError, match="of the launch"), Signals((signal.SIGUSR1,)):
        raise RuntimeError("of the launch")

    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_former_handlers_come_back_for_a_signal_that_was_named_twice(seen: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    with Signals(parse("SIGUSR1,SIGUSR1")):
        pass

    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_that_nobody_took_reaches_the_former_handler(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)):
        signal.raise_signal(signal.SIGUSR1)

    assert seen == [signal.SIGUSR1]


def test_a_signal_that_nobody_took_does_not_hide_an_exception(seen: list[int]) -> None:
    def interrupted() -> None:
        with Signals((signal.SIGUSR1,)):
            signal.raise_signal(signal.SIGUSR1)
            raise RuntimeError("of the launch")

    with pytest.raises(RuntimeError, match="of the launch"):
        interrupted()
    assert seen == []


def test_another_thread_installs_no_handler(seen: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    found: list[object] = []

    def enter() -> None:
        with Signals((signal.SIGUSR1,)) as signals:
            found.extend((signal.getsignal(signal.SIGUSR1), signals.take()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(LIMIT)

    assert found == [before, []]


def test_leaving_frees_the_descriptor(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        number = signals.fileno()

    assert signals.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
