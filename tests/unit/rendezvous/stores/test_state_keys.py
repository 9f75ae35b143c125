"""Keys in one state: what is written, what is shown, and whose hold is over, by the clock of whoever looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Condition
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._keys import RenewedKey
from elasticlib.rendezvous.stores._state_document import Document, decode_document
from elasticlib.rendezvous.stores._state_keys import LONGEST, SHORTEST, RendezvousBackend, SharedState, StateKeys
from tests.unit.untrusted import spoiled, strange

TTL = 10.0


class Backend(RendezvousBackend):
    """A state in memory; *rivals* are written in between, once each, as if another node were faster."""

    name = "memory"

    def __init__(self) -> None:
        self.state: tuple[bytes, int] | None = None
        self.rivals: list[bytes] = []
        self.looks = self.writes = 0

    def get_state(self) -> tuple[bytes, Any] | None:
        self.looks += 1
        return self.state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if self.rivals:
            self.state = self.rivals.pop(), -len(self.rivals) - 1
        if token != (None if self.state is None else self.state[1]):
            return None if self.state is None else (*self.state, False)
        self.writes += 1
        self.state = state, self.writes
        return state, self.writes, True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def node(backend: Backend, clock: Clock) -> StateKeys:
    return StateKeys(SharedState(backend, clock))


def seized(keys: StateKeys) -> RenewedKey:
    hold = keys.seize("/leader", "a", TTL)
    assert hold is not None
    return hold


def leader(keys: StateKeys) -> bytes | None:
    (item,), _ = keys.read(["/leader"])
    return None if item is None else item.data


@given(st.dictionaries(st.text(), st.binary()), st.floats(0.01, 1e6))
def test_encoded_document_decodes_to_the_same(values: dict[str, bytes], ttl: float) -> None:
    document = Document().put(values).hold("/leader", b"\xff", ttl).renew("/leader")

    assert document == decode_document(document.encode())


GOOD = Document().put({"/job/inbox/1": b"x", "/job/keys/a": b"\xff"}).hold("/leader", b"me", TTL).renew("/leader")


@given(spoiled(GOOD.encode()) | strange)
def test_any_content_of_the_state_is_refused_or_usable(data: bytes) -> None:
    backend, clock = Backend(), Clock()
    backend.state = (data, 0)
    keys = StateKeys(SharedState(backend, clock))
    try:
        keys.read(["/leader"])
    except RendezvousStateError as error:
        assert len(str(error)) < 1000
        assert str(error).isprintable()
        return
    clock.now += 5e9
    keys.entries("/job/inbox", 0)
    keys.write({"/job/keys/a": b"y"})
    keys.seize("/leader", "b", TTL)
    keys.clear("/job")

    assert decode_document(backend.state[0]).items.keys() >= {"/leader"}


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x80",
        b"[]",
        b"{}",
        b'{"v":2,"rev":0,"keys":{},"held":{}}',
        b'{"v":1,"rev":-1,"keys":{},"held":{}}',
        b'{"v":1,"rev":true,"keys":{},"held":{}}',
        b'{"v":1,"rev":1,"keys":{"k":["x",1]},"held":{}}',
        b'{"v":1,"rev":1,"keys":{"k":["\\u00e4",1,1]},"held":{}}',
        b'{"v":1,"rev":1,"keys":{"k":[["?"],1,1]},"held":{}}',
        b'{"v":1,"rev":1,"keys":{},"held":{"k":[1,1]}}',
        b'{"v":1,"rev":1,"keys":{"k":["x",1,1]},"held":{"k":[0,1]}}',
        b'{"v":1,"rev":1,"keys":{"k":["x",1,1]},"held":{"k":[NaN,1]}}',
        b'{"keys":' * 5000,
    ],
)
def test_invalid_document_raises_clear_error(garbage: bytes, backend: Backend, clock: Clock) -> None:
    backend.state = garbage, 1

    with pytest.raises(RendezvousStateError, match="comes from another program"):
        node(backend, clock).read(["/key"])


def test_the_state_is_json_that_a_person_can_read(backend: Backend, clock: Clock) -> None:
    node(backend, clock).write({"/key": b"value"})

    assert backend.state is not None
    assert {"/key": ["value", 1, 1]} == json.loads(backend.state[0])["keys"]


def test_a_version_grows_with_each_change_and_birth_stays(backend: Backend, clock: Clock) -> None:
    keys = node(backend, clock)
    for data in (b"1", b"2"):
        keys.write({"/key": data, "/other": data})
    keys.delete(["/other"])
    keys.write({"/other": b"3"})

    (key, other), _ = keys.read(["/key", "/other"])

    assert key is not None
    assert other is not None
    assert (b"2", 2, 1) == (key.data, key.version, key.born)
    assert other.born == other.version == 4


def test_write_is_repeated_on_top_after_a_rival_wrote_first(backend: Backend, clock: Clock) -> None:
    backend.rivals = [Document(7).put({"/theirs": b"1"}).encode()]

    keys = node(backend, clock)
    keys.write({"/ours": b"1"})

    assert [b"1", b"1"] == [item and item.data for item in keys.read(["/theirs", "/ours"])[0]]


def test_a_swap_that_was_forestalled_is_turned_down(backend: Backend, clock: Clock) -> None:
    backend.rivals = [Document().put({"/key": b"theirs"}).encode()]

    assert node(backend, clock).swap("/key", b"ours", 0) is None


def test_nothing_is_written_where_nothing_changes(backend: Backend, clock: Clock) -> None:
    keys = node(backend, clock)
    hold = seized(keys)
    keys.release(hold)
    writes = backend.writes

    keys.delete(["/absent"])
    keys.release(hold)

    assert (writes, False) == (backend.writes, keys.renew(hold))


def test_holder_is_lost_if_another_sees_no_renewal_for_its_lifetime(backend: Backend, clock: Clock) -> None:
    holder, other = node(backend, clock), node(backend, clock)
    hold = seized(holder)
    assert other.seize("/leader", "b", TTL) is None

    clock.now += 0.9 * TTL
    assert holder.renew(hold)
    assert leader(other) is not None
    clock.now += TTL
    assert leader(other) is not None
    clock.now += 0.1
    seen = leader(other)
    taken = other.seize("/leader", "b", TTL)

    assert seen is None
    assert taken is not None
    assert (False, False) == (holder.holds(hold), holder.renew(hold))
    with pytest.raises(LeadershipLost):
        holder.write({"/key": b"late"}, hold)
    with pytest.raises(LeadershipLost):
        holder.delete(["/key"], hold)
    assert holder.swap("/key", b"late", 0, hold) is None


def test_newcomer_gives_a_holder_its_whole_time_to_live(backend: Backend, clock: Clock) -> None:
    """However old the last renewal is: no time of another clock is in the state."""
    seized(node(backend, clock))
    clock.now += 100 * TTL

    late = node(backend, clock)

    assert leader(late) is not None
    clock.now += 1.1 * TTL
    assert leader(late) is None


def test_lost_holder_counts_as_a_change_without_any_write(backend: Backend, clock: Clock) -> None:
    seized(node(backend, clock))
    other = node(backend, clock)
    _, before = other.read(["/leader"])
    clock.now += 1.1 * TTL

    (item,), after = other.read(["/leader"])

    assert item is None
    assert after > before


@pytest.mark.parametrize("interrupted", [True, False], ids=["interrupted", "changed"])
def test_a_wait_does_not_begin_for_what_was(backend: Backend, clock: Clock, interrupted: bool) -> None:
    keys = node(backend, clock)
    _, since = keys.read(["/key"])
    if interrupted:
        keys.interrupt()
    else:
        node(backend, clock).write({"/key": b"1"})
        clock.now += 1.1 * LONGEST

    keys.changed("/key", since, timeout=1e9)


class Waiting(Condition):
    """Time passes by waiting, and what is due then happens."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.due: list[tuple[float, Callable[[], None]]] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.clock.now += timeout
        while self.due and self.due[0][0] <= self.clock.now:
            self.due.pop(0)[1]()
        return False


@pytest.mark.parametrize("piece", [100.0, 3.3], ids=["in one piece", "in many"])
def test_long_wait_without_a_change_looks_once_a_second(backend: Backend, clock: Clock, piece: float) -> None:
    state = SharedState(backend, clock)
    state.turned = Waiting(clock)
    keys = StateKeys(state)
    (_, view) = keys.read(["/key"])

    while clock.now < 100.0:
        keys.changed("/key", view, timeout=min(piece, 100.0 - clock.now))

    assert 90 < backend.looks < 115


@pytest.mark.parametrize("longest", [0.3, LONGEST])
def test_change_after_a_long_wait_is_seen_soon_and_resets_the_pause(
    backend: Backend, clock: Clock, longest: float
) -> None:
    state = SharedState(backend, clock, longest)
    state.turned = waiting = Waiting(clock)
    keys, other = StateKeys(state), node(backend, clock)
    (_, view) = keys.read(["/key"])
    waiting.due.append((50.0, lambda: other.write({"/key": b"1"})))

    keys.changed("/key", view, timeout=1e9)

    assert 50.0 <= clock.now <= 50.0 + 2 * longest
    assert SHORTEST == state.pause("/key", False, 2)


def test_all_who_wait_in_a_program_share_each_look(backend: Backend, clock: Clock) -> None:
    state = SharedState(backend, clock)
    state.turned = waiting = Waiting(clock)
    one, other = StateKeys(state), StateKeys(state)
    (_, view) = one.read(["/a", "/b"])
    one.changed("/a", view, timeout=20.0)
    other.changed("/b", view, timeout=20.0)
    looks = backend.looks
    for second in range(20):  # half a pause after the other
        waiting.due.append((40.5 + second, lambda: other.changed("/b", view, timeout=1e-6)))

    one.changed("/a", view, timeout=20.0)

    assert backend.looks - looks < 25


def test_entries_are_returned_once_in_order_of_creation(backend: Backend, clock: Clock) -> None:
    keys = node(backend, clock)
    for number in range(5):
        keys.append("/inbox", str(number).encode())
    keys.append("/inbox2", b"elsewhere")

    found, _ = keys.entries("/inbox", 0)

    assert [b"0", b"1", b"2", b"3", b"4"] == [item.data for item in found]
    assert [b"3", b"4"] == [item.data for item in keys.entries("/inbox", found[2].born)[0]]


def test_closed_connection_raises_clear_error_and_its_clone_works(backend: Backend, clock: Clock) -> None:
    keys = node(backend, clock)
    clone = keys.clone()
    keys.close()

    with pytest.raises(RendezvousConnectionError, match="connection to the rendezvous backend 'memory' is closed"):
        keys.read(["/key"])
    assert ([None], 0) == (clone.read(["/key"])[0], clone.read(["/key"])[1])


def test_a_state_that_was_set_back_is_not_believed_until_it_has_caught_up(backend: Backend, clock: Clock) -> None:
    keys = node(backend, clock)
    keys.write({"/key": b"1"})
    old = backend.state
    keys.write({"/key": b"2"})
    new = backend.state

    backend.state = old
    for use in (lambda: keys.read(["/key"]), lambda: keys.write({"/other": b"3"}), lambda: keys.seize("/l", "a", 5.0)):
        with pytest.raises(RendezvousConnectionError, match="went back from revision 2 to 1"):
            use()
    assert backend.state == old
    backend.state = new

    (item,), _ = keys.read(["/key"])
    assert item is not None
    assert b"2" == item.data
