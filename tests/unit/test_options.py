"""The keys of ``rdzv_configs``: who takes which, what values mean, what is refused."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import ConfigError
from elasticlib.rendezvous._rdzv_options import ALL, RDZV_CONF_KEYS, Options, parse_conf, read

GOOD = {
    "wait_for": "max",
    "store_type": "file",
    "is_host": "yes",
    "protocol": "https",
    **dict.fromkeys(("ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix"), "/a"),
}
"""A good value of each key that is no number."""


def test_empty_options_mean_torchs_defaults_and_10_s_of_silence() -> None:
    options = read("c10d", {})

    assert (600.0, 30.0, 30.0) == (options.join_timeout, options.last_call, options.close_timeout)
    assert (10.0, 60.0, 3600.0) == (options.heartbeat, options.reconnect_timeout, options.store_linger)
    assert (None, None, "tcp", None, {}) == (
        options.wait_for,
        options.is_host,
        options.store_type,
        options.rank,
        options.others,
    )


@pytest.mark.parametrize(
    ("backend", "name"), [(each, name) for name in RDZV_CONF_KEYS for each in sorted(RDZV_CONF_KEYS[name].backends)]
)
def test_no_key_is_taken_and_then_ignored(backend: str, name: str) -> None:
    value = GOOD.get(name, "7")
    context = {"protocol": "https"} if "cert" in name or name in ("key", "protocol") else {}

    assert read(backend, {**context, name: value}) != read(backend, {})


@pytest.mark.parametrize(("value", "seconds"), [("5", 5.0), (5, 5.0), (0.5, 0.5), (" 1.5 ", 1.5)])
def test_numbers_are_accepted_as_text_or_typed(value: Any, seconds: float) -> None:
    """Row 139."""
    assert seconds == read("c10d", {"last_call_timeout": value}).last_call


@pytest.mark.parametrize(
    "name",
    [
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "reconnect_timeout",
        "read_timeout",
    ],
)
@pytest.mark.parametrize("value", [0, "0", -1, "-1", "soon", "", "nan", math.inf, True, [], 10**400])
def test_a_time_that_is_not_above_0_is_refused(name: str, value: Any) -> None:
    """Row 139."""
    with pytest.raises(ValueError, match=name):
        read("c10d", {name: value})


@pytest.mark.parametrize("value", [1e300, "1e300", 10**12])
def test_a_time_that_nobody_lives_to_see_is_one_that_can_be_counted(value: Any) -> None:
    keys = ("join_timeout", "last_call_timeout", "close_timeout", "reconnect_timeout", "heartbeat_timeout")
    found = read("c10d", dict.fromkeys(keys, value))
    heartbeats = read("c10d", {"keep_alive_interval": value, "keep_alive_max_attempt": 10**9}).heartbeat

    times = (
        found.join_timeout,
        found.last_call,
        found.close_timeout,
        found.reconnect_timeout,
        found.heartbeat,
        heartbeats,
    )
    assert {LONGEST_TIME} == set(times)
    assert LONGEST_TIME < threading.TIMEOUT_MAX


def test_no_time_to_join_means_that_nobody_is_replaced() -> None:
    assert 0 == read("c10d", {"join_timeout": "0"}).join_timeout


def test_a_negative_time_to_join_is_refused() -> None:
    with pytest.raises(ConfigError, match="join_timeout must be a number of seconds, 0 or more"):
        read("c10d", {"join_timeout": -1})


def test_a_count_must_be_whole() -> None:
    with pytest.raises(ConfigError, match="keep_alive_max_attempt must be a whole number"):
        read("c10d", {"keep_alive_max_attempt": "1.5"})


@pytest.mark.parametrize(
    ("configs", "seconds"),
    [
        ({"heartbeat_timeout": 4}, 4),
        ({"keep_alive_interval": 2}, 6),
        ({"keep_alive_max_attempt": 4}, 20),
        ({"keep_alive_interval": "1", "keep_alive_max_attempt": "2"}, 2),
        ({"keep_alive_interval": 2, "heartbeat_timeout": 99}, 6),
    ],
)
def test_silence_is_interval_times_attempts_else_the_heartbeat_timeout(configs: dict[str, Any], seconds: float) -> None:
    """Rows 135 and 139."""
    assert seconds == read("c10d", configs).heartbeat


def test_silence_shorter_than_a_heartbeat_is_refused_or_extended() -> None:
    with pytest.raises(ConfigError, match=r"'heartbeat_timeout': 0.05}: heartbeat_timeout must be .* 0\.1 or more"):
        read("c10d", {"heartbeat_timeout": 0.05})
    options = read("c10d", {"keep_alive_interval": 0.01, "keep_alive_max_attempt": 2})

    assert 0.1 == options.heartbeat
    why = "keep_alive_interval=0.01 times keep_alive_max_attempt=2 is too short: 0.1 s is used"
    assert (f"rdzv_configs: {why}",) == options.idle


@pytest.mark.parametrize(
    ("backend", "configs", "seconds"),
    [
        ("static", {"timeout": 900}, 900),
        ("etcd", {"timeout": 900}, 900),
        ("c10d", {"timeout": 900}, 600),
        ("etcd-v2", {"timeout": 900}, 600),
        ("c10d", {"timeout": 20}, 20),
        ("static", {"timeout": 20, "join_timeout": 30}, 30),
        ("c10d", {"timeout": 20, "join_timeout": 30}, 30),
    ],
)
def test_timeout_is_the_older_name_of_join_timeout(backend: str, configs: dict[str, Any], seconds: float) -> None:
    """Row 030; a launch's default of 900 counts where torch looks at it."""
    assert seconds == read(backend, configs).join_timeout


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(value, True) for value in ("1", "TRUE", "t", "Yes", "y", True, 1)],
        *[(value, False) for value in ("0", "False", "f", "NO", "n", False, 0)],
        (None, None),
    ],
)
def test_is_host_accepts_a_text_or_a_truth_value(value: Any, expected: bool | None) -> None:
    assert expected is read("c10d", {"is_host": value}).is_host


@pytest.mark.parametrize("value", ["maybe", "", 2, "on", 1.5])
def test_invalid_is_host_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="is_host must be 1 or 0"):
        read("c10d", {"is_host": value})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("join_timout", "join_timeout"),
        ("last_call", "last_call_timeout"),
        ("ishost", "is_host"),
        ("heartbeat", "heartbeat_timeout"),
    ],
)
def test_unknown_key_is_ignored_and_named_with_the_nearest_one(name: str, near: str) -> None:
    (warning,) = read("c10d", {name: "1"}).idle

    assert f"{name} is unknown and has no effect: did you mean {near}" in warning
    assert "store_type" in warning
    assert "ca_cert" not in warning


def test_an_unknown_key_that_is_like_no_other_is_named_with_all_known_ones() -> None:
    (warning,) = read("static", {"zzz": "1"}).idle

    assert "zzz is unknown and has no effect: rdzv_backend='static' accepts join_timeout, " in warning


@pytest.mark.parametrize(
    ("backend", "name", "others"),
    [("c10d", "ssl_cert", "etcd, etcd-v2, etcd-v3"), ("etcd", "is_host", "c10d"), ("c10d", "rank", "static")],
)
@pytest.mark.parametrize("value", ["1", "nonsense"])
def test_key_of_another_back_end_names_the_one_that_uses_it(backend: str, name: str, others: str, value: str) -> None:
    """The message does not depend on the value, which is not read."""
    (warning,) = read(backend, {name: value}).idle

    assert f"{name} has no effect with rdzv_backend='{backend}', only with {others}" in warning


@pytest.mark.parametrize(
    ("backend", "name"),
    [("c10d", "timeout"), ("etcd-v2", "timeout"), ("static", "heartbeat_timeout"), ("etcd", "read_timeout")],
)
def test_a_bad_value_of_a_key_that_torch_does_not_look_at_is_ignored_aloud(backend: str, name: str) -> None:
    options = read(backend, {name: "soon"})

    assert [f"{name} must be"] == [f"{name} must be" for text in options.idle if f"{name} must be" in text]
    assert options == evolve(read(backend, {}), idle=options.idle)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("static", "timeout"), ("etcd", "timeout"), ("c10d", "heartbeat_timeout"), ("etcd-v3", "read_timeout")],
)
def test_a_bad_value_of_a_key_that_torch_reads_or_only_we_know_is_refused(backend: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        read(backend, {name: "soon"})


@pytest.mark.parametrize("value", [-1, "x", "nan", math.inf])
def test_the_time_between_repeated_writes_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="cas_backoff_max_seconds must be a number of seconds, 0 or more"):
        read("c10d", {"cas_backoff_max_seconds": value})


@pytest.mark.parametrize(("value", "count"), [("1.5", 1), ("0", 0), (0.0, 0)])
def test_backoff_of_repeated_writes_is_ignored_and_named_unless_0(value: Any, count: int) -> None:
    options = read("c10d", {"cas_backoff_max_seconds": value})

    assert count == len(options.idle)
    assert options == evolve(read("c10d", {}), idle=options.idle)


@pytest.mark.parametrize(("given", "expected"), [("TCP", "tcp"), (" File ", "file")])
def test_text_options_are_read_in_any_case(given: str, expected: str) -> None:
    assert expected == read("c10d", {"store_type": given}).store_type


def test_a_protocol_is_read_in_any_case() -> None:
    assert {"protocol": "https"} == read("etcd", {"protocol": "HTTPS"}).others


def test_hosting_has_no_meaning_for_a_file_and_is_named() -> None:
    options = read("c10d", {"store_type": "file", "is_host": "1"})

    assert options.is_host is None
    assert "is_host" in options.idle[0]


def test_names_of_tls_files_are_the_same_for_all_etcd_back_ends() -> None:
    configs = {"protocol": "https", "cert": "/c", "key": "/k", "cacert": "/a"}

    others = read("etcd", configs).others

    assert {"protocol": "https", "ssl_cert": "/c", "ssl_cert_key": "/k", "ca_cert": "/a"} == others


@pytest.mark.parametrize(("backend", "file"), [("etcd", "/c"), ("etcd-v2", "/d"), ("etcd-v3", "/d")])
def test_of_two_names_of_one_tls_file_the_one_that_torch_reads_counts(backend: str, file: str) -> None:
    options = read(backend, {"protocol": "https", "cert": "/c", "ssl_cert": "/d"})

    assert file == options.others["ssl_cert"]
    assert [f"{file!r} is given too"] == [each.rpartition(": ")[2] for each in options.idle]


def test_tls_files_without_tls_have_no_effect_and_are_named() -> None:
    options = read("etcd-v2", {"ssl_cert": "/c"})

    assert {} == options.others
    assert "ssl_cert has no effect without protocol=https" in options.idle[0]


def test_a_key_without_its_certificate_has_no_effect_and_is_named() -> None:
    options = read("etcd-v2", {"protocol": "https", "ssl_cert_key": "/k"})

    assert {"protocol": "https"} == options.others
    assert "has no effect without ssl_cert" in options.idle[0]


@given(
    backend=st.sampled_from(sorted(ALL)),
    configs=st.dictionaries(
        st.sampled_from(sorted(RDZV_CONF_KEYS)) | st.text(max_size=20),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none()),
    ),
)
def test_any_options_are_accepted_or_refused_with_a_config_error(backend: str, configs: dict[str, Any]) -> None:
    try:
        found: Options | None = read(backend, configs)
    except ConfigError:
        found = None

    assert found is None or (found.heartbeat > 0 and found.join_timeout >= 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        (" a = 1 , b=2 ", {"a": "1", "b": "2"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=1,b=3,a=2", {"a": "2", "b": "3"}),
    ],
)
def test_pairs_are_split_at_commas_and_at_the_first_equals_sign(text: str, expected: dict[str, str]) -> None:
    """Row 028."""
    assert expected == parse_conf(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [("a", "a no value"), ("a=", "a no value"), ("=1", "pairs"), ("a=1,", "pairs")],
)
def test_invalid_pair_is_refused(text: str, named: str) -> None:
    """Row 029."""
    with pytest.raises(ValueError, match=named):
        parse_conf(text)
