"""A job carried by nothing but a state that is compared before it is set, as people's own backends are."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend
from elasticlib.rendezvous.handlers._dynamic import ROOT, StateBackend
from elasticlib.rendezvous.protocol._exchange import Exchange
from elasticlib.rendezvous.stores._election import CompareAndSetExchange
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend, SharedState, StateKeys
from tests.contract.test_etcd_election import ElectionContract
from tests.contract.test_exchange import ExchangeContract

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

HEARTBEAT = 10.0


class InMemory(RendezvousBackend):
    """The least that a backend must do, as somebody would write it."""

    name = "memory"

    def __init__(self) -> None:
        self.state: tuple[bytes, int] | None = None
        self.lock = threading.Lock()

    def get_state(self) -> tuple[bytes, Any] | None:
        return self.state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        with self.lock:
            present = None if self.state is None else self.state[1]
            if token == present:
                self.state = state, (present or 0) + 1
                return *self.state, True
            return None if self.state is None else (*self.state, False)


class InStore(C10dRendezvousBackend):
    """Our own backend, in a store without a server."""

    def __init__(self) -> None:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        super().__init__(HashStore(), "job")


class Nodes(StateBackend):
    """Backend whose connections each read the state separately, like those of many nodes."""

    _root = ROOT

    def __init__(self, backend: RendezvousBackend) -> None:
        super().__init__(backend, HEARTBEAT)
        self._holder = backend

    def connect(self, timeout: float) -> StateKeys:
        return StateKeys(SharedState(self._holder))


@pytest.fixture(params=[InMemory, InStore], ids=["memory", "c10d"])
def backend(request: pytest.FixtureRequest) -> RendezvousBackend:
    made: RendezvousBackend = request.param()
    return made


class TestExchange(ExchangeContract):
    @pytest.fixture(autouse=True)
    def set_backend(self, backend: RendezvousBackend) -> None:
        self.state_backend = backend

    def connect(self) -> Exchange:
        return StateBackend(self.state_backend, HEARTBEAT).dial(1.0)

    def test_a_closed_connection_is_a_clear_error(self, exchange: Exchange) -> None:
        exchange.close()

        with pytest.raises(RendezvousConnectionError, match=r"closed$"):
            exchange.read(["key"])


class TestElection(ElectionContract):
    @pytest.fixture(autouse=True)
    def job(self, backend: RendezvousBackend) -> None:
        self.backend = Nodes(backend)


def test_many_writers_at_once_lose_nothing(backend: RendezvousBackend) -> None:
    """Each sees the state for itself, and is forestalled again and again."""
    writers = 8

    def write(number: int) -> None:
        exchange = CompareAndSetExchange(StateKeys(SharedState(backend)), ROOT)
        for index in range(5):
            exchange.post(f"{number}/{index}".encode())
            exchange.write({f"{number}/{index}": b"1"})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    reader = CompareAndSetExchange(StateKeys(SharedState(backend)), ROOT)
    posted = [each.data.decode() for each in reader.receive(0.0)]
    expected = [f"{number}/{index}" for number in range(writers) for index in range(5)]
    assert sorted(expected) == sorted(posted)
    assert [b"1"] * len(expected) == reader.read(expected)
    for number in range(writers):
        own = [each for each in posted if each.startswith(f"{number}/")]
        assert own == sorted(own)


def test_exception_of_a_backend_raises_connection_error() -> None:
    class Broken(InMemory):
        def get_state(self) -> tuple[bytes, Any] | None:
            raise OSError(uuid.uuid4().hex)

    with pytest.raises(RendezvousConnectionError, match="the backend failed: OSError"):
        StateBackend(Broken(), HEARTBEAT).dial(1.0)
