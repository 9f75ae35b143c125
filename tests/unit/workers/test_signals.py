"""Signals as events: what is parsed, collected and put back."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from elasticlib.errors import ConfigError, LaunchInterrupted, SignalException
from elasticlib.processes._wire import wait_readable
from elasticlib.workers import _signals
from elasticlib.workers._signals import (
    NOTICES,
    DeferredSignals,
    HandledSignals,
    Inbox,
    NoticeReceived,
    Raising,
    Signals,
    StacksRequest,
    end_signals,
    interruption,
    parse_signals,
)

LIMIT = 30.0


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Yield the signals with which the user's handler of SIGUSR1 and SIGUSR2 was called."""
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    signums = (signal.SIGUSR1, signal.SIGUSR2)
    former = [signal.signal(signum, handler) for signum in signums]
    yield received
    for signum, handler_before in zip(signums, former, strict=True):
        signal.signal(signum, handler_before)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("SIGTERM,SIGINT,SIGUSR1", (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),
        (" SIGTERM , ,SIGHUP,", (signal.SIGTERM, signal.SIGHUP)),
        ("", ()),
        ("SIGTERM,SIGNOSUCH", (signal.SIGTERM,)),
    ],
    ids=["in order", "blanks and empty parts", "none", "unknown"],
)
def test_names_become_signals_and_an_unknown_one_is_warned_of(
    names: str, found: tuple[signal.Signals, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "elasticlib"):
        assert found == parse_signals(names)

    assert ("SIGNOSUCH" in names) == ("SIGNOSUCH" in caplog.text) == bool(caplog.text)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_signal_that_cannot_be_caught_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_signals(f"SIGTERM,{name}")


def test_signals_are_collected_once_oldest_first_and_not_acted_on(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1, signal.SIGUSR2)) as signals:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        first, second = signals.drain(), signals.drain()

    assert ([signal.SIGUSR2, signal.SIGUSR1], []) == (first, second)
    assert seen == []


def test_a_waiting_signal_makes_the_descriptor_readable_until_it_is_taken(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        before = wait_readable([signals], 0)
        signal.raise_signal(signal.SIGUSR1)
        while_waiting = wait_readable([signals], 0)
        signals.drain()
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


@pytest.mark.parametrize("names", ["SIGUSR1", "SIGUSR1,SIGUSR1"])
@pytest.mark.parametrize("error", [None, RuntimeError("of the launch")], ids=["well", "with an error"])
def test_former_handlers_are_restored(names: str, error: Exception | None, seen: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    with contextlib.suppress(RuntimeError), Signals(parse_signals(names)):
        meanwhile = signal.getsignal(signal.SIGUSR1)
        if error is not None:
            raise error

    assert meanwhile != before
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


def test_leaving_frees_the_descriptor(seen: list[int]) -> None:
    with Signals((signal.SIGUSR1,)) as signals:
        number = signals.fileno()

    assert signals.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


# Signals that raise.


@pytest.fixture
def hang_ups() -> Iterator[list[int]]:
    """Collects SIGHUP where nobody else does."""
    received: list[int] = []
    former = signal.signal(signal.SIGHUP, lambda signum, frame: received.append(signum))
    yield received
    signal.signal(signal.SIGHUP, former)


def raising() -> Raising:
    handlers = Raising((signal.SIGHUP,), "it tested")
    handlers.install()
    return handlers


def test_signal_raises_an_exception_that_names_what_it_interrupted(hang_ups: list[int]) -> None:
    handlers = raising()

    with pytest.raises(SignalException, match="got SIGHUP while it tested") as caught:
        signal.raise_signal(signal.SIGHUP)
    handlers.remove()

    assert caught.value.sigval is signal.SIGHUP
    assert hang_ups == []


def test_an_interrupt_is_a_keyboard_interrupt_too() -> None:
    assert isinstance(interruption(signal.SIGINT, "it tested"), LaunchInterrupted)
    assert isinstance(interruption(signal.SIGINT, "it tested"), KeyboardInterrupt)


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_removed_handlers_leave_the_programs_own(hang_ups: list[int]) -> None:
    own = signal.getsignal(signal.SIGHUP)
    handlers = raising()

    for _ in range(2):
        handlers.remove()

    assert signal.getsignal(signal.SIGHUP) is own


def test_handlers_that_were_removed_in_another_thread_pass_the_signal_on(hang_ups: list[int]) -> None:
    own = signal.getsignal(signal.SIGHUP)
    handlers = raising()
    in_another_thread(handlers.remove)

    signal.raise_signal(signal.SIGHUP)

    assert hang_ups == [signal.SIGHUP]
    assert signal.getsignal(signal.SIGHUP) is own


@pytest.mark.parametrize("first", [0, 1])
def test_handlers_upon_handlers_may_be_removed_in_any_order(hang_ups: list[int], first: int) -> None:
    own = signal.getsignal(signal.SIGHUP)
    both = raising(), raising()

    for each in (both[first], both[1 - first]):
        each.remove()

    assert signal.getsignal(signal.SIGHUP) is own


def test_the_handler_that_is_left_still_raises(hang_ups: list[int]) -> None:
    lower, upper = raising(), raising()
    lower.remove()

    with pytest.raises(SignalException):
        signal.raise_signal(signal.SIGHUP)
    upper.remove()


def test_a_loop_on_top_collects_what_would_raise(hang_ups: list[int]) -> None:
    handlers = raising()

    with Signals((signal.SIGHUP,)) as signals:
        signal.raise_signal(signal.SIGHUP)
        received = signals.drain()
    handlers.remove()

    assert received == [signal.SIGHUP]


def test_in_another_thread_nothing_is_installed(hang_ups: list[int]) -> None:
    own = signal.getsignal(signal.SIGHUP)
    in_another_thread(raising)

    assert signal.getsignal(signal.SIGHUP) is own


# What others ask beside them.


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    yield found
    found.close()


def test_inbox_entries_are_taken_once_and_oldest_first(inbox: Inbox) -> None:
    inbox.put("first")
    inbox.put(2)

    assert ["first", 2] == inbox.drain()
    assert [] == inbox.drain()


def test_quit_asks_for_stacks_and_stops_when_it_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(_signals, "monotonic", lambda: now)
    with contextlib.closing(Inbox(quit_shows_stacks=True)) as inbox:
        stops = []
        for now in (100.0, 104.9, 200.0, 300.0):  # noqa: B007 - the clock of above
            stops.append(inbox.put_signal(signal.SIGQUIT))
        stops.append(inbox.put_signal(signal.SIGTERM))

        received = [item if isinstance(item, int) else type(item) for item in inbox.drain()]

    assert [False, True, False, False, True] == stops
    assert [StacksRequest, signal.SIGQUIT, StacksRequest, StacksRequest, signal.SIGTERM] == received


def test_quit_stops_if_the_user_requested_that(inbox: Inbox) -> None:
    with HandledSignals((signal.SIGQUIT,), inbox) as handled:
        signal.raise_signal(signal.SIGQUIT)

    assert [signal.SIGQUIT] == handled.received == inbox.drain()


def test_quit_that_requests_stacks_does_not_count_as_a_stop() -> None:
    with (
        contextlib.closing(Inbox(quit_shows_stacks=True)) as inbox,
        HandledSignals((signal.SIGQUIT, signal.SIGTERM), inbox) as handled,
    ):
        signal.raise_signal(signal.SIGQUIT)

    assert [] == handled.received


def test_deferred_signal_wakes_listeners_but_not_a_start(inbox: Inbox) -> None:
    inbox.put("may wait", may_wait=True)
    assert {inbox.fileno()} == wait_readable([inbox, inbox.hurry()], 0)

    inbox.put("now")
    assert {inbox.fileno(), inbox.hurry()} == wait_readable([inbox, inbox.hurry()], 0)

    inbox.drain()
    assert set() == wait_readable([inbox, inbox.hurry()], 0)


def test_signals_lie_in_an_inbox_that_was_given_and_stay_there(seen: list[int], inbox: Inbox) -> None:
    inbox.put("before")
    with Signals((signal.SIGUSR1,), inbox):
        signal.raise_signal(signal.SIGUSR1)

    assert ["before", signal.SIGUSR1] == inbox.drain()
    assert [] == seen


def test_closed_inbox_accepts_items_that_nobody_reads() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.close()

    inbox.put("too late")

    assert (-1, -1) == (inbox.fileno(), inbox.hurry())
    assert ["too late"] == inbox.drain()


def test_other_thread_handles_no_signals_but_reads_the_inbox(seen: list[int], inbox: Inbox) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    observed = []

    def listen() -> None:
        with Signals((signal.SIGUSR1,), inbox) as signals:
            observed.append((signal.getsignal(signal.SIGUSR1), wait_readable([signals], LIMIT)))

    inbox.put("stop")
    in_another_thread(listen)

    assert [(before, {inbox.fileno()})] == observed


# Interrupts that are put off.


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_deferred_interrupt_arrives_at_the_end() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with DeferredSignals():
            interrupt()
            steps.append("whole")
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredSignals():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_interrupt_arrives_at_once_while_deferral_is_lifted() -> None:
    steps = []
    with DeferredSignals() as put_off:
        with pytest.raises(KeyboardInterrupt), put_off.lifted:
            interrupt()
            steps.append("never")
        steps.append("whole")
    with pytest.raises(KeyboardInterrupt), DeferredSignals() as put_off:
        interrupt()
        with put_off.lifted:
            steps.append("never")
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_within_another_puts_off_to_the_end_of_the_outer_one() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals():
        with DeferredSignals():
            interrupt()
        steps.append("whole")
    assert steps == ["whole"]


def test_ignored_interrupts_stay_ignored() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredSignals():
            interrupt()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_another_thread_puts_nothing_off() -> None:
    seen = []

    def look() -> None:
        with DeferredSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    in_another_thread(look)
    assert seen == [signal.default_int_handler]


# Signals that are the workers' alone.


@pytest.fixture
def by_default() -> Iterator[None]:
    """SIGUSR1 and SIGUSR2 would end this process."""
    former = [signal.signal(signum, signal.SIG_DFL) for signum in NOTICES]
    yield
    for signum, handler in zip(NOTICES, former, strict=True):
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", NOTICES)
def test_a_notice_is_collected_for_the_workers_and_interrupts_no_start(
    signum: signal.Signals, by_default: None, inbox: Inbox
) -> None:
    with HandledSignals((signal.SIGTERM,), inbox, takes_notices=True):
        signal.raise_signal(signum)

    assert (set(), {inbox.fileno()}) == (wait_readable([inbox.hurry()], 0), wait_readable([inbox], 0))
    assert [NoticeReceived(signum)] == inbox.drain()
    assert signal.SIG_DFL == signal.getsignal(signum)


def test_a_notice_that_the_program_handles_itself_is_its_own(seen: list[int], inbox: Inbox) -> None:
    with HandledSignals((), inbox, takes_notices=True):
        signal.raise_signal(signal.SIGUSR1)

    assert ([signal.SIGUSR1], []) == (seen, inbox.drain())


def test_a_notice_stays_with_a_handler_of_c_code(by_default: None, inbox: Inbox, tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        # A thread that an earlier test has left would have lines of its own.
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        with HandledSignals((), inbox, takes_notices=True):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)

    assert 2 == (tmp_path / "stacks").read_text().count("most recent call first") and [] == inbox.drain()


def test_a_notice_that_is_listed_stops_the_job(by_default: None, inbox: Inbox) -> None:
    with HandledSignals((signal.SIGUSR1,), inbox, takes_notices=True):
        signal.raise_signal(signal.SIGUSR1)

    assert [signal.SIGUSR1] == inbox.drain()


@pytest.mark.parametrize(("signum", "handled"), [(signal.SIGINT, True), (signal.SIGQUIT, True), (signal.SIGHUP, False)])
def test_of_what_was_ignored_only_a_hangup_stays_so(signum: signal.Signals, handled: bool) -> None:
    """A shell ignores SIGINT and SIGQUIT for its background jobs; SIGHUP is ignored by whoever types nohup."""
    former = signal.signal(signum, signal.SIG_IGN)
    try:
        with HandledSignals((signum,), Inbox()) as collected:
            signal.raise_signal(signum)
        ignored_again = signal.getsignal(signum) == signal.SIG_IGN
    finally:
        signal.signal(signum, former)

    assert ([signum] if handled else [], True) == (collected.received, ignored_again)


HANDLED = (signal.SIGTERM, signal.SIGINT, *NOTICES)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("", set()),
        ("SIGTERM", {signal.SIGTERM}),
        (" USR1, SIGTERM ,", {signal.SIGUSR1, signal.SIGTERM}),
    ],
)
def test_signals_that_announce_an_end(names: str, found: set[signal.Signals]) -> None:
    assert found == end_signals(names, HANDLED)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SIGNONE", "is not a signal"),
        ("10", "is not a signal"),
        ("INT", "on a person's request"),
        ("SIGKILL", "is not handled"),
        ("SIGWINCH", "is not handled"),
    ],
)
def test_other_signals_announce_no_end(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"preempt_signal.*{name}.*{why}.*SIGTERM, SIGUSR1, SIGUSR2"):
        end_signals(name, HANDLED)
