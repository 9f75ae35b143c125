"""Frames with descriptors: whole or not at all, and a peer that went away is an end of file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from elasticlib.processes._wire import Channel, Message, room_for_descriptors, wait_for_change, wait_readable
from tests.signals import sent_by_another_thread
from tests.unit.untrusted import strange

LIMIT = 30.0
Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket whose peer is a channel."""
    bare, other = socket.socketpair()
    channel = Channel(other)
    yield bare, channel
    bare.close()
    channel.close()


def frame(message: Message, descriptors: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!II", len(body), descriptors) + body


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(messages=st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=4))
@example(messages=[{"path": os.fsdecode(b"/data/\xff\xfe, a name of no encoding")}])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_with_any_content_arrive_in_order(pair: Pair, messages: list[Message]) -> None:
    ours, theirs = pair

    assert all([ours.send(message) for message in messages])
    assert [theirs.receive() for _ in messages] == [(message, []) for message in messages]


def test_descriptors_arrive_as_copies_that_no_program_inherits(pair: Pair) -> None:
    ours, theirs = pair
    memory = os.memfd_create("sent")
    os.write(memory, b"content")
    ours.send({"op": "job"}, (memory,))
    os.close(memory)

    received = theirs.receive()

    assert received is not None
    (copy,) = received[1]
    try:
        assert os.pread(copy, 20, 0) == b"content"
        assert not os.get_inheritable(copy)
    finally:
        os.close(copy)


@pytest.mark.parametrize("count", [2, 253, 254, 506, 507, 2000])
def test_descriptors_stay_with_their_frame_though_one_message_takes_253(pair: Pair, count: int) -> None:
    ours, theirs = pair
    ours.send({"frame": 1}, (0, 1) * (count // 2) + (0,) * (count % 2))
    ours.send({"frame": 2}, (0,))

    received = [theirs.receive(), theirs.receive()]

    found = [(each[0]["frame"], len(each[1])) for each in received if each is not None]
    first, last = os.fstat(0), [os.fstat(each[1][-1]) for each in received if each is not None]
    for each in received:
        for descriptor in each[1] if each is not None else ():
            os.close(descriptor)
    assert found == [(1, count), (2, 1)]
    assert last[1] == first
    assert (last[0] == first) == (count % 2 == 1 or os.fstat(1) == first)


def test_more_descriptors_than_any_frame_holds_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"a frame can carry at most [0-9]+ descriptors, not 65537"):
        pair[0].send({}, (0,) * 65537)


def test_a_frame_larger_than_the_sockets_buffer_arrives(pair: Pair) -> None:
    ours, theirs = pair
    message = {"text": "x" * 3_000_000}
    sender = threading.Thread(target=ours.send, args=(message,), daemon=True)
    sender.start()

    received = theirs.receive()
    sender.join(LIMIT)

    assert received == (message, [])


def test_frame_that_arrives_byte_by_byte_is_assembled(raw: tuple[socket.socket, Channel]) -> None:
    bare, channel = raw

    def dribble() -> None:
        for byte in frame({"op": "ready"}):
            bare.sendall(bytes([byte]))

    sender = threading.Thread(target=dribble, daemon=True)
    sender.start()
    received = channel.receive()
    sender.join(LIMIT)

    assert received == ({"op": "ready"}, [])


@pytest.mark.parametrize("length", [0, 3, 8, 12])
def test_peer_that_closes_within_a_frame_is_an_end_of_file(raw: tuple[socket.socket, Channel], length: int) -> None:
    bare, channel = raw
    bare.sendall(frame({"op": "ready"})[:length])
    bare.close()

    assert channel.receive() is None


@given(strange)
@example(b"1")
@example(b"\xff")
def test_invalid_frame_and_all_that_follows_are_an_end_of_file(content: bytes) -> None:
    bare, other = socket.socketpair()
    channel = Channel(other)
    bare.sendall(struct.pack("!II", len(content), 0) + content + frame({"op": "ready"}))

    received = [channel.receive(), channel.receive()]

    bare.close()
    channel.close()
    assert received == [None, None] or (isinstance(received[0], tuple) and isinstance(received[0][0], dict))


def test_a_frame_that_is_larger_than_any_is_an_end_of_file(raw: tuple[socket.socket, Channel]) -> None:
    bare, channel = raw
    bare.sendall(struct.pack("!II", 2**32 - 1, 0) + b"{}")

    assert channel.receive() is None


def test_descriptors_of_a_frame_that_was_cut_off_are_closed(raw: tuple[socket.socket, Channel]) -> None:
    bare, channel = raw
    socket.send_fds(bare, [frame({"op": "job"}, 2)[:10]], [0, 1])
    bare.close()
    before = open_descriptors()

    assert channel.receive() is None
    assert open_descriptors() == before


def test_frames_that_were_sent_before_the_end_are_still_received(pair: Pair) -> None:
    ours, theirs = pair
    ours.send({"op": "exited"})
    ours.close()

    received = [theirs.receive(), theirs.receive()]

    assert received == [({"op": "exited"}, []), None]


def test_sending_to_a_closed_peer_raises_no_error(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()

    assert ours.send({"op": "stop"}) is False


def test_peer_that_closes_with_unread_frames_is_an_end_of_file(pair: Pair) -> None:
    ours, theirs = pair
    ours.send({"op": "stop"})
    theirs.close()

    assert ours.receive() is None


def test_lost_descriptors_are_an_error_unless_not_needed(raw: tuple[socket.socket, Channel]) -> None:
    bare, channel = raw
    bare.sendall(2 * frame({"op": "exited"}, 2))

    with pytest.raises(OSError):
        channel.receive()
    assert channel.receive(whole=False) == ({"op": "exited"}, [])


@pytest.fixture
def full() -> Iterator[int]:
    """This program has as many files open as its soft limit lets it; that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    yield 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_limit_of_open_files_does_not_limit_a_frame(pair: Pair, full: int) -> None:
    ours, theirs = pair
    ours.send({"op": "exited"}, (0, 1, 2))

    received = theirs.receive()

    assert received is not None
    for descriptor in received[1]:
        os.close(descriptor)
    assert len(received[1]) == 3
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == full


def test_soft_limit_is_put_back_by_the_last_that_needs_room(full: int) -> None:
    with room_for_descriptors(1):
        with room_for_descriptors(1):
            pass
        os.close(os.dup(0))

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == full
    with pytest.raises(OSError):
        os.dup(0)


def test_a_limit_that_the_program_sets_meanwhile_stays(full: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    with room_for_descriptors(1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (full + 1, hard))

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == full + 1


def test_no_limit_is_changed_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: pytest.fail("a limit was set"))

    with room_for_descriptors(8):
        pass


def test_a_closed_channel_has_no_descriptor(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()

    assert pair[0].fileno() == -1


def test_a_channel_takes_over_a_descriptor(pair: Pair) -> None:
    ours, theirs = pair
    adopted = Channel.adopt(os.dup(theirs.fileno()))
    adopted.send({"op": "ready"})
    adopted.close()

    assert ours.receive() == ({"op": "ready"}, [])


def test_only_what_is_readable_is_found(pair: Pair) -> None:
    ours, theirs = pair
    ours.send({})

    assert wait_readable([ours, theirs], 0) == wait_readable([theirs.fileno()], LIMIT) == {theirs.fileno()}
    assert wait_readable([ours], 0) == set()


def test_closed_peer_is_readable(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()

    assert wait_readable([ours], None) == {ours.fileno()}


def test_a_wait_may_be_longer_than_the_kernel_can_count(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send({})

    assert wait_readable([ours], math.inf) == wait_readable([ours], 1e10) == {ours.fileno()}


@contextlib.contextmanager
def handled(signum: signal.Signals, handler: Callable[[], object]) -> Iterator[None]:
    former = signal.signal(signum, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signum, former)


def test_a_signal_that_another_thread_got_is_handled_in_a_wait() -> None:
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    with handled(signal.SIGUSR1, lambda: os.eventfd_write(descriptor, 1)), sent_by_another_thread(signal.SIGUSR1):
        assert {descriptor} == wait_readable([descriptor], 60.0)
    os.close(descriptor)


def test_a_signal_that_another_thread_got_ends_a_wait_for_a_change() -> None:
    received: list[bool] = []
    changed = threading.Condition()
    with changed, handled(signal.SIGUSR1, lambda: received.append(True)), sent_by_another_thread(signal.SIGUSR1):
        assert wait_for_change(changed, lambda: bool(received), 60.0)


def test_a_wait_for_a_change_ends_at_its_limit() -> None:
    changed = threading.Condition()
    with changed:
        assert not wait_for_change(changed, lambda: False, 0.01)
        assert not wait_for_change(changed, lambda: False, 0.0)
