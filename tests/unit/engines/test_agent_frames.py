"""Frames between a client and its agents, in any parts, and bytes that are not frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from elasticlib.engines._agent_frames import LARGEST, MAGIC, FrameReader, Kind, frame

FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=50)))
GREETINGS = st.binary(max_size=50).filter(lambda text: MAGIC not in text)


@given(FRAMES, st.lists(st.integers(0, 400)), GREETINGS)
def test_frames_arrive_whole_in_any_parts(frames: list[tuple[Kind, bytes]], cuts: list[int], greeting: bytes) -> None:
    reader = FrameReader(greeted=True)
    data = greeting + MAGIC + b"".join(frame(kind, each) for kind, each in frames)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    read = [each for start, end in itertools.pairwise(places) for each in reader.feed(data[start:end])]

    assert frames == read


@given(st.binary(min_size=1, max_size=100))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        FrameReader(greeted=False).feed(data)
    except ValueError as error:
        assert str(error)


def test_frame_that_is_too_large_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="more than the maximum"):
        frame(Kind.RESULT, bytes(LARGEST + 1))
    with pytest.raises(ValueError, match="larger than the maximum"):
        FrameReader(greeted=False).feed(bytes([Kind.RESULT]) + (LARGEST + 1).to_bytes(8, "big"))


def test_machine_that_never_starts_an_agent_is_refused() -> None:
    with pytest.raises(ValueError, match="other text than an agent's: 'xxx"):
        FrameReader(greeted=True).feed(b"x" * 2**17)


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (MAGIC, r"begins with .*elasti.*: use FrameReader\(greeted=True\)"),
        (b"Welcome to host", "begins with b'Welcome t': nothing but the agent may write to its output"),
    ],
)
def test_other_bytes_than_frames_are_shown_with_the_fix(data: bytes, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        FrameReader(greeted=False).feed(data)
