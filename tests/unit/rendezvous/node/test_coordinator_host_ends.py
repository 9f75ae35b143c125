"""How the thread that runs the coordinator ends: nothing that was ordered is left unsaid, no office is held in vain."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.coordinator import _coordinator
from elasticlib.rendezvous.coordinator._server_events import Action, Event
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.node._coordinator_host import Host
from elasticlib.rendezvous.protocol._exchange import ANNOUNCEMENT, mailbox_key, mailbox_name
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Descriptor,
    Envelope,
    Final,
    Join,
    Report,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Receive
from elasticlib.rendezvous.stores._memory import MemoryExchange

LIMIT = 15.0
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)


def test_an_end_that_was_ordered_is_told_though_the_host_closes_at_once() -> None:
    memory = MemoryExchange()

    def say(seq: int, report: Report) -> None:
        memory.post(encode(Envelope(seq, report)))

    host = Host(memory.clone(), Rules(1, 1), run_id="job", name="host")
    entered, goes_on = threading.Event(), threading.Event()
    do = host._do

    def receive_slowly(action: Action) -> Event | None:
        if isinstance(action, Receive) and host._server.state.round is not None:
            entered.set()
            goes_on.wait(LIMIT)
        return do(action)

    host._do = receive_slowly  # type: ignore[method-assign]
    host.start()
    assert memory.wait(ANNOUNCEMENT, LIMIT)
    say(1, Join("a", OFFER))
    assert entered.wait(LIMIT)
    # Both come between the end of a turn and the wait for the next one.
    host.abandon("the node that hosts the store left")
    closer = threading.Thread(target=host.close, args=(LIMIT,))
    closer.start()
    closer.join(0.1)
    goes_on.set()
    key = mailbox_key(mailbox_name("a", 1), 1)

    told = memory.wait(key, LIMIT)

    assert told
    final = decode(memory.read([key])[0] or b"")
    assert isinstance(final, Final)
    assert "the node that hosts the store left" in final.why
    say(2, Acknowledgement("a"))
    closer.join(LIMIT)
    assert not closer.is_alive()


class Deaf:
    """A journal whose store goes away while its holder tells that it broke."""

    broken = False

    def load(self) -> bytes | None:
        return None

    def save(self, data: bytes) -> None:
        if self.broken:
            raise RendezvousConnectionError("etcd does not answer")

    def exchange(self) -> MemoryExchange:
        raise AssertionError("the host has one")

    def purge(self) -> None:
        raise AssertionError("the job is not over")

    def close(self) -> None:
        pass


def test_a_holder_that_breaks_and_cannot_tell_anybody_says_so_to_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would stay in office, and nobody would coordinate."""
    state_log = Deaf()
    host = Host(MemoryExchange(), Rules(1, 1), run_id="job", name="host", state_log=state_log)

    def broken(state: Any, event: Any, now: float) -> Any:
        state_log.broken = True
        raise ZeroDivisionError("step")

    monkeypatch.setattr(_coordinator, "step", broken)

    with pytest.raises(RendezvousConnectionError, match="etcd does not answer"):
        host.run()
