"""`wait_for_end`: the end of a connection is that of the other process."""

from __future__ import annotations

import socket
import threading

from elasticlib.rendezvous.net._presence import wait_for_end
from tests.waiting import wait_until


def waiting(port: int) -> threading.Thread:
    thread = threading.Thread(target=wait_for_end, args=("127.0.0.1", port), daemon=True)
    thread.start()
    return thread


def test_the_wait_lasts_until_the_process_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = waiting(server.getsockname()[1])
        accepted, _ = server.accept()
        assert thread.is_alive()

        accepted.close()

        wait_until(lambda: not thread.is_alive())


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    wait_for_end("127.0.0.1", port)


def test_the_wait_has_a_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_end("127.0.0.1", server.getsockname()[1], 0.01)
