"""Operations of the tests on the store of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elasticlib.rendezvous.protocol._exchange import Exchange


@contextmanager
def answering(exchange: Exchange) -> Iterator[None]:
    """Within it somebody receives what comes to the inbox, as a coordinator does."""
    over = threading.Event()

    def receive() -> None:
        while not over.is_set():
            exchange.discard(exchange.receive(0.05))

    thread = threading.Thread(target=receive)
    thread.start()
    yield
    over.set()
    thread.join()
