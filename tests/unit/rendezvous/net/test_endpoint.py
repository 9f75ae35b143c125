"""Reading of endpoints, and mistakes that it must not make."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.net._endpoint import address_of, is_loopback, parse_rendezvous_endpoint, spell


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("localhost", 29400)),
        ("", ("localhost", 29400)),
        ("  ", ("localhost", 29400)),
        ("node1", ("node1", 29400)),
        (" node1:80 ", ("node1", 80)),
        ("node_1.cluster-a.example:65535", ("node_1.cluster-a.example", 65535)),
        ("localhost:0", ("localhost", 0)),
        ("10.0.0.1:00080", ("10.0.0.1", 80)),
        ("[::1]", ("::1", 29400)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[localhost]:80", ("localhost", 80)),
        ("127.1:0000000080", ("127.1", 80)),
        ("2001:db8:1:2:3:4:5:6:80", ("2001:db8:1:2:3:4:5:6", 80)),
    ],
)
def test_an_endpoint_is_host_and_port(text: str | None, expected: tuple[str, int]) -> None:
    assert expected == parse_rendezvous_endpoint(text, 29400)


@pytest.mark.parametrize("text", ["::1", "fe80::1", "2001:db8::1:80", "::ffff:10.0.0.1"])
def test_an_address_without_brackets_has_no_port(text: str) -> None:
    assert (text, 29400) == parse_rendezvous_endpoint(text, 29400)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("http://node1:80/x", "write 'node1:80'"),
        ("etcd://node1", "it is a URL"),
        ("node1:", "port ''"),
        ("node1:eighty", "port 'eighty'"),
        ("node1:65536", "0 to 65535"),
        ("node1:-1", "port '-1'"),
        ("node1:1e3", "port '1e3'"),
        ("node1:٣", "port"),
        (":80", "the host is missing"),
        ("[node1:80]", "brackets must contain one IP address"),
        ("[]:80", "brackets must contain one IP address"),
        ("[::1", "brackets must contain one IP address"),
        ("[::1]80", "brackets must contain one IP address"),
        ("node1:80:90", "too many colons"),
        ("node 1:80", "host 'node 1'"),
        ("a,b:80", "host 'a,b'"),
        ("/tmp/store", "host '/tmp/store'"),
        ("/tmp/store", "for a file on this machine add store_type=file"),
    ],
)
def test_anything_else_is_refused_with_value_and_rule(text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rendezvous_endpoint(text, 29400)

    assert repr(text) in str(caught.value)
    assert rule in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_is_anything_but_an_endpoint_or_an_error(text: str) -> None:
    try:
        host, port = parse_rendezvous_endpoint(text, 29400)
    except ConfigError:
        return

    assert host
    assert 0 <= port <= 65535


@given(st.ip_addresses().map(str) | st.sampled_from(["localhost", "node-1.x"]), st.integers(0, 65535))
def test_spelled_endpoint_is_parsed_to_the_same_host_and_port(host: str, port: int) -> None:
    assert (host, port) == parse_rendezvous_endpoint(spell(host, port), 29400)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost.",
        "a.localhost",
        "127.0.0.1",
        "127.9.9.9",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f.1",
        "0177.1",
        "::1",
        "::ffff:127.0.0.1",
    ],
)
def test_loopback_is_known_without_a_look_up(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["node1", "localhost.example", "10.0.0.1", "10.1", "0.0.0.0", "::", "fe80::1"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@given(
    st.lists(st.integers(0, 300) | st.integers(0, 2**33), min_size=1, max_size=4),
    st.sampled_from(["{}", "{:#x}", "0{:o}"]),
)
def test_a_short_address_is_what_the_system_reads_in_it(parts: list[int], form: str) -> None:
    host = ".".join(form.format(part) for part in parts)
    try:
        expected = socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        expected = None

    found = address_of(host)
    assert (None if found is None else str(found)) == expected
