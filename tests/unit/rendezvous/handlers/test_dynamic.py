"""Settings and refusals of a handler over a shared state; nothing is contacted."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from elasticlib.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)
from elasticlib.errors import ConfigError
from elasticlib.rendezvous import RendezvousParameters
from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend
from elasticlib.rendezvous.handlers._etcd import EtcdRendezvousBackend
from elasticlib.rendezvous.node import _client, _coordinator_role


class Untouched(RendezvousBackend):
    def __init__(self, name: str = "mine") -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> Any:
        raise AssertionError("contacted")

    def set_state(self, state: bytes, token: Any = None) -> Any:
        raise AssertionError("contacted")


STORE: Any = object()


def made(run_id: str = "job", least: int = 1, most: int = 2, **more: Any) -> DynamicRendezvousHandler:
    return DynamicRendezvousHandler.from_backend(run_id, STORE, Untouched(), least, most, **more)


def test_times_have_torchs_defaults() -> None:
    limits = RendezvousTimeout()

    assert [600.0, 30.0, 30.0, 5.0] == [
        each.total_seconds() for each in (limits.join, limits.last_call, limits.close, limits.heartbeat)
    ]


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), 5])
def test_a_time_is_above_0(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* must be a timedelta above 0"):
        RendezvousTimeout(**{name: value})


def test_the_settings_are_what_was_given() -> None:
    limits = RendezvousTimeout(join=timedelta(seconds=7))

    handler = made(timeout=limits, keep_alive_interval=2, keep_alive_max_attempt=4)

    settings = handler.settings
    assert ("job", 1, 2, limits) == (settings.run_id, settings.min_nodes, settings.max_nodes, settings.timeout)
    assert (timedelta(seconds=2), 4) == (settings.keep_alive_interval, settings.keep_alive_max_attempt)
    assert ("mine", "job") == (handler.get_backend(), handler.get_run_id())
    assert (7.0, 8.0) == (handler.job.join_timeout, handler.job.heartbeat)


def test_heartbeat_limit_that_is_too_short_is_made_longer() -> None:
    """torch takes it."""
    limits = RendezvousTimeout(heartbeat=timedelta(milliseconds=20))

    handler = made(timeout=limits, keep_alive_interval=0.02, keep_alive_max_attempt=1)

    assert 0.1 == handler.job.rules.heartbeat


def test_no_node_is_lost_while_one_heartbeat_may_take() -> None:
    limits = RendezvousTimeout(heartbeat=timedelta(seconds=60))

    assert 60.0 == made(timeout=limits).job.heartbeat


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"run_id": ""}, "run_id=''"),
        ({"least": 0}, "min_nodes=0 must be at least 1"),
        ({"least": 3}, "max_nodes=2 is below min_nodes=3"),
        ({"keep_alive_interval": 0}, "keep_alive_interval=0:00:00 must be above 0"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt=0 must be a whole number of at least 1"),
        ({"run_id": 5}, "run_id=5"),
        ({"least": "1"}, "min_nodes='1' must be a whole number"),
        ({"most": 2.5}, "max_nodes=2.5 must be a whole number"),
        ({"timeout": 5}, "timeout=5 must be a RendezvousTimeout"),
        ({"timeout": 0}, "timeout=0 must be a RendezvousTimeout"),
        ({"keep_alive_interval": "5"}, "keep_alive_interval='5' must be a number of seconds"),
        ({"keep_alive_interval": float("nan")}, "keep_alive_interval=nan must be a number of seconds"),
        ({"keep_alive_interval": float("inf")}, "keep_alive_interval=inf must be a number of seconds"),
        ({"keep_alive_max_attempt": "3"}, "keep_alive_max_attempt='3' must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        made(**arguments)


@pytest.mark.parametrize("backend", [None, "c10d", object()])
def test_invalid_backend_is_refused(backend: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"backend=.* is not a RendezvousBackend: it lacks name, get_state, set_state"
    ):
        DynamicRendezvousHandler.from_backend("job", STORE, backend, 1, 2)


def test_settings_are_checked_however_they_were_made() -> None:
    interval: Any = 5
    settings = RendezvousSettings("job", 1, 2, RendezvousTimeout(), interval, 3)

    with pytest.raises(ConfigError, match="keep_alive_interval=5 must be above 0 seconds, as a timedelta"):
        DynamicRendezvousHandler(settings, STORE, Untouched())


@pytest.mark.parametrize(
    ("store", "run_id", "why"),
    [
        (None, "job", "store=None has no method compare_set"),
        (Mock(), "", "run_id=''"),
        (Mock(), None, "run_id=None"),
    ],
)
def test_a_state_is_in_a_store_and_belongs_to_a_job(store: Any, run_id: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        C10dRendezvousBackend(store, run_id)


@pytest.mark.parametrize(
    ("run_id", "ttl", "why"),
    [("", None, "run_id=''"), (5, None, "run_id=5"), ("job", "60", "ttl='60'"), ("job", 0, "ttl=0")],
)
def test_a_state_in_etcd_has_a_job_and_a_time_to_live(run_id: Any, ttl: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EtcdRendezvousBackend(Mock(), run_id, ttl=ttl)


def test_a_back_end_is_not_called_like_nodes_with_given_ranks() -> None:
    with pytest.raises(ConfigError, match=r"backend\.name='static' is reserved"):
        DynamicRendezvousHandler.from_backend("job", STORE, Untouched("static"), 1, 2)


def test_a_handler_is_made_from_the_options_of_its_parameters() -> None:
    options = {"join_timeout": "9", "last_call_timeout": 8, "close_timeout": 7, "heartbeat_timeout": 6}
    params = RendezvousParameters("mine", "", "job", 1, 2, "host7", **options, keep_alive_interval="1")

    job = create_handler(STORE, Untouched(), params).job

    assert (9.0, 8.0, 7.0, 6.0) == (job.join_timeout, job.last_call, job.close_timeout, job.heartbeat)
    assert "host7" == job.local_addr


@pytest.mark.parametrize("name", ["join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"])
@pytest.mark.parametrize("value", [0, "-1", "soon"])
def test_an_option_is_whole_seconds_above_0(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    params = RendezvousParameters("mine", "", "job", 1, 2, **options)

    with pytest.raises(ValueError, match=name):
        create_handler(STORE, Untouched(), params)


def test_a_shutdown_returns_though_the_back_end_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    awake = threading.Event()

    class Hung(Untouched):
        def get_state(self) -> Any:
            awake.wait()

    monkeypatch.setattr(_client, "_PARTING", 0.02)
    monkeypatch.setattr(_coordinator_role, "_RESIGNING", 0.02)
    limits = RendezvousTimeout(close=timedelta(seconds=0.05))
    handler = DynamicRendezvousHandler.from_backend("job", STORE, Hung(), 1, 1, timeout=limits)
    results: list[bool] = []
    caller = threading.Thread(target=lambda: results.append(handler.shutdown()), daemon=True)

    with caplog.at_level(logging.WARNING, "elasticlib"):
        caller.start()
        caller.join(15.0)
    awake.set()

    assert [False] == results
    assert "closing the rendezvous failed" in caplog.text


def test_torchs_time_between_repeated_writes_is_kept_and_named(caplog: pytest.LogCaptureFixture) -> None:
    assert 0.0 == made().settings.cas_backoff_max_seconds
    assert "" == caplog.text

    assert 1.5 == made(cas_backoff_max_seconds=1.5).settings.cas_backoff_max_seconds
    assert "cas_backoff_max_seconds=1.5 has no effect" in caplog.text


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "soon", None])
def test_a_time_between_repeated_writes_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"cas_backoff_max_seconds=.* must be a finite number"):
        made(cas_backoff_max_seconds=value)
    params = RendezvousParameters("mine", "", "job", 1, 2, cas_backoff_max_seconds=value)
    with pytest.raises(ValueError, match=r"cas_backoff_max_seconds=.* must be a finite number"):
        create_handler(STORE, Untouched(), params)
