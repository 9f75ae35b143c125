"""The coordinator's state survives on paper, whatever it went through, and nothing else is taken for it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from attrs import Factory, define, evolve
from hypothesis import given, strategies as st

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator._causes import CAUSE_WAIT
from elasticlib.rendezvous.coordinator._coordinator import mailboxes, step
from elasticlib.rendezvous.coordinator._handover import decode_state, encode_state
from elasticlib.rendezvous.coordinator._state import (
    Event,
    Heartbeats,
    JobState,
    MessageReceived,
    Rules,
    Sightings,
    Tick,
)
from elasticlib.rendezvous.protocol._messages import (
    Close,
    Descriptor,
    Failed,
    FailureNote,
    Join,
    Leave,
    Report,
    Stopped,
    Succeeded,
)

NAMES = ("host1/11-aa", "host1/12-bb", "host2/21-cc", "höst3/31-dd")
NOTE = FailureNote(2, 0, 77, -9, "killed", traceback="line 1\nline 2", age=0.5)
QUARTERS = st.integers(0, 80).map(lambda quarters: quarters / 4)
"""Times whose differences are exact."""


@define
class Course:
    """A job on its way: its state, and what it takes to go on."""

    state: JobState
    now: float = 1000.0
    envelopes: Counter[str] = Factory(Counter)
    heartbeats: Counter[str] = Factory(Counter)

    def go_on(self, event: Event) -> None:
        self.state, _ = step(self.state, event, self.now)

    def receive(self, report: Report) -> None:
        self.envelopes[report.node] += 1
        self.go_on(MessageReceived(self.envelopes[report.node], report))

    def node_heartbeat(self, silent: str) -> None:
        self.heartbeats.update(mailbox for node, mailbox in mailboxes(self.state).items() if node != silent)
        self.go_on(Heartbeats(dict(self.heartbeats)))


@st.composite
def reports(draw: st.DrawFn, state: JobState) -> Report:
    node = draw(st.sampled_from(NAMES))
    number = state.round.number if state.round is not None else 0
    notes = draw(st.sampled_from([(), (NOTE,), (NOTE, evolve(NOTE, rank=3, secondary=True))]))
    index = draw(st.sampled_from([None, 4]))
    descriptor = Descriptor(1 + NAMES.index(node), "trainer", (node, "fe80::1"), 4711, index, node == NAMES[2])
    likely = [Join(node, descriptor)] * 4
    choices: list[Report] = [
        *likely,
        Failed(node, number, notes),
        Stopped(node, number, notes),
        Stopped(node, number, ()),
        Succeeded(node, number),
        Leave(node, "SIGTERM", draw(st.sampled_from([None, number]))),
        Leave(node, "its agent died", lost=True),
        Close(node, "enough"),
    ]
    return draw(st.sampled_from(choices))


@st.composite
def courses(draw: st.DrawFn) -> Course:
    least, most = sorted(draw(st.tuples(st.integers(1, 3), st.integers(1, 4))))
    rules = Rules(
        least,
        most,
        draw(st.integers(0, 3)),
        last_call=draw(st.sampled_from([0.0, 30.0])),
        join_timeout=draw(st.sampled_from([0.0, 600.0])),
        heartbeat=draw(st.sampled_from([0.0, 10.0])),
        wait_for=draw(st.sampled_from(["quiet", "min", "max"])),
    )
    course = Course(JobState(rules))
    for _ in range(draw(st.integers(0, 25))):
        course.now += draw(QUARTERS)
        match draw(st.sampled_from("rrrrrbt")):
            case "r":
                course.receive(draw(reports(course.state)))
            case "b":
                course.node_heartbeat(draw(st.sampled_from(NAMES)))
            case _:
                course.go_on(Tick())
    return course


@given(courses())
def test_every_state_a_job_can_reach_is_restored(course: Course) -> None:
    assert course.state == decode_state(encode_state(course.state, course.now), course.now)


@given(courses(), st.integers(-1000, 1000), st.data())
def test_restored_job_continues_the_same_under_another_clock(course: Course, skew: int, data: st.DataObject) -> None:
    copy = decode_state(encode_state(course.state, course.now), course.now + skew)
    stayed = evolve(course.state, watch=Sightings())
    course.now += data.draw(QUARTERS)
    report = data.draw(reports(course.state))
    event = MessageReceived(course.envelopes[report.node] + 1, report)

    there, actions_there = step(copy, event, course.now + skew)
    here, actions_here = step(stayed, event, course.now)

    # An action that is due at a time is due at another one there; what is left of the state shows the rest.
    assert encode_state(here, course.now) == encode_state(there, course.now + skew)
    assert [type(action) for action in actions_here] == [type(action) for action in actions_there]


def test_forgotten_nodes_flag_is_restored() -> None:
    assert decode_state(encode_state(JobState(Rules(), has_forgotten=True), 7.0), 1.0).has_forgotten


def test_an_open_cause_is_due_as_before_under_the_next_coordinator() -> None:
    course = Course(JobState(Rules(1, 1)))
    course.receive(Join(NAMES[0], Descriptor(1, "trainer", (NAMES[0],), 1)))
    course.receive(Failed(NAMES[0], 0, ()))
    assert course.state.round is not None

    copy = decode_state(encode_state(course.state, course.now), 5.0)

    assert course.state.round.cause_due == course.now + CAUSE_WAIT
    assert copy.round is not None
    assert copy.round.cause_due == 5.0 + CAUSE_WAIT


def test_a_new_coordinator_gives_everybody_a_full_heartbeat_time() -> None:
    course = Course(JobState(Rules(2, 2, heartbeat=10.0)))
    course.node_heartbeat(silent="")
    for node in NAMES[:2]:
        course.receive(Join(node, Descriptor(1, "trainer", (node,), 1)))
    course.now += 9.0
    successor = Course(decode_state(encode_state(course.state, course.now), 5.0), now=5.0)
    for _ in range(4):
        successor.node_heartbeat(silent=NAMES[0])
        assert successor.state.round is not None
        assert successor.state.round.end is None
        successor.now += 3.0

    successor.node_heartbeat(silent=NAMES[0])
    assert successor.state.round is not None
    assert successor.state.round.end is not None


def plain(**changes: Any) -> bytes:
    course = Course(JobState(Rules(2, 2)))
    for node in NAMES[:2]:
        course.receive(Join(node, Descriptor(1, "trainer", (node,), 1)))
    return json.dumps(json.loads(encode_state(course.state, course.now)) | changes).encode()


def of_round(**changes: Any) -> bytes:
    return plain(round=json.loads(plain())["round"] | changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff", "not a coordinator's state"),
        (b"[" * 100_000, "not a coordinator's state"),
        (b"[]", "not a coordinator's state"),
        (b"{}", "'v'"),
        (plain(v=2), "version is 2, but this node reads only version 1"),
        (plain(v=True), "True should be a int"),
        (plain(rules={}), "min_nodes"),
        (plain(rules=json.loads(plain())["rules"] | {"min_nodes": 3}), "max_nodes=2 is below min_nodes=3"),
        (plain(received=[]), "should be a dict"),
        (plain(forgotten=1), "1 should be a bool"),
        (plain(received={"a": "1"}), "should be a int"),
        (plain(waiting=[["a", 1]]), "not enough values"),
        (plain(waiting=[["a", 1, 0, "trainer", ["a"], 1, None, False, ""]]), "'slots' must be >= 1"),
        (plain(waiting=[["a", 1, 1, "trainer", "a", 1, None, False, ""]]), "should be a list"),
        (plain(last_join=None), "None should be a number"),
        (plain(last_join=0).replace(b'"last_join": 0', b'"last_join": 1e999'), "inf should be a finite"),
        (plain(last_join=0).replace(b'"last_join": 0', b'"last_join": NaN'), "NaN is not a JSON number"),
        (
            plain(
                final={"type": "pulse", "v": 1, "nonce": "n", "count": 1, "status": "", "waiting": 0, "over": ""}
                | {"read": None}
            ),
            "a CoordinatorHeartbeat where a Final should be",
        ),
        (of_round(own=[[0, 0, 2, 0]]), "1 rank assignments for the nodes"),
        (of_round(own=[], entries=[]), "0 rank assignments"),
        (of_round(own=[[0, 0], [1, 1]]), "shorter"),
        (of_round(seats={}), "round"),
        (of_round(stopped=[7]), "out of range"),
        (of_round(left=[[0, 1]]), "1 should be a str"),
        (of_round(causes=[[1.0, None]]), "not a message"),
    ],
)
def test_invalid_state_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RendezvousStateError, match=message):
        decode_state(data, 0.0)


@given(st.data())
def test_no_changed_byte_breaks_the_decoder(data: st.DataObject) -> None:
    wire = bytearray(plain())
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))

    try:
        state = decode_state(bytes(wire), 0.0)
    except RendezvousStateError:
        return
    assert isinstance(state, JobState)


def test_a_node_costs_a_hundred_and_thirty_bytes() -> None:
    def size(count: int) -> int:
        course = Course(JobState(Rules(count, count)))
        for i in range(count):
            course.receive(Join(f"10.0.{i:03}.1/123456-1a2b3c4d", Descriptor(8, "default", (f"10.0.{i:03}.1",), 45000)))
        return len(encode_state(course.state, course.now))

    assert 120 <= (size(200) - size(100)) / 100 <= 140
