"""What a message looks like on the wire, and what is refused."""

from __future__ import annotations

import json
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous._messages import (
    Beat,
    Bye,
    Close,
    Descriptor,
    Failed,
    FailureNote,
    Final,
    GivenUp,
    Hello,
    Join,
    Leave,
    Letter,
    Message,
    Pulse,
    RoundEnd,
    Seat,
    Stopped,
    Succeeded,
    Terms,
    decode,
    encode,
    key_of,
)

text = st.text(max_size=8)
count = st.integers(0, 2**70)
descriptors = st.builds(
    Descriptor,
    slots=st.integers(1, 8),
    role=text,
    addresses=st.lists(text, min_size=1, max_size=3).map(tuple),
    store_port=st.integers(0, 65535),
    index=st.none() | count,
)
notes = st.builds(
    FailureNote,
    rank=count,
    local_rank=count,
    pid=count,
    exitcode=st.integers(-64, 255),
    message=text,
    exception_type=text,
    traceback=text,
    hint=text,
    secondary=st.booleans(),
    age=st.floats(0, 1e9),
)
lists = st.lists(notes, max_size=2).map(tuple)
terms = st.builds(Terms, count, count, count)
REPORTS: dict[type, st.SearchStrategy[Any]] = {
    Join: st.builds(Join, text, descriptors, st.none() | terms),
    Failed: st.builds(Failed, text, count, lists),
    Stopped: st.builds(Stopped, text, count, lists),
    Succeeded: st.builds(Succeeded, text, count),
    Leave: st.builds(Leave, text, text, st.none() | count),
    Bye: st.builds(Bye, text),
    Close: st.builds(Close, text, text),
}
BUILDERS: dict[type, st.SearchStrategy[Any]] = REPORTS | {
    Letter: st.builds(Letter, st.integers(1, 2**70), st.one_of(*REPORTS.values())),
    Hello: st.builds(Hello, text, text, text, terms, st.floats(0, 1e9), st.booleans()),
    Pulse: st.builds(Pulse, text, count, text, count),
    Beat: st.builds(Beat, count, count, count),
    Seat: st.builds(
        Seat, *[count] * 9, master_addresses=st.lists(text).map(tuple), master_port=st.integers(0, 65535), why=text
    ),
    RoundEnd: st.builds(RoundEnd, count, text, st.booleans()),
    GivenUp: st.builds(GivenUp, text),
    Final: st.builds(Final, st.booleans(), text, st.none() | text, st.none() | notes, text),
}
JOIN = Join("a", Descriptor(2, "trainer", ("127.0.0.1",), 29500))


def body(message: Message = JOIN) -> Any:
    return json.loads(encode(message))


def test_the_tests_build_every_message() -> None:
    assert set(get_args(Message)) == set(BUILDERS)


@given(st.one_of(*BUILDERS.values()))
def test_what_was_encoded_decodes_to_the_same(message: Message) -> None:
    assert message == decode(encode(message))


def test_the_wire_is_sorted_ascii_json_with_a_version() -> None:
    assert encode(Succeeded("nöde", 3)) == b'{"node":"n\\u00f6de","round":3,"type":"succeeded","v":1}'


def broken(**changes: Any) -> bytes:
    return json.dumps(body() | changes).encode()


def broken_descriptor(**changes: Any) -> bytes:
    return broken(descriptor=body()["descriptor"] | changes)


def note(**changes: Any) -> bytes:
    message = body(Failed("a", 0, (FailureNote(0, 0, 1, 1),)))
    message["failures"][0] |= changes
    return json.dumps(message).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\xfd", "no message"),
        (b"[" * 100_000, "no message"),
        (b"[1]", "no JSON object"),
        (b"{}", "version None, we speak 1"),
        (broken(v=2), "version 2, we speak 1"),
        (broken(v=True), "version True"),
        (broken(v=1.0), "version 1.0"),
        (broken(type="destroy"), "'destroy' is unknown"),
        (broken(type=["join"]), "is unknown"),
        (broken(extra=1), "exactly the fields node, descriptor"),
        (json.dumps({k: v for k, v in body().items() if k != "node"}).encode(), "exactly the fields"),
        (broken(node=1), "1 should be a str"),
        (broken(terms={"min_nodes": 1}), "Terms needs exactly"),
        (broken(mac="x"), "signed, and this node has no token"),
        (b'{"v":1,"type":"letter","seq":1,"report":{"v":2,"type":"bye","node":"a"}}', "no report of this version"),
        (b'{"v":1,"type":"letter","seq":1,"report":{"v":1,"type":"pulse","count":1}}', "'pulse' is unknown"),
        (b'{"v":1,"type":"letter","seq":0,"report":{"v":1,"type":"bye","node":"a"}}', "seq"),
        (broken(descriptor=None), "Descriptor needs exactly"),
        (broken_descriptor(slots=0), "'slots' must be >= 1"),
        (broken_descriptor(slots=True), "True should be a int"),
        (broken_descriptor(slots=2.0), "2.0 should be a int"),
        (broken_descriptor(addresses=[]), "addresses"),
        (broken_descriptor(addresses="127.0.0.1"), "should be a list"),
        (broken_descriptor(addresses=[1]), "1 should be a str"),
        (broken_descriptor(store_port=65536), "store_port"),
        (broken_descriptor(index=-1), "index"),
        (note(age=-0.5), "age"),
        (note(age=None), "None should be a number"),
        (note(age=10**400), "not finite"),
        (note(age=0).replace(b'"age": 0', b'"age": 1e999'), "not finite"),
        (note(age=0).replace(b'"age": 0', b'"age": NaN'), "NaN is no JSON number"),
        (note(rank="0"), "'0' should be a int"),
        (broken(node=1).replace(b"1", b"1" * 5000), "no message"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(RendezvousStateError, match=said):
        decode(data)


@given(st.binary(max_size=40))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        decode(data)


@given(st.one_of(*BUILDERS.values()), st.data())
def test_no_changed_byte_breaks_the_decoder(message: Message, data: st.DataObject) -> None:
    wire = bytearray(encode(message))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))

    try:
        decoded = decode(bytes(wire))
    except RendezvousStateError:
        return
    assert type(decoded) in BUILDERS


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        JOIN.node = "b"  # type: ignore[misc]


KEY = key_of("secret")


@given(st.one_of(*BUILDERS.values()), text)
def test_what_was_signed_for_a_place_is_read_there(message: Message, place: str) -> None:
    assert message == decode(encode(message, KEY, place), KEY, place)


@pytest.mark.parametrize(
    ("wire", "key", "place", "said"),
    [
        (encode(JOIN), KEY, "here", "it is not signed"),
        (encode(JOIN, KEY, "here"), None, "here", "this node has no token"),
        (encode(JOIN, KEY, "there"), KEY, "here", "for another place"),
        (encode(JOIN, key_of("other"), "here"), KEY, "here", "not of this token"),
        (encode(JOIN, KEY, "here").replace(b"trainer", b"trayner"), KEY, "here", "not of this token"),
        (json.dumps(body() | {"mac": 1}).encode(), KEY, "here", "it is not signed"),
        (json.dumps(body() | {"mac": "\ud800"}).encode(), KEY, "here", "not of this token"),
    ],
)
def test_what_was_not_signed_for_this_place_is_refused(wire: bytes, key: bytes | None, place: str, said: str) -> None:
    with pytest.raises(RendezvousStateError, match=said):
        decode(wire, key, place)


@given(st.one_of(*BUILDERS.values()), st.data())
def test_no_changed_byte_passes_the_signature(message: Message, data: st.DataObject) -> None:
    wire = bytearray(encode(message, KEY, "here"))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))

    try:
        decoded = decode(bytes(wire), KEY, "here")
    except RendezvousStateError:
        return
    assert message == decoded  # the same value, spelled differently
