"""Attempts to connect: their results and errors, and that none of them blocks."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.net._dial import LEFT_BEHIND, Limited, RefusedError, probe
from elasticlib.rendezvous.net._resolver import Address, resolve

V4 = Address(socket.AF_INET, "127.0.0.1")
V6 = Address(socket.AF_INET6, "::1")
LONG = 30.0


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = probe("localhost", server.getsockname()[1], [V6, V4], LONG)

    assert (V4, "127.0.0.1") == answer


def test_refusal_has_its_own_error_with_endpoint_and_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(
        RefusedError, match=rf"^localhost:{port} cannot be reached \(127.0.0.1: refused, no process listens"
    ):
        probe("localhost", port, [V4], LONG)


def test_silence_is_distinguished_from_refusal_and_times_out() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        full = [socket.socket() for _ in range(3)]  # more than the backlog holds: the kernel drops the next
        for each in full:
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        began = time.monotonic()

        with pytest.raises(RendezvousConnectionError, match=r"no answer within 0.1 s, .* firewall") as caught:
            probe("node1", server.getsockname()[1], [V4], 0.1)

        assert not isinstance(caught.value, RefusedError)
        assert time.monotonic() - began < 5
        for each in full:
            each.close()


def test_a_name_that_leads_to_loopback_is_pointed_out() -> None:
    with pytest.raises(RefusedError, match="node1 resolves to this machine here"):
        probe("node1", 1, [V4], LONG)


def test_addresses_need_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")

    assert [V4] == resolve("127.0.0.1", 1, LONG)
    assert [V6] == resolve("::1", 1, LONG)
    assert [V4, V6] == resolve("localhost", 1, LONG)


def test_a_call_that_ends_gives_its_result_or_its_error() -> None:
    limited = Limited[int]()

    assert 7 == limited.run(lambda: 7, LONG, "silent")
    with pytest.raises(ZeroDivisionError):
        limited.run(lambda: 1 // 0, LONG, "silent")


def test_a_call_that_hangs_is_left_behind_and_used_when_it_ends() -> None:
    limited = Limited[int]()
    release = threading.Event()
    with pytest.raises(RendezvousConnectionError, match=r"^silent$"):
        limited.run(lambda: 7 if release.wait(LONG) else 0, 0.01, "silent")
    release.set()

    def late_result() -> int | None:
        try:
            return limited.run(lambda: threading.Event().wait(1.0) or 8, 0.01, "silent")
        except RendezvousConnectionError:
            return None

    assert 7 == next(result for _ in range(20) if (result := late_result()))


def test_calls_that_hang_do_not_pile_up() -> None:
    limited = Limited[int]()
    release = threading.Event()
    started: list[int] = []

    def hang() -> int:
        started.append(1)
        release.wait(LONG)
        return 7

    for _ in range(3 * LEFT_BEHIND):
        with pytest.raises(RendezvousConnectionError, match=r"^silent$"):
            limited.run(hang, 0.001, "silent")
    release.set()

    assert 7 == limited.run(hang, LONG, "silent")
    assert LEFT_BEHIND == len(started)
