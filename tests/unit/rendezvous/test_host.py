"""The thread that runs the coordinator: what it reads, writes and survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elasticlib.rendezvous import _host
from elasticlib.rendezvous._coordinator import Rules
from elasticlib.rendezvous._exchange import box_key, inbox_key, post
from elasticlib.rendezvous._host import Host
from elasticlib.rendezvous._messages import (
    Descriptor,
    Final,
    Join,
    Leave,
    Notice,
    Report,
    RoundEnd,
    Seat,
    Stopped,
    Succeeded,
    decode,
    encode,
)
from elasticlib.rendezvous.memory import MemoryExchange

LIMIT = 30.0
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)


class Office:
    """An exchange with a host behind it."""

    def __init__(self, rules: Rules) -> None:
        self.exchange = MemoryExchange()
        self.host = Host(self.exchange, rules)
        self.host.start()

    def say(self, report: Report) -> int:
        return post(self.exchange, encode(report))

    def read(self, box: int, index: int) -> Notice:
        key = box_key(box, index)
        assert self.exchange.wait(key, LIMIT), f"no notice at {key} within {LIMIT:g} s"
        notice = decode(self.exchange.get(key) or b"")
        assert isinstance(notice, (Seat, RoundEnd, Final))
        return notice


@pytest.fixture
def office() -> Iterator[Office]:
    office = Office(Rules())
    yield office
    office.host.close()


def test_a_join_is_answered_in_the_box_of_its_number(office: Office) -> None:
    box = office.say(Join("a", OFFER))

    assert isinstance(office.read(box, 0), Seat)


def test_notices_to_one_box_are_numbered(office: Office) -> None:
    box = office.say(Join("a", OFFER))
    office.say(Stopped("a", 0, ()))
    office.say(Leave("a", "SIGTERM"))

    kinds = [type(office.read(box, index)) for index in range(3)]
    assert [Seat, RoundEnd, Final] == kinds


def test_reports_are_deleted_once_read(office: Office) -> None:
    box = office.say(Join("a", OFFER))
    office.read(box, 0)

    assert office.exchange.get(inbox_key(box)) is None


@pytest.mark.parametrize("rubbish", [b"", b"rubbish", encode(Final(True, "forged"))])
def test_what_is_no_report_is_refused_and_logged(
    office: Office, rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    post(office.exchange, rubbish)
    box = office.say(Join("a", OFFER))

    assert isinstance(office.read(box, 0), Seat)
    assert "a report was refused" in caplog.text


def test_the_coordinators_own_deadline_wakes_it() -> None:
    office = Office(Rules(1, 2, last_call=0.01))
    box = office.say(Join("a", OFFER))

    assert isinstance(office.read(box, 0), Seat)
    office.host.close()


def test_the_clock_that_was_given_is_the_one_that_counts() -> None:
    exchange = MemoryExchange()
    times = iter([0.0, 0.0, 601.0, 601.0, 601.0])
    host = Host(exchange, Rules(2, 2), clock=lambda: next(times))
    host.start()
    box = post(exchange, encode(Join("a", OFFER)))

    assert exchange.wait(box_key(box, 0), LIMIT)
    notice = decode(exchange.get(box_key(box, 0)) or b"")
    assert isinstance(notice, Final) and "1 of at least 2 nodes" in notice.why
    host.close()


def test_a_broken_coordinator_tells_everybody(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    box = office.say(Join("a", OFFER))
    office.read(box, 0)

    def broken(*_: object) -> None:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(_host, "step", broken)
    office.say(Succeeded("a", 0))

    assert Final(False, "the coordinator broke: ArithmeticError('no such number')") == office.read(box, 1)
    assert "ArithmeticError" in caplog.text


def test_close_ends_the_thread_and_may_come_again_or_too_early() -> None:
    before = threading.active_count()
    Host(MemoryExchange(), Rules()).close()
    office = Office(Rules())
    office.host.close()
    office.host.close()

    assert before == threading.active_count()
