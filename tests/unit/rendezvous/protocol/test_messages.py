"""Form of messages on the wire, and refusals."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given, strategies as st

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.protocol._codec import key_of, mac, write
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Announcement,
    Descriptor,
    Envelope,
    Failed,
    FailureNote,
    Join,
    Leave,
    Message,
    Succeeded,
    Terms,
    decode,
    encode,
)
from tests.unit.rendezvous.messages import BUILDERS, text
from tests.unit.untrusted import spoiled, strange

JOIN = Join("a", Descriptor(2, "trainer", ("127.0.0.1",), 29500))


def body(message: Message = JOIN) -> Any:
    return json.loads(encode(message))


def test_the_tests_build_every_message() -> None:
    assert set(get_args(Message)) == set(BUILDERS)


@given(st.one_of(*BUILDERS.values()))
def test_encoded_message_decodes_to_the_same(message: Message) -> None:
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
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\xfd", "not a message"),
        (b"[" * 100_000, "not a message"),
        (b"[1]", "not a JSON object"),
        (b"{}", "version is None, but this node reads only version 1"),
        (broken(v=2), "version is 2, but this node reads only version 1"),
        (broken(v=True), "version is True"),
        (broken(v=1.0), "version is 1.0"),
        (broken(type="destroy"), "'destroy' is unknown"),
        (broken(type=["join"]), "is unknown"),
        (broken(extra=1), "has a missing or unknown field: its fields are node, descriptor"),
        (json.dumps({k: v for k, v in body().items() if k != "node"}).encode(), "has a missing or unknown field"),
        (broken(node=1), "1 should be a str"),
        (broken(terms={"min_nodes": 1}), "Terms has a missing or unknown field: its fields are min_nodes"),
        (broken(mac="x"), "signed, but this node has no token"),
        (b'{"v":1,"type":"letter","seq":1,"report":{"v":2,"type":"bye","node":"a"}}', "no report of version 1"),
        (b'{"v":1,"type":"letter","seq":1,"report":{"v":1,"type":"pulse","count":1}}', "'pulse' is unknown"),
        (b'{"v":1,"type":"letter","seq":0,"report":{"v":1,"type":"bye","node":"a"}}', "seq"),
        (broken(descriptor=None), "Descriptor has a missing or unknown field: its fields are slots"),
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
        (note(age=10**400), "finite"),
        (note(age=0).replace(b'"age": 0', b'"age": 1e999'), "finite"),
        (note(age=0).replace(b'"age": 0', b'"age": NaN'), "NaN is not a JSON number"),
        (note(rank="0"), "'0' should be a int"),
        (broken(node=1).replace(b"1", b"1" * 5000), "not a message"),
    ],
)
def test_invalid_message_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RendezvousStateError, match=message):
        decode(data)


@pytest.mark.parametrize("key", [None, key_of("secret")], ids=["open", "signed"])
def test_a_join_of_a_peer_that_does_not_know_of_heartbeats_is_read(key: bytes | None) -> None:
    plain = json.loads(encode(JOIN))
    del plain["pulse"]
    data = json.dumps(plain if key is None else plain | {"mac": mac(write(plain), key, "here")}).encode()

    assert JOIN == decode(data, key, "here")


@given(strange)
def test_decoder_refuses_any_invalid_message_with_a_short_error(data: bytes) -> None:
    with pytest.raises(RendezvousStateError) as refusal:
        decode(data)

    assert len(str(refusal.value)) < 1000
    assert str(refusal.value).isprintable()


@given(st.one_of(*BUILDERS.values()), st.data())
def test_message_with_any_part_is_refused_or_can_be_written_and_shown(message: Message, data: st.DataObject) -> None:
    try:
        decoded = decode(data.draw(spoiled(encode(message))))
    except RendezvousStateError as error:
        assert len(str(error)) < 1000
        assert str(error).isprintable()
        return
    assert decoded == decode(encode(decoded))
    assert decoded == decode(encode(decoded, KEY, "here"), KEY, "here")
    for each in texts(decoded):
        assert each == each.encode().decode()
        assert not [part for part in each if is_hidden(part)]


TURNS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def is_hidden(part: str) -> bool:
    """Return whether *part* affects a terminal, a line or the order, or cannot be written."""
    kind = unicodedata.category(part)
    is_control = kind == "Cc" and part not in "\n\t"
    return is_control or kind in ("Cs", "Zl", "Zp") or unicodedata.bidirectional(part) in TURNS


def texts(value: Any) -> Iterator[str]:
    """All texts of a message that people get to see."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from texts(each)
    elif attrs.has(type(value)):
        for part in attrs.fields(type(value)):
            if part.type != "Code":
                yield from texts(getattr(value, part.name))


ESC, RIGHT_TO_LEFT, HALF = "\x1b", "\u202e", "\ud800"


def test_cursor_movements_and_forged_lines_are_escaped_only_once() -> None:
    why = f"{ESC}[2Jgone\r\n[ERROR] forged\x9b31m{RIGHT_TO_LEFT}{HALF}\u2028"
    leave = decode(encode(Leave("a", why)))

    assert leave == Leave("a", r"\x1b[2Jgone\r\n[ERROR] forged\x9b31m\u202e\ud800\u2028")
    assert leave == decode(encode(leave))


def test_lines_and_letters_of_all_languages_stay() -> None:
    note = FailureNote(0, 0, 1, 1, "größer\n\tals 日本\u3000語 👩\u200d🔬 C:\\x1b", traceback=f"a\nb{ESC}")
    failed = decode(encode(Failed("a", 0, (note,))))

    assert isinstance(failed, Failed)
    assert (note.message, "a\nb\\x1b") == (failed.failures[0].message, failed.failures[0].traceback)


@pytest.mark.parametrize(
    "name", ["", HALF, f"{HALF}/1", f"a{ESC}[2J/1", "a\nb", "a\tb", "a\0", RIGHT_TO_LEFT, "x" * 301]
)
def test_a_node_whose_name_cannot_be_written_or_shown_is_refused(name: str) -> None:
    for key in (None, KEY):
        data = encode(Envelope(1, Acknowledgement(name)), None)
        with pytest.raises(RendezvousStateError, match="is not a name"):
            decode(data, key)


@pytest.mark.parametrize(("run_id", "nonce"), [("job", HALF), (HALF, "n"), ("job", ""), ("job", "x" * 301)])
def test_a_greeting_of_which_no_key_can_be_made_is_none(run_id: str, nonce: str) -> None:
    with pytest.raises(RendezvousStateError):
        decode(encode(Announcement(run_id, nonce, "a", Terms(1, 1, 0), 1.0)))


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
def test_message_signed_for_a_place_is_read_there(message: Message, place: str) -> None:
    assert message == decode(encode(message, KEY, place), KEY, place)


@pytest.mark.parametrize(
    ("wire", "key", "place", "message"),
    [
        (encode(JOIN), KEY, "here", "it is not signed"),
        (encode(JOIN, KEY, "here"), None, "here", "this node has no token"),
        (encode(JOIN, KEY, "there"), KEY, "here", "with another token, or for another key"),
        (encode(JOIN, key_of("other"), "here"), KEY, "here", "with another token, or for another key"),
        (
            encode(JOIN, KEY, "here").replace(b"trainer", b"trayner"),
            KEY,
            "here",
            "with another token, or for another key",
        ),
        (json.dumps(body() | {"mac": 1}).encode(), KEY, "here", "it is not signed"),
        (json.dumps(body() | {"mac": "\ud800"}).encode(), KEY, "here", "with another token, or for another key"),
    ],
)
def test_message_not_signed_for_this_place_is_refused(wire: bytes, key: bytes | None, place: str, message: str) -> None:
    with pytest.raises(RendezvousStateError, match=message):
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
