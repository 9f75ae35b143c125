"""The fault handler's stacks as frames, against those that this Python writes; and ranks in words."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

import elasticlib
from elasticlib.stacks import (
    Frame,
    crash_frames,
    frame_of,
    is_heading,
    is_ours,
    is_users,
    number_ranges,
    ranks_text,
    threads_of,
)


def own_stacks() -> str:
    """Return the stacks of this process, in which another thread waits."""
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        found = file.read()
    may_end.set()
    thread.join()
    return found


def test_each_thread_has_its_identity_and_frames() -> None:
    *others, main = threads_of(own_stacks())

    assert (True, threading.get_ident()) == (main.is_current, main.identity)
    assert ("own_stacks", __file__) == (main.frames[0].function, main.frames[0].file)
    assert any(frame.function == "wait" for thread in others for frame in thread.frames)


def test_the_threads_make_up_the_text() -> None:
    stacks = own_stacks()

    assert stacks == "".join(thread.text for thread in threads_of(stacks))


def test_crash_is_the_current_thread_with_the_innermost_frame_last() -> None:
    assert "own_stacks" == crash_frames(own_stacks())[-1].function


def test_lines_are_headings_frames_or_neither() -> None:
    heading, first, *_ = own_stacks().splitlines()

    assert (True, False) == (is_heading(heading), is_heading(first))
    assert frame_of(heading) is None
    assert Frame("a.py", 7, "f") == frame_of('  File "a.py", line 7 in f')


def test_text_without_a_stack_has_no_threads() -> None:
    assert () == threads_of("Traceback (most recent call last):") == crash_frames("")


def test_files_are_the_users_unless_they_are_a_librarys_or_ours() -> None:
    assert (True, False) == (is_users("/home/me/train.py"), is_users(threading.__file__))
    assert (False, True, False) == (is_users(elasticlib.__file__), is_ours(elasticlib.__file__), is_ours("/train.py"))


# Ranks in words.


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        ([5, 5], "rank 5"),
        (range(1000), "ranks 0-999"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "ranks 0, 2, 4 ... 16 (9 ranks)"),
    ],
)
def test_neighbours_stand_as_a_range(ranks: list[int], text: str) -> None:
    assert text == ranks_text(ranks)


def test_ranks_have_the_noun_that_is_given() -> None:
    assert ("local rank 0", "local ranks 0, 2") == (ranks_text([0], "local rank"), ranks_text([0, 2], "local rank"))


def test_numbers_alone_are_written_as_the_kernel_does() -> None:
    assert ("", "0-3,8") == (number_ranges([]), number_ranges([8, 3, 2, 1, 0], ","))
