"""
The rendezvous of nodes that meet in one shared state, for any backend that stores it.

Rules of this file: names, order of arguments and meaning are torch's. Times are ``timedelta`` here,
as in torch, and seconds in all code below. A backend made by other code is an object of this
program, so no separate process can keep the contact. This node is silent while the program stands
still, and dies with it without a message.

(torch: ``torch.distributed.elastic.rendezvous.dynamic_rendezvous``)
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from attrs import Attribute, evolve, field, frozen

from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import ConfigError
from elasticlib.rendezvous._membership import HandlerMembership
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._rdzv_options import (
    CLOSE_TIMEOUT,
    JOIN_TIMEOUT,
    KEEP_ALIVE_ATTEMPTS,
    KEEP_ALIVE_INTERVAL,
    LAST_CALL,
    bounded,
)
from elasticlib.rendezvous.handlers._base import RendezvousInfo, RendezvousParameters, check_nodes
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.handlers._round_store import apart
from elasticlib.rendezvous.net._binding import outward_address
from elasticlib.rendezvous.net._endpoint import is_loopback
from elasticlib.rendezvous.node._runtime import NodeRuntime
from elasticlib.rendezvous.protocol._messages import RankAssignment
from elasticlib.rendezvous.stores._election import KeysBackend
from elasticlib.rendezvous.stores._state_keys import LONGEST, RendezvousBackend, SharedState, StateKeys
from elasticlib.spec import TOKEN_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_log = logging.getLogger("elasticlib")
_HEARTBEAT = 5.0
ROOT = "/job"
"""Prefix of all keys: a state belongs to one job."""
_LOOK, _SHORTEST_LOOK = 1 / 15, 0.25
"""Share of the heartbeat time, and seconds at least, that may lie between two looks of a node that waits."""


def _above_zero(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{attribute.name}={value!r} must be a timedelta above 0, such as timedelta(seconds=30)")


@frozen(eq=False, init=False)
class RendezvousTimeout:
    """Time limits for the parts of a rendezvous."""

    join: timedelta = field(validator=_above_zero)
    """Time limit for finding the others and ranks together; 600 s."""
    last_call: timedelta = field(validator=_above_zero)
    """
    Time without newcomers before a round below its maximum starts; 30 s. torch counts from the
    minimum's arrival.
    """
    close: timedelta = field(validator=_above_zero)
    """Time limit for `set_closed` and `shutdown`; 30 s."""
    heartbeat: timedelta = field(validator=_above_zero)
    """Time limit for the delivery of one heartbeat; 5 s. No node is lost by a shorter silence."""

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        """
        None means the default. Raises `ConfigError` (a ``ValueError``) for a time that is not above
        0.
        """
        given = ((join, JOIN_TIMEOUT), (last_call, LAST_CALL), (close, CLOSE_TIMEOUT), (heartbeat, _HEARTBEAT))
        self.__attrs_init__(*(timedelta(seconds=default) if value is None else value for value, default in given))


@frozen(eq=False)
class RendezvousSettings:
    """Settings of a `DynamicRendezvousHandler`."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    """
    Time between two heartbeats, in torch's terms; elasticlib's nodes send them as often as their
    silence limit needs.
    """
    keep_alive_max_attempt: int
    """Number of intervals of silence after which a node is lost."""
    cas_backoff_max_seconds: float = 0.0
    """
    torch's limit of the time between a failed write and the next; no effect here, as no node
    repeats a write.
    """

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which a node is lost."""
        alive = self.keep_alive_interval * self.keep_alive_max_attempt
        return max(alive, self.timeout.heartbeat).total_seconds()


class DynamicRendezvousHandler(CoordinatedHandler):
    """
    One node of a job whose nodes meet in the state of a `RendezvousBackend`; made by
    `from_backend`.

    The coordinator writes the common decisions into the state; when it dies, another node takes
    over.

    Differs from torch's as described at `CoordinatedHandler`. The state holds JSON in place of a
    pickled object, so nodes of torch and of elasticlib cannot share one. Threads of this program
    keep the contact. The others count this node as lost if the program stands still for the length
    of the silence limit.
    """

    def __init__(
        self, settings: RendezvousSettings, store: Store, backend: RendezvousBackend, local_addr: str | None = None
    ) -> None:
        """Use `from_backend` instead; raises as that does. Nothing is contacted yet."""
        _check(settings, backend)
        self._settings = settings
        self._store = store
        self._holder = backend
        times = settings.timeout
        job = NodeJob(
            run_id=settings.run_id,
            node=node_name(local_addr),
            backend=backend.name,
            endpoint=type(backend).__name__,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            token=os.environ.get(TOKEN_VARIABLE) or None,
            local_addr=local_addr,
            join_timeout=min(times.join.total_seconds(), LONGEST_TIME),
            last_call=min(times.last_call.total_seconds(), LONGEST_TIME),
            heartbeat=bounded(settings.silence),
            close_timeout=min(times.close.total_seconds(), LONGEST_TIME),
        )
        super().__init__(job, self._connect_here)

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Store,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = int(KEEP_ALIVE_INTERVAL),
        keep_alive_max_attempt: int = KEEP_ALIVE_ATTEMPTS,
        cas_backoff_max_seconds: float = 0.0,
    ) -> DynamicRendezvousHandler:
        """
        Return the handler of a node of job *run_id* whose state is in *backend*.

        `next_rendezvous` returns *store*, with keys of the round alone. Peers reach this machine at
        *local_addr*. *keep_alive_interval* is in seconds; *cas_backoff_max_seconds* has no effect.

        Raises `ConfigError` (a ``ValueError``) for these values:

        * an empty *run_id*
        * ``min_nodes < 1`` or ``max_nodes < min_nodes``
        * a time that is not above 0
        * a value of the wrong type
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            RendezvousTimeout() if timeout is None else timeout,
            _seconds("keep_alive_interval", keep_alive_interval),
            keep_alive_max_attempt,
            cas_backoff_max_seconds,
        )
        return cls(settings, store, backend, local_addr)

    @property
    def settings(self) -> RendezvousSettings:
        """Settings of this handler."""
        return self._settings

    def _connect_here(self, job: NodeJob, *, stall: float | None = None) -> HandlerMembership:
        # *stall* has no meaning here: all threads of a program stand still together.
        del stall
        runtime = NodeRuntime(job, backend=StateBackend(self._holder, job.heartbeat, _address_beside(self._store)))
        runtime.start()
        return cast(HandlerMembership, _Place(runtime, job.close_timeout))

    def _info(self, assignment: RankAssignment) -> RendezvousInfo:
        info = super()._info(assignment)
        return evolve(info, store=apart(self._store, self.job.run_id, assignment.round))


def create_handler(store: Store, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """
    Return the handler of *params*, whose shared state is in *backend* and whose rounds return
    *store*.

    It reads these options: ``join_timeout``, ``last_call_timeout``, ``close_timeout``,
    ``heartbeat_timeout`` and ``keep_alive_interval`` (all whole seconds),
    ``keep_alive_max_attempt`` and ``cas_backoff_max_seconds``. Raises as
    `DynamicRendezvousHandler.from_backend`.
    """
    limits = RendezvousTimeout(*(_limit(params, name) for name in ("join", "last_call", "close", "heartbeat")))
    interval = params.get_as_int("keep_alive_interval")
    attempts = params.get_as_int("keep_alive_max_attempt")
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        limits,
        int(KEEP_ALIVE_INTERVAL) if interval is None else interval,
        KEEP_ALIVE_ATTEMPTS if attempts is None else attempts,
        _backoff(params.get("cas_backoff_max_seconds", 0.0)),
    )


def _limit(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(f"{name}_timeout")
    if seconds is None:
        return None
    if seconds <= 0:
        raise ConfigError(f"{name}_timeout={seconds} must be a number of seconds above 0")
    return timedelta(seconds=seconds)


def _check(settings: RendezvousSettings, backend: RendezvousBackend) -> None:
    """Raise `ConfigError` for an invalid setting or backend."""
    if not isinstance(settings.run_id, str) or not settings.run_id:
        raise ConfigError.of_setting(
            "run_id", f"{settings.run_id!r}: nodes find each other by this id: give the same non-empty id on all nodes"
        )

    check_nodes(settings.min_nodes, settings.max_nodes)
    if not isinstance(settings.timeout, RendezvousTimeout):
        raise ConfigError(f"timeout={settings.timeout!r} must be a RendezvousTimeout, or None for its defaults")

    _check_keep_alive(settings.keep_alive_interval, settings.keep_alive_max_attempt)
    if _backoff(settings.cas_backoff_max_seconds):
        _log.warning("cas_backoff_max_seconds=%s has no effect: no write is retried", settings.cas_backoff_max_seconds)
    _check_backend(backend)


def _check_keep_alive(interval: object, attempts: Any) -> None:
    if not isinstance(interval, timedelta):
        raise ConfigError(f"keep_alive_interval={interval!r} must be above 0 seconds, as a timedelta")
    if interval <= timedelta(0):
        raise ConfigError(f"keep_alive_interval={interval} must be above 0 seconds, as a timedelta")
    is_whole = isinstance(attempts, int) and not isinstance(attempts, bool)
    if not is_whole or attempts < 1:
        raise ConfigError(f"keep_alive_max_attempt={attempts!r} must be a whole number of at least 1")


def _check_backend(backend: RendezvousBackend) -> None:
    missing = [name for name in ("name", "get_state", "set_state") if not hasattr(backend, name)]
    if missing:
        raise ConfigError(f"backend={backend!r} is not a RendezvousBackend: it lacks {', '.join(missing)}")
    if backend.name == "static":
        raise ConfigError("backend.name='static' is reserved: give the backend another name")


def _backoff(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"cas_backoff_max_seconds={value!r} must be a finite number of seconds, 0 or more")
    return seconds


def _seconds(name: str, value: object) -> timedelta:
    """Return *value* seconds as a ``timedelta``; raises `ConfigError` if it is not a valid time."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # not a number, or infinite
            return timedelta(seconds=value)
    raise ConfigError(f"{name}={value!r} must be a number of seconds above 0")


def _address_beside(store: Any) -> str | None:
    """
    Return the address of this machine for the peers that use *store*, too; None for loopback.

    It is loopback where the store is on loopback.
    """
    # A PrefixStore has no host: the innermost store has the address.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return None if isinstance(host, str) and is_loopback(host) else outward_address()


class StateBackend(KeysBackend):
    """
    Makes connections for one job in the state that *backend* holds; peers reach this machine at
    *address*.
    """

    def __init__(self, backend: RendezvousBackend, heartbeat: float, address: str | None = None) -> None:
        super().__init__(backend.name, ROOT, heartbeat)
        # A change that is seen late must not look like silence.
        longest = min(LONGEST, max(heartbeat * _LOOK, _SHORTEST_LOOK)) if heartbeat else LONGEST
        self._state = SharedState(backend, longest=longest)
        self._address = address

    def connect(self, timeout: float) -> StateKeys:
        """
        Do the same as `dial`, for callers that need more than an exchange; *timeout* limits the
        backend's own calls only.
        """
        # A call of other people's code cannot be ended: the thread that makes it is abandoned
        # instead.
        del timeout
        self._state.read()
        return StateKeys(self._state)


class _Place:
    """The client of a runtime, closed together with it."""

    def __init__(self, runtime: NodeRuntime, linger: float) -> None:
        self._runtime = runtime
        self._linger = linger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime.member, name)

    def close(self) -> None:
        self._runtime.close(self._linger)
