"""The end of a connection is that of the process at its other end."""

from __future__ import annotations

import socket
import threading

from elasticlib.rendezvous.net._presence import connected, wait_for_end
from tests.waiting import wait_until


def test_the_wait_lasts_until_the_process_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = connected("127.0.0.1", server.getsockname()[1])
        accepted, _ = server.accept()
        assert connection is not None
        thread = threading.Thread(target=wait_for_end, args=(connection,), daemon=True)
        thread.start()

        with connection:
            accepted.close()
            wait_until(lambda: not thread.is_alive())


def test_a_process_that_has_ended_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert connected("127.0.0.1", port) is None


def test_the_wait_has_a_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = connected("127.0.0.1", server.getsockname()[1])
        assert connection is not None

        with connection:
            wait_for_end(connection, 0.01)
