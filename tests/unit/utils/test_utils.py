"""The helpers that need no torch: variables, ports, macros, loggers, iterators."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.utils import get_env_variable_or_raise, get_socket_with_port, macros
from elasticlib.utils.data import CyclingIterator
from elasticlib.utils.distributed import create_c10d_store, get_free_port
from elasticlib.utils.log_level import get_log_level, get_logger


def test_a_variable_that_is_set_is_read_also_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "")

    assert "" == get_env_variable_or_raise("SOME_NAME")


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_NAME", raising=False)

    with pytest.raises(ValueError, match="SOME_NAME is not set: export it"):
        get_env_variable_or_raise("SOME_NAME")


def test_a_socket_holds_its_port_on_all_addresses_without_listening() -> None:
    with get_socket_with_port() as holder:
        port = holder.getsockname()[1]

        for address in ("127.0.0.1", "127.0.0.2"):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, port))
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))


def test_without_ipv6_the_port_is_that_of_all_ipv4_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", without(socket.AF_INET6))

    with get_socket_with_port() as holder:
        assert "0.0.0.0" == holder.getsockname()[0]


def test_error_states_the_reasons_if_no_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", without(socket.AF_INET6, socket.AF_INET))

    with pytest.raises(RuntimeError, match=r"no free port could be bound: ::: .*; 0\.0\.0\.0: "):
        get_socket_with_port()


def without(*families: socket.AddressFamily) -> Callable[..., socket.socket]:
    """Makes sockets as this machine would that had none of *families*."""
    plain = socket.socket

    def made(family: socket.AddressFamily = socket.AF_INET, *rest: Any) -> socket.socket:
        if family in families:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return plain(family, *rest)

    return made


def test_a_free_port_can_be_bound_anywhere() -> None:
    port = get_free_port()

    with socket.create_server(("", port)) as listener:
        assert port == listener.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--rank=${local_rank}", "--rank=3"),
        ("$local_rank/$local_rank.txt", "3/3.txt"),
        ("$local_rank2 ${other} $other", "$local_rank2 ${other} $other"),
        ("pa$$word", "pa$$word"),
        ("$", "$"),
        (7, 7),
        (None, None),
    ],
)
def test_the_local_rank_is_filled_in_and_all_else_stays(argument: object, expected: object) -> None:
    assert [expected] == macros.substitute([argument], "3")


def test_a_rank_is_text_and_no_pattern() -> None:
    assert [r"\1"] == macros.substitute([macros.local_rank], r"\1")


def test_a_logger_is_called_like_its_caller_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)

    assert (__name__, logging.WARNING, "WARNING") == (get_logger().name, get_logger().level, get_log_level())


@pytest.mark.parametrize(
    ("text", "level"), [("DEBUG", logging.DEBUG), ("error", logging.ERROR), ("35", 35), ("", logging.WARNING)]
)
def test_the_variable_loglevel_is_the_level(monkeypatch: pytest.MonkeyPatch, text: str, level: int) -> None:
    monkeypatch.setenv("LOGLEVEL", text)

    assert level == get_logger("some.name").level


@pytest.mark.parametrize("text", ["LOUD", "1.5", "²"])
def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOGLEVEL", text)

    with pytest.raises(ConfigError, match=rf"LOGLEVEL='{text}' is not a log level: give one of"):
        get_logger("some.name")


def test_epochs_follow_one_another_up_to_the_last() -> None:
    made: list[int] = []

    def epoch(number: int) -> list[str]:
        made.append(number)
        return [f"{number}a", f"{number}b"]

    found = list(CyclingIterator(4, lambda number: iter(epoch(number)), start_epoch=1))

    assert ["1a", "1b", "2a", "2b", "3a", "3b"] == found
    assert [1, 2, 3] == made


def test_empty_epochs_however_many_are_passed_over() -> None:
    iterator = CyclingIterator(100_000, lambda number: iter([number] if number == 99_999 else []))

    assert 99_999 == next(iterator)
    assert [] == list(itertools.islice(iterator, 1)) == list(iterator)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"is_server": True, "world_size": 2}, "world_size=2 callers must know the port"),
        ({"is_server": False}, r"a client \(is_server=False\) must know the port"),
    ],
)
def test_a_store_that_nobody_could_find_is_refused(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        create_c10d_store(server_addr="localhost", **arguments)  # type: ignore[arg-type]
