"""One node's side: what it reports, when its descriptor is readable, what it leaves behind."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from elasticlib.errors import RendezvousClosedError, RendezvousStateError
from elasticlib.rendezvous._exchange import Exchange, box_key, inbox_key
from elasticlib.rendezvous._member import Member
from elasticlib.rendezvous._messages import (
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Notice,
    Report,
    RoundEnd,
    Stopped,
    Succeeded,
    decode,
    encode,
)
from elasticlib.rendezvous.memory import MemoryExchange

LIMIT = 30.0
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)
NOTES = (FailureNote(0, 0, 10, 1),)
END = RoundEnd(0, "enough", True)
FINAL = Final(True, "all done")


@pytest.fixture
def exchange() -> Exchange:
    return MemoryExchange()


@pytest.fixture
def member(exchange: Exchange) -> Iterator[Member]:
    member = Member(exchange, "a")
    yield member
    member.close()


def tell(exchange: Exchange, box: int, index: int, notice: Notice) -> None:
    exchange.set(box_key(box, index), encode(notice))


def readable(member: Member, seconds: float) -> bool:
    return bool(select.select([member], [], [], seconds)[0])


def take(member: Member) -> list[Notice]:
    assert readable(member, LIMIT), f"no notice within {LIMIT:g} s"
    return member.take()


def test_reports_go_into_the_inbox_in_order(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    member.failed(3, NOTES)
    member.stopped(3, NOTES)
    member.succeeded(4)
    member.leave("SIGTERM", round=4)

    expected: list[Report] = [
        Join("a", OFFER),
        Failed("a", 3, NOTES),
        Stopped("a", 3, NOTES),
        Succeeded("a", 4),
        Leave("a", "SIGTERM", 4),
    ]
    assert expected == [decode(exchange.get(inbox_key(number)) or b"") for number in range(1, 6)]


def test_a_notice_makes_the_descriptor_readable_until_it_is_taken(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    tell(exchange, 1, 0, END)

    assert [END] == take(member)
    assert not readable(member, 0)
    assert [] == member.take()


def test_take_never_blocks(member: Member) -> None:
    assert [] == member.take()


def test_notices_keep_their_order(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    tell(exchange, 1, 1, FINAL)
    tell(exchange, 1, 0, END)

    taken = take(member)
    while len(taken) < 2:
        taken += take(member)
    assert [END, FINAL] == taken


def test_notices_are_deleted_once_read(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    tell(exchange, 1, 0, END)
    take(member)

    assert exchange.get(box_key(1, 0)) is None


def test_a_new_join_turns_to_its_own_box(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    member.join(OFFER)
    tell(exchange, 1, 0, END)
    tell(exchange, 2, 0, FINAL)

    assert [FINAL] == take(member)


def test_what_is_no_notice_is_raised_by_take(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    exchange.set(box_key(1, 0), b"rubbish")

    assert readable(member, LIMIT)
    with pytest.raises(RendezvousStateError, match="no message of this job"):
        member.take()


def test_a_report_in_a_box_is_raised_by_take(member: Member, exchange: Exchange) -> None:
    member.join(OFFER)
    exchange.set(box_key(1, 0), encode(Succeeded("b", 0)))

    assert readable(member, LIMIT)
    with pytest.raises(RendezvousStateError, match="box/1/0 holds a Succeeded"):
        member.take()


@pytest.mark.parametrize("joined", [False, True])
def test_close_ends_the_thread_and_frees_the_descriptor(joined: bool) -> None:
    threads, descriptors = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
    member = Member(MemoryExchange(), "a")
    if joined:
        member.join(OFFER)
    member.close()
    member.close()

    assert threads == threading.active_count()
    assert descriptors == sorted(os.listdir("/proc/self/fd"))


def test_a_closed_member_takes_nothing_and_refuses_reports() -> None:
    member = Member(MemoryExchange(), "a")
    member.close()

    assert [] == member.take()
    with pytest.raises(RendezvousClosedError, match="node a has closed its rendezvous: Succeeded"):
        member.succeeded(0)


def test_the_descriptor_is_not_inherited(member: Member) -> None:
    assert not os.get_inheritable(member.fileno())
