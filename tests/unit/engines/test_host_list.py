"""`hosts_of`: Slurm's lists of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.engines._host_list import hosts_of


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("login1,n[01-02],a-b.example.com", ["login1", "n01", "n02", "a-b.example.com"]),
        ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
        ("n[1-2]-ib0", ["n1-ib0", "n2-ib0"]),
    ],
)
def test_a_list_names_its_hosts_in_order(text: str, hosts: list[str]) -> None:
    assert hosts == list(hosts_of(text))


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", ",n1", "n1,,n2", "n[1-2", "n1]", "n[a-b]", "n[]", "n[1-]", "n[-2]", "n[1-2]]", "n[2-1]", "n[²]"],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of"):
        hosts_of(text)


@pytest.mark.parametrize(
    "text",
    ["n[0-99999999999]", "a[0-9999]b[0-9999]", ",".join(["n[0-60000]"] * 2), "n[" + ",".join(["0-9999"] * 9000) + "]"],
)
def test_a_huge_list_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="more than 65536"):
        hosts_of(text)


@given(st.text(alphabet="n1,[-]x0²\n", max_size=30) | st.text(max_size=20))
def test_any_text_gives_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = hosts_of(text)
    except ValueError:
        return
    assert hosts and all(hosts)
