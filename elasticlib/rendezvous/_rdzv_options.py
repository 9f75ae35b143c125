"""
The keys of ``rdzv_configs`` (``--rdzv-conf``): their backends, and the meaning of their values.
Pure.

Rules of this file: a key is one row of `RDZV_CONF_KEYS`. A value may be text, as from a command
line, or typed. A key that torch ignores, too (unknown, or of another backend), is not an error,
because people's job scripts contain such keys. `Options.idle` names it with the fix, so that no key
is ignored in silence.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Set
from typing import Any

from attrs import Factory, field, fields_dict, frozen

from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import ConfigError
from elasticlib.rendezvous.protocol._timing import SHORTEST_HEARTBEAT
from elasticlib.spec import DEFAULT_RENDEZVOUS_TIMEOUT, WAITS

C10D = frozenset({"c10d"})
STATIC = frozenset({"static"})
ETCD_BACKENDS = frozenset({"etcd", "etcd-v2", "etcd-v3"})
ELASTIC = C10D | ETCD_BACKENDS
ALL = ELASTIC | STATIC

JOIN_TIMEOUT = 600.0
LAST_CALL = 30.0
CLOSE_TIMEOUT = 30.0
HEARTBEAT = 10.0
KEEP_ALIVE_INTERVAL = 5.0
KEEP_ALIVE_ATTEMPTS = 3
RECONNECT_TIMEOUT = 60.0
STORE_LINGER = 3600.0
"""All in seconds, except the attempts."""
ETCD_PREFIX = "/torchelastic/p2p"

YES = frozenset({"1", "true", "t", "yes", "y"})
NO = frozenset({"0", "false", "f", "no", "n"})


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _seconds(is_good: Callable[[float], bool]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = _number(value)
        if not is_good(number):
            raise ValueError
        # Some waits cannot count longer times; this one is as good as no limit.
        return min(number, LONGEST_TIME)

    return read


def _whole(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = _number(value)
        is_whole = number == int(number)
        if not is_whole or number < least:
            raise ValueError
        return int(number)

    return read


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in YES | NO:
        raise ValueError
    return text in YES


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        text = value.strip().lower() if isinstance(value, str) else value
        if text not in choices:
            raise ValueError
        return str(text)

    return read


def _spelled(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


@frozen
class RdzvConfKey:
    """One key: its backends, its reader, and a description of valid values for people."""

    backends: frozenset[str]
    read: Callable[[Any], Any]
    rule: str
    meaning: str
    default: str = field(default="", converter=_spelled)
    """The default, for people; empty for none."""


_SECONDS = (_seconds(lambda number: number > 0), "a number of seconds above 0")
_SILENCE = (
    _seconds(lambda number: number >= SHORTEST_HEARTBEAT),
    f"a number of seconds, {SHORTEST_HEARTBEAT:g} or more",
)
_SECONDS_OR_ZERO = (_seconds(lambda number: number >= 0), "a number of seconds, 0 or more")
_FILE = (_text, "a file's path")
_OF_ROUNDS = {
    "join_timeout",
    *("last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    *("cas_backoff_max_seconds", "read_timeout"),
}
_READ_BY_TORCH = {
    "static": {"rank", "timeout"},
    "c10d": {"store_type", "is_host", *_OF_ROUNDS},
    "etcd-v2": {"protocol", "ssl_cert", "ssl_cert_key", "ca_cert", *_OF_ROUNDS},
    "etcd": {"timeout", "last_call_timeout", "protocol", "cert", "key", "cacert", "etcd_prefix"},
}
"""The keys that torch reads, by backend."""
_NOT_OF_FILES = {"is_host", "read_timeout"}
"""The keys of c10d that torch ignores with ``store_type=file``."""
_OF_TORCH = set[str]().union(*_READ_BY_TORCH.values())

RDZV_CONF_KEYS: dict[str, RdzvConfKey] = {
    "join_timeout": RdzvConfKey(
        ALL,
        *_SECONDS_OR_ZERO,
        "to find the store and get ranks",
        f"{JOIN_TIMEOUT:g}; static, etcd: {DEFAULT_RENDEZVOUS_TIMEOUT}",
    ),
    "timeout": RdzvConfKey(ALL, *_SECONDS_OR_ZERO, "older name of join_timeout"),
    "last_call_timeout": RdzvConfKey(
        ELASTIC, *_SECONDS, "time without a new node before a round below the maximum starts", LAST_CALL
    ),
    "wait_for": RdzvConfKey(
        ELASTIC, _one_of(*WAITS), f"one of {', '.join(WAITS)}", "when a round with enough nodes starts", WAITS[0]
    ),
    "heartbeat_timeout": RdzvConfKey(
        ALL, *_SILENCE, "time without a heartbeat after which a node counts as lost", HEARTBEAT
    ),
    "keep_alive_interval": RdzvConfKey(
        ALL,
        *_SECONDS,
        "torch's option: if it or keep_alive_max_attempt is given, their product replaces heartbeat_timeout",
        KEEP_ALIVE_INTERVAL,
    ),
    "keep_alive_max_attempt": RdzvConfKey(
        ALL, _whole(1), "a whole number above 0", "see keep_alive_interval", KEEP_ALIVE_ATTEMPTS
    ),
    "reconnect_timeout": RdzvConfKey(ALL, *_SECONDS, "to find a store again that stopped answering", RECONNECT_TIMEOUT),
    "close_timeout": RdzvConfKey(
        ALL, *_SECONDS, "how long the coordinating node stays up so that others can read the outcome", CLOSE_TIMEOUT
    ),
    "read_timeout": RdzvConfKey(
        ALL,
        *_SECONDS,
        "limit of one attempt to reach the store",
        "5; after a loss of contact: a quarter of heartbeat_timeout, at least 1 and at most 5",
    ),
    "cas_backoff_max_seconds": RdzvConfKey(
        ELASTIC, *_SECONDS_OR_ZERO, "accepted as in torch, without effect: no write is retried", "0"
    ),
    "rank": RdzvConfKey(STATIC, _whole(0), "a whole number, 0 or more", "torch's name of node_rank"),
    "store_linger": RdzvConfKey(
        C10D | STATIC,
        *_SECONDS_OR_ZERO,
        "how long the store's host stays up for other jobs on its endpoint after its own job has ended",
        STORE_LINGER,
    ),
    "store_type": RdzvConfKey(
        C10D,
        _one_of("tcp", "file"),
        "tcp or file",
        "with file, the endpoint is a path, and all nodes are on one machine",
        "tcp",
    ),
    "is_host": RdzvConfKey(
        C10D,
        _truth,
        "1 or 0 (true, false, yes, no)",
        "1 or 0, whether this node hosts the store",
        "the node with the endpoint's address",
    ),
    "protocol": RdzvConfKey(ETCD_BACKENDS, _one_of("http", "https"), "http or https", "of etcd, http or https", "http"),
    "ssl_cert": RdzvConfKey(ETCD_BACKENDS, *_FILE, "the client's certificate for etcd"),
    "ssl_cert_key": RdzvConfKey(ETCD_BACKENDS, *_FILE, "its key"),
    "ca_cert": RdzvConfKey(
        ETCD_BACKENDS, *_FILE, "certificate authorities of the servers", "those that this machine's OpenSSL trusts"
    ),
    "cert": RdzvConfKey(ETCD_BACKENDS, *_FILE, "another name of ssl_cert"),
    "key": RdzvConfKey(ETCD_BACKENDS, *_FILE, "another name of ssl_cert_key"),
    "cacert": RdzvConfKey(ETCD_BACKENDS, *_FILE, "another name of ca_cert"),
    "etcd_prefix": RdzvConfKey(ETCD_BACKENDS, _text, "text", "prefix of all keys in etcd", ETCD_PREFIX),
}
_SAME = {"cert": "ssl_cert", "key": "ssl_cert_key", "cacert": "ca_cert"}
_FOR_BACKENDS = {"read_timeout"} | {name for name, key in RDZV_CONF_KEYS.items() if key.backends == ETCD_BACKENDS}
"""The keys that are passed on unchanged, in `Options.others`."""


@frozen(kw_only=True)
class JobOptions:
    """Settings of a job, in seconds and plain types."""

    join_timeout: float = JOIN_TIMEOUT
    """Time limit for finding, connecting, and the first ranks together."""
    last_call: float = LAST_CALL
    heartbeat: float = HEARTBEAT
    """Silence after which a node is lost."""
    reconnect_timeout: float = RECONNECT_TIMEOUT
    """Time for which a node that lost its store tries to find it again."""
    close_timeout: float = CLOSE_TIMEOUT
    """
    Time for which the node that hosts the store waits for the others to read how the job ended.
    """
    store_linger: float = STORE_LINGER
    """
    Time for which the node that hosts the store stays for other jobs on it, once this one has
    ended.
    """
    store_type: str = "tcp"
    is_host: bool | None = None
    """True if this node hosts the store; None: the node that can bind the endpoint hosts it."""


@frozen(kw_only=True)
class Options(JobOptions):
    """The parsed `rdzv_configs`."""

    wait_for: str | None = None
    rank: int | None = None
    others: Mapping[str, Any] = field(default=Factory(dict), converter=dict)
    """Options that only the backend itself understands, by canonical name."""
    idle: tuple[str, ...] = ()
    """Keys that were given and have no effect, each with the reason, for people."""


def read(backend: str, configs: Mapping[str, Any]) -> Options:
    """
    Return the meaning of *configs* for *backend*, one of `ALL`; a value of None counts as not
    given.

    Raises `ConfigError` for a value that breaks its key's rule, if torch reads that key, too.
    """
    idle: list[str] = []
    found = _read_values(backend, configs, idle)

    # Read all the same, so that an invalid value is reported.
    backoff = found.pop("cas_backoff_max_seconds", 0)
    if backoff:
        idle.append(f"rdzv_configs={{'cas_backoff_max_seconds': {backoff:g}}} has no effect: no write is retried")
    chosen: dict[str, Any] = {name: value for name, value in found.items() if name in fields_dict(Options)}
    if "last_call_timeout" in found:
        chosen["last_call"] = found["last_call_timeout"]
    if _counts_as_join_timeout(backend, found):
        chosen["join_timeout"] = found["timeout"]
    # A file has no host: any node may open it.
    is_in_file = chosen.get("store_type") == "file"
    if is_in_file and "is_host" in chosen:
        idle.append(
            f"rdzv_configs={{'is_host': {chosen.pop('is_host')}}} has no effect with store_type=file: leave it out"
        )

    others = _others(backend, found, idle)
    return Options(heartbeat=_heartbeat(found, idle), others=others, idle=tuple(idle), **chosen)


def _read_values(backend: str, configs: Mapping[str, Any], idle: list[str]) -> dict[str, Any]:
    """Return the values that have an effect, by name; add the others to *idle*."""
    found = {}
    read_by_torch = _read_by_torch(backend, configs)
    for name, value in configs.items():
        # Counts as not given: programs pass options whose default is None.
        if value is None:
            continue
        try:
            found[name] = _value(backend, name, value, is_read_by_torch=name in read_by_torch)
        except _Idle as why:
            idle.append(f"rdzv_configs={{{name!r}: {value!r}}}: {why}")

    return found


def _counts_as_join_timeout(backend: str, found: Mapping[str, Any]) -> bool:
    if "timeout" not in found or "join_timeout" in found:
        return False
    # A launch always has a timeout; where torch ignores it, its default says nothing.
    return backend in ("static", "etcd") or found["timeout"] != DEFAULT_RENDEZVOUS_TIMEOUT


class _Idle(Exception):  # noqa: N818 - not an error
    """The reason for which a key has no effect."""


def _read_by_torch(backend: str, configs: Mapping[str, Any]) -> set[str]:
    """Return the keys that torch reads, and those that only elasticlib has."""
    read = _READ_BY_TORCH.get(backend, _OF_TORCH) | (RDZV_CONF_KEYS.keys() - _OF_TORCH)
    store_type = str(configs.get("store_type", "")).strip().lower()
    if backend == "c10d" and store_type == "file":
        return read - _NOT_OF_FILES
    return read


def _value(backend: str, name: Any, value: Any, *, is_read_by_torch: bool) -> Any:
    key = RDZV_CONF_KEYS.get(name)
    if key is None or backend not in key.backends:
        raise _Idle(_stranger(backend, name))

    try:
        return key.read(value)
    except (TypeError, ValueError, OverflowError):
        rule = f"{name} must be {key.rule}"

    if not is_read_by_torch:
        raise _Idle(f"{rule}: ignored")

    raise ConfigError.of_setting("rdzv_configs", f"{{{name!r}: {value!r}}}: {rule}")


def _stranger(backend: str, name: Any) -> str:
    """Return why *backend* does not accept the key *name*, and what to do."""
    if name in RDZV_CONF_KEYS:
        others = ", ".join(sorted(RDZV_CONF_KEYS[name].backends))
        return f"{name} has no effect with rdzv_backend={backend!r}, only with {others}: leave it out"
    taken = [each for each, key in RDZV_CONF_KEYS.items() if backend in key.backends]
    # Most unknown keys are misspelt ones.
    near = difflib.get_close_matches(str(name), taken, 1, 0.5)
    fix = f"did you mean {near[0]}? " if near else ""
    return f"{name} is unknown and has no effect: {fix}rdzv_backend={backend!r} accepts {', '.join(taken)}"


def bounded(silence: float) -> float:
    """
    Return the heartbeat time that is nearest to a *silence* in torch's terms, which may be of any
    length.
    """
    return min(max(silence, SHORTEST_HEARTBEAT), LONGEST_TIME)


def _heartbeat(found: Mapping[str, Any], idle: list[str]) -> float:
    is_in_torchs_terms = "keep_alive_interval" in found or "keep_alive_max_attempt" in found
    if not is_in_torchs_terms:
        return float(found.get("heartbeat_timeout", HEARTBEAT))

    interval: float = found.get("keep_alive_interval", KEEP_ALIVE_INTERVAL)
    attempts: int = found.get("keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)
    silence = interval * attempts
    if silence < SHORTEST_HEARTBEAT:
        idle.append(
            f"rdzv_configs: keep_alive_interval={interval:g} times keep_alive_max_attempt={attempts} is too "
            f"short: {SHORTEST_HEARTBEAT:g} s is used"
        )

    return bounded(silence)


def _others(backend: str, found: Mapping[str, Any], idle: list[str]) -> dict[str, Any]:
    """
    Return the options that only the backend understands, by canonical name; add ineffective ones
    to *idle*.
    """
    others: dict[str, Any] = {}
    for name in _in_order_of_precedence(backend, _FOR_BACKENDS & found.keys()):
        canonical = _SAME.get(name, name)
        kept = others.setdefault(canonical, found[name])
        if kept != found[name]:
            idle.append(f"rdzv_configs={{{name!r}: {found[name]!r}}} is ignored: {kept!r} is given too")

    files = sorted(others.keys() & set(_SAME.values()))
    if files and others.get("protocol") != "https":
        idle.append(
            f"rdzv_configs: {', '.join(files)} has no effect without protocol=https: the connection is not encrypted"
        )
        for name in files:
            del others[name]
    elif "ssl_cert_key" in others and "ssl_cert" not in others:
        idle.append(f"rdzv_configs={{'ssl_cert_key': {others.pop('ssl_cert_key')!r}}} has no effect without ssl_cert")

    return others


def _in_order_of_precedence(backend: str, names: Set[str]) -> list[str]:
    # Of two names of one file the one that torch reads counts: the backend "etcd" has its own
    # names.
    has_names_of_its_own = backend == "etcd"

    def precedence(name: str) -> tuple[bool, str]:
        return (name in _SAME) != has_names_of_its_own, name

    return sorted(names, key=precedence)


def parse_conf(text: str) -> dict[str, str]:
    """
    Return ``a=1,b=2`` as a dictionary; the last value of a name wins.

    Raises `ConfigError` for a part that is not a pair.
    """
    found: dict[str, str] = {}
    if not text.strip():
        return found

    for part in text.strip().split(","):
        name, _, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not name:
            raise ConfigError(f"{text!r} must be comma-separated KEY=VALUE pairs, such as join_timeout=60,is_host=1")
        if not value:
            raise ConfigError(f"{text!r} gives {name} no value: write {name}=VALUE, or leave it out")
        found[name] = value

    return found
