"""Decisions of a server of jobs: which it begins, admits, declines, and which bytes it drops."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve

from elasticlib.rendezvous import Rules
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.serving._job_table import Admit, Begin, Decline, Drop, JobTable
from elasticlib.rendezvous.serving._requests import (
    LONGEST_REQUEST,
    OpenJob,
    ServerMark,
    decode,
    encode,
    encode_request,
    read_request,
)

OURS, OTHER = key_of("ours"), key_of("other")
RULES = Rules(2, 3, heartbeat=10.0)
SECRET = "set ELASTICLIB_TOKEN to the same secret for the server and for all nodes"


def request(**facts: Any) -> OpenJob:
    usual: dict[str, Any] = {"word": "w", "node": "n/1", "run_id": "a", "rules": RULES}
    return OpenJob(**usual | facts)


def table(hosted: Mapping[str, bytes | None] | None = None, *, keys: tuple[bytes | None, ...] = (None,)) -> JobTable:
    return JobTable(2, keys, hosted or {})


def test_job_is_begun_once_and_its_other_nodes_are_admitted() -> None:
    first, decision = table().receive(encode_request(request(), None), {})
    then, again = first.receive(encode_request(request(node="n/2"), None), {})

    assert (Begin(request(), None), Admit(request(node="n/2"))) == (decision, again)
    assert {"a": None} == dict(then.hosted)


def test_id_of_a_closed_job_is_free_again() -> None:
    full = table({"a": None, "b": None})

    _, decision = full.without("a").receive(encode_request(request(), None), {})

    assert Begin(request(), None) == decision


DECLINED: dict[str, tuple[JobTable, bytes, OpenJob, dict[str, str], str]] = {
    "too many jobs": (
        table({"b": None, "c": None}),
        encode_request(request(), None),
        request(),
        {},
        "it hosts 2 jobs already: start it with a larger --max-jobs",
    ),
    "new node of a job that is over": (
        table({"a": None}),
        encode_request(request(), None),
        request(),
        {"a": "all 2 nodes succeeded"},
        "job 'a' had ended: all 2 nodes succeeded",
    ),
    "no token": (
        table(keys=(OURS,)),
        encode_request(request(), None),
        request(),
        {},
        f"the job does not have its token: {SECRET}",
    ),
    "another token": (
        table(keys=(OURS,)),
        encode_request(request(), OTHER),
        request(),
        {},
        f"the job does not have its token: {SECRET}",
    ),
    "a token that the server lacks": (
        table(keys=(OURS, None)),
        encode_request(request(), OTHER),
        request(),
        {},
        f"the job has another token than the server: {SECRET}",
    ),
    "another token than the job's first node": (
        table({"a": OURS}, keys=(OURS, None)),
        encode_request(request(), None),
        request(),
        {},
        "job 'a' has another token: set ELASTICLIB_TOKEN to the same secret for all nodes",
    ),
}


@pytest.mark.parametrize("case", DECLINED)
def test_request_is_declined_with_the_reason(case: str) -> None:
    before, data, declined, ended, why = DECLINED[case]

    after, decision = before.receive(data, ended)

    assert Decline(declined, why) == decision
    assert before == after


@pytest.mark.parametrize("ended", [{}, {"a": "it failed"}])
def test_node_with_a_new_sidecar_is_admitted_even_after_the_end(ended: dict[str, str]) -> None:
    back = request(is_known=True)

    _, decision = table({"a": None}).receive(encode_request(back, None), ended)

    assert Admit(back) == decision


def test_token_that_signed_the_first_request_is_the_jobs() -> None:
    after, decision = table(keys=(OURS, None)).receive(encode_request(request(), OURS), {})

    assert Begin(request(), OURS) == decision
    assert {"a": OURS} == dict(after.hosted)


def changed(**parts: Any) -> bytes:
    return json.dumps(json.loads(encode_request(request(), None)) | parts).encode()


def with_rules(**parts: Any) -> bytes:
    return changed(rules=json.loads(encode_request(request(), None))["rules"] | parts)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"{}",
        b"null",
        encode(ServerMark("x")),
        changed(v=2),
        changed(v=True),
        changed(word="\x1b[2J"),
        changed(node=""),
        changed(run_id="\ud800"),
        changed(run_id=""),
        changed(run_id="x" * 2000),
        changed(close_timeout="soon"),
        changed(more=1),
        with_rules(min_nodes=0),
        with_rules(min_nodes=9),
        with_rules(max_nodes=10**30),
        with_rules(heartbeat=0),
        with_rules(heartbeat=1e308),
        with_rules(wait_for="all"),
        with_rules(hosts=[1]),
        changed(node="n" * LONGEST_REQUEST),
    ],
)
def test_bytes_that_are_not_a_request_are_dropped_with_a_short_line(data: bytes) -> None:
    before = table()

    after, decision = before.receive(data, {})

    assert before == after
    assert isinstance(decision, Drop)
    assert decision.why.isprintable() and len(decision.why) <= 1000


def test_names_of_machines_are_left_out_of_a_long_request() -> None:
    short = evolve(RULES, hosts=("n1", "n2"))
    long = evolve(RULES, hosts=tuple(f"machine-{number}.example.org" for number in range(5000)))

    sent = [read_request(encode_request(request(rules=rules), OURS)) for rules in (short, long)]

    assert [("n1", "n2"), ()] == [each.rules.hosts for each in sent]
    assert [RULES, RULES] == [each.rules for each in sent]


def test_mark_of_another_version_is_an_error() -> None:
    body = json.loads(encode(ServerMark("s/1")))

    assert ServerMark("s/1") == decode(json.dumps(body).encode())
    with pytest.raises(ValueError, match="version"):
        decode(json.dumps(body | {"v": 2}).encode())
