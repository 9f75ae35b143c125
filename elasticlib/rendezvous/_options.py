"""
The keys of ``rdzv_configs`` (``--rdzv-conf``): which back end takes which, and what their values mean. Pure.

Rules of this file: a key is one row of `KEYS`; a value may be text, as from a command line, or typed; whatever
is unknown, or belongs to another back end, is refused with the mend, so that no key is taken and then ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, field, frozen

from elasticlib.errors import ConfigError
from elasticlib.spec import DEFAULT_RENDEZVOUS_TIMEOUT, WAITS

C10D = frozenset({"c10d"})
STATIC = frozenset({"static"})
ETCD = frozenset({"etcd", "etcd-v2", "etcd-v3"})
ELASTIC = C10D | ETCD
ALL = ELASTIC | STATIC

JOIN_TIMEOUT = 600.0
LAST_CALL = 30.0
CLOSE_TIMEOUT = 30.0
HEARTBEAT = 10.0
KEEP_ALIVE_INTERVAL = 5.0
KEEP_ALIVE_ATTEMPTS = 3
RECONNECT_TIMEOUT = 60.0
"""All in seconds, but for the attempts."""

YES = frozenset({"1", "true", "t", "yes", "y"})
NO = frozenset({"0", "false", "f", "no", "n"})


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _seconds(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise ValueError
    return number


def _seconds_or_zero(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError
    return number


def _whole(value: Any) -> int:
    if (number := _number(value)) != int(number):
        raise ValueError
    return int(number)


def _attempts(value: Any) -> int:
    if (number := _whole(value)) < 1:
        raise ValueError
    return number


def _rank(value: Any) -> int:
    if (number := _whole(value)) < 0:
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    word = str(int(value) if isinstance(value, bool) else value).strip().lower()
    if word not in YES | NO:
        raise ValueError
    return word in YES


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return read


@frozen
class Key:
    """One key: who takes it, how it is read, and what a good value is, for people."""

    backends: frozenset[str]
    read: Callable[[Any], Any]
    rule: str
    meaning: str


_SECONDS = "a number of seconds above 0"

KEYS: dict[str, Key] = {
    "join_timeout": Key(
        ALL,
        _seconds_or_zero,
        "a number of seconds, 0 or more",
        "for finding the store and getting a seat, 600 (static, etcd: 900)",
    ),
    "timeout": Key(ALL, _seconds_or_zero, "a number of seconds, 0 or more", "older name of join_timeout"),
    "last_call_timeout": Key(
        ELASTIC, _seconds, _SECONDS, "time without newcomers before a round below its maximum, 30"
    ),
    "wait_for": Key(ELASTIC, _one_of(*WAITS), f"one of {', '.join(WAITS)}", "when a round with enough nodes starts"),
    "heartbeat_timeout": Key(ALL, _seconds, _SECONDS, "silence after which a node is lost, 10"),
    "keep_alive_interval": Key(
        ALL, _seconds, _SECONDS, "times keep_alive_max_attempt is that silence in torch's terms, 5"
    ),
    "keep_alive_max_attempt": Key(ALL, _attempts, "a whole number above 0", "see there, 3"),
    "reconnect_timeout": Key(ALL, _seconds, _SECONDS, "for finding a store again that fell silent, 60"),
    "close_timeout": Key(
        ALL, _seconds, _SECONDS, "that the store's host waits for others to read how the job ended, 30"
    ),
    "read_timeout": Key(ALL, _seconds, _SECONDS, "limit of one attempt to reach the store"),
    "rank": Key(STATIC, _rank, "a whole number, 0 or more", "node_rank by torch's name"),
    "store_type": Key(
        C10D, _one_of("tcp", "file"), "tcp or file", "tcp, or file with a path as endpoint, for one machine"
    ),
    "is_host": Key(
        C10D,
        _truth,
        "1 or 0 (true, false, yes, no)",
        "1 or 0, whether this node hosts the store; whoever has the endpoint's address",
    ),
    "protocol": Key(ETCD, _one_of("http", "https"), "http or https", "of etcd, http or https"),
    "ssl_cert": Key(ETCD, _text, "a file's path", "the client's certificate for etcd"),
    "ssl_cert_key": Key(ETCD, _text, "a file's path", "its key"),
    "ca_cert": Key(ETCD, _text, "a file's path", "who signed the servers' certificates"),
    "cert": Key(ETCD, _text, "a file's path", "ssl_cert by another name"),
    "key": Key(ETCD, _text, "a file's path", "ssl_cert_key by another name"),
    "cacert": Key(ETCD, _text, "a file's path", "ca_cert by another name"),
    "etcd_prefix": Key(ETCD, _text, "text", "first part of all keys in etcd"),
}
_SAME = {"cert": "ssl_cert", "key": "ssl_cert_key", "cacert": "ca_cert"}
_FOR_BACKENDS = frozenset(
    {"read_timeout", "protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix"}
)
"""What is handed on as it is, in `Options.others`."""
_AS_NAMED = ("join_timeout", "wait_for", "reconnect_timeout", "close_timeout", "rank", "store_type", "is_host")


@frozen(kw_only=True)
class Options:
    """What `rdzv_configs` says, in seconds and plain types."""

    join_timeout: float = JOIN_TIMEOUT
    last_call: float = LAST_CALL
    wait_for: str | None = None
    heartbeat: float = HEARTBEAT
    reconnect_timeout: float = RECONNECT_TIMEOUT
    close_timeout: float = CLOSE_TIMEOUT
    rank: int | None = None
    store_type: str = "tcp"
    is_host: bool | None = None
    others: Mapping[str, Any] = field(default=Factory(dict), converter=dict)
    """What only the back end itself understands, with canonical names."""


def read(backend: str, configs: Mapping[str, Any]) -> Options:
    """
    What *configs* means for *backend*, one of `ALL`; a value of None counts as not given.

    Raises `ConfigError` for a key that *backend* does not take and for a value that breaks its key's rule.
    """
    found = {name: _value(backend, name, value) for name, value in configs.items() if value is not None}
    chosen: dict[str, Any] = {name: found[name] for name in _AS_NAMED if name in found}
    if "last_call_timeout" in found:
        chosen["last_call"] = found["last_call_timeout"]
    if "join_timeout" not in found and "timeout" in found:
        # A launch always has a timeout; where torch does not look at it, its default says nothing.
        if backend in ("static", "etcd") or found["timeout"] != DEFAULT_RENDEZVOUS_TIMEOUT:
            chosen["join_timeout"] = found["timeout"]
    return Options(heartbeat=_heartbeat(found), others=_others(found), **chosen)


def _value(backend: str, name: Any, value: Any) -> Any:
    key = KEYS.get(name)
    if key is None or backend not in key.backends:
        raise ConfigError(f"rdzv_configs={{{name!r}: {value!r}}}: {_stranger(backend, name)}")
    try:
        return key.read(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"rdzv_configs={{{name!r}: {value!r}}}: {name} must be {key.rule}") from None


def _stranger(backend: str, name: Any) -> str:
    """Why *backend* does not take the key *name*, and what to do."""
    taken = [each for each, key in KEYS.items() if backend in key.backends]
    if name in KEYS:
        others = ", ".join(sorted(KEYS[name].backends))
        return f"{name} has no meaning for rdzv_backend={backend!r}, only for {others}: leave it out"
    near = difflib.get_close_matches(str(name), taken, 1, 0.5)
    mend = f"did you mean {near[0]}? " if near else ""
    return f"{name} is unknown: {mend}rdzv_backend={backend!r} takes {', '.join(taken)}"


def _heartbeat(found: Mapping[str, Any]) -> float:
    if "keep_alive_interval" in found or "keep_alive_max_attempt" in found:
        interval: float = found.get("keep_alive_interval", KEEP_ALIVE_INTERVAL)
        attempts: int = found.get("keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)
        return interval * attempts
    return float(found.get("heartbeat_timeout", HEARTBEAT))


def _others(found: Mapping[str, Any]) -> dict[str, Any]:
    others: dict[str, Any] = {}
    for name in _FOR_BACKENDS & set(found):
        same = _SAME.get(name, name)
        if others.setdefault(same, found[name]) != found[name]:
            raise ConfigError(
                f"rdzv_configs={{{name!r}: {found[name]!r}}}: {same} says something else: give one of them"
            )
    files = sorted(set(others) & set(_SAME.values()))
    if files and others.get("protocol") != "https":
        raise ConfigError(f"rdzv_configs: {', '.join(files)} without protocol=https would not be used: give that too")
    return others


def parse_conf(text: str) -> dict[str, str]:
    """``a=1,b=2`` as a dictionary of texts; raises `ConfigError` for a part that is no pair."""
    found: dict[str, str] = {}
    for part in text.strip().split(",") if text.strip() else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name:
            raise ConfigError(f"{text!r} must be pairs with commas between them, as in join_timeout=60,is_host=1")
        if not value:
            raise ConfigError(f"{text!r} gives {name} no value: write {name}=VALUE, or leave it out")
        if name in found:
            raise ConfigError(f"{text!r} gives {name} twice: leave one out")
        found[name] = value
    return found
