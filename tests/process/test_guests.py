"""How the host of a store finds the guests that live in it, whatever strangers write there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, COORDINATOR_HEARTBEAT
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores._guests import Claim, Guests
from elasticlib.rendezvous.stores._torch_store import StoreExchange

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]
LONG = 30.0
REGISTER = "elasticlib//guests"
HEARTBEAT = 10.0


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", QUIET_LOOKUPS)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


@pytest.fixture
def host() -> Iterator[C10dBackend]:
    """Hosts a store, and its job is over."""
    backend = C10dBackend(Job(run_id="host", node="h", backend="c10d", endpoint="127.0.0.1:0", max_nodes=2))
    assert backend.serve(time.monotonic() + LONG)
    yield backend
    backend.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def connection(host: C10dBackend, run_id: str) -> StoreExchange:
    exchange = host.dial(LONG)
    assert isinstance(exchange, StoreExchange)
    return exchange.of(run_id)


def come(host: C10dBackend, run_id: str) -> tuple[Claim, StoreExchange]:
    """A guest begins."""
    claim, exchange = Claim(run_id, HEARTBEAT, run_id.encode()), connection(host, run_id)
    assert claim.take(exchange)
    exchange.write({COORDINATOR_HEARTBEAT: b"1"})
    return claim, exchange


def announce(host: C10dBackend, run_id: str, heartbeat: float = HEARTBEAT) -> None:
    body = json.dumps({"run_id": run_id, "heartbeat": heartbeat}).encode()
    connection(host, "").append("guests", body)


def scribble(host: C10dBackend, key: str, value: bytes | None) -> None:
    store: Any = host.server
    if value is None:
        store.delete_key(key)
    else:
        store.set(key, value)
    store.check([key])


def test_a_guest_that_no_store_could_hold_hides_no_other(host: C10dBackend) -> None:
    come(host, "good")
    announce(host, "x" * 9000)

    assert ["good"] == Guests(connection(host, "host")).living()


def test_a_heartbeat_that_no_store_hands_out_hides_no_other_guest(
    host: C10dBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(host, "bad")
    _, good = come(host, "good")
    read = StoreExchange.read

    def break_off(self: StoreExchange, keys: list[str]) -> list[bytes | None]:
        if self._run_id == "bad":
            raise RendezvousConnectionError("the connection was reset")
        return read(self, keys)

    monkeypatch.setattr(StoreExchange, "read", break_off)
    clock = Clock()
    guests = Guests(connection(host, "host"), clock)
    before = guests.living()
    good.write({COORDINATOR_HEARTBEAT: b"2"})
    clock.now = 21.0

    assert [["bad", "good"], ["good"]] == [before, guests.living()]


@pytest.mark.parametrize("lie", [b"junk", b"", b"-5", b"1010", b"9" * 30, b"9" * 5000, b"\xff", None])
def test_guests_are_found_and_kept_whatever_becomes_of_their_counter(host: C10dBackend, lie: bytes | None) -> None:
    come(host, "good")
    guests = Guests(connection(host, "host"))
    before = guests.living()
    scribble(host, REGISTER, lie)

    assert [["good"]] * 3 == [before, guests.living(), Guests(connection(host, "host")).living()]


@pytest.mark.parametrize("lie", [b"junk", b"1010"])
def test_guests_are_kept_where_a_stranger_s_key_is_no_text(host: C10dBackend, lie: bytes) -> None:
    """Then the store does not tell its keys."""
    come(host, "good")
    guests = Guests(connection(host, "host"))
    guests.living()
    scribble(host, REGISTER, lie)
    host.server.set(b"\xff\xfe", "1")

    assert [["good"]] * 2 == [guests.living(), Guests(connection(host, "host")).living()]


def test_a_crowd_of_announcements_hides_no_guest(host: C10dBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticlib.rendezvous.stores._guests.MOST", 3)
    for number in range(5):
        announce(host, f"a{number}", 0.001)
    come(host, "good")
    for number in range(5):
        announce(host, f"b{number}", 0.001)
    clock = Clock()
    guests = Guests(connection(host, "host"), clock)
    seen = set()
    for _ in range(6):
        seen |= set(guests.living())
        clock.now += 1.0

    assert ["good"] == guests.living()
    assert len(seen) > 3


def test_announcement_is_removed_of_a_dead_guest_and_kept_of_a_live_one(
    host: C10dBackend,
) -> None:
    clock = Clock()
    guests = Guests(connection(host, "host"), clock)
    come(host, "dead")
    claim, exchange = come(host, "living")
    office = claim.coordinating(exchange)
    for count in range(3):
        office.write({ANNOUNCEMENT: b"hello", COORDINATOR_HEARTBEAT: b"%d" % count})
        guests.living()
        clock.now += 19.0
    left = [host.server.check([f"{REGISTER}/{number}"]) for number in (1, 2)]
    scribble(host, f"{REGISTER}/2", None)
    office.write({ANNOUNCEMENT: b"hello", COORDINATOR_HEARTBEAT: b"4"})

    assert [False, True] == left
    assert host.server.check([f"{REGISTER}/2"])
    assert ["living"] == Guests(connection(host, "host")).living()


def test_a_host_stays_its_time_for_a_guest_whatever_strangers_announce(host: C10dBackend) -> None:
    come(host, "good")
    announce(host, "x" * 9000)
    scribble(host, REGISTER, b"junk")
    told: list[list[str]] = []
    began = time.monotonic()

    host.stay(1.0, told.append, threading.Event())

    assert [["good"]] == told
    assert time.monotonic() - began >= 1.0
