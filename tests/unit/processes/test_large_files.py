"""Files of ours under the user's limit of a file's size."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
from collections.abc import Iterator
from unittest import mock

import pytest

from elasticlib.processes import _large_files
from elasticlib.processes._large_files import (
    content_of_files,
    content_of_memory,
    descriptors_of_memories,
    files_with_content,
    room_for_file,
    write_exactly,
)
from elasticlib.workers.child import _report

_FSIZE = resource.RLIMIT_FSIZE
CONTENT = bytes(range(256)) * 40
LIMIT = 4096


# As decorators: when pytest reports a test, fixtures still stand, and its own output may be a longer file.


@contextlib.contextmanager
def soft_limit() -> Iterator[None]:
    """4096 bytes, which this process may raise again."""
    former = resource.getrlimit(_FSIZE)
    resource.setrlimit(_FSIZE, (LIMIT, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(_FSIZE, former)


@contextlib.contextmanager
def hard_limit() -> Iterator[None]:
    """As of a process that may not."""
    with soft_limit(), mock.patch.object(_large_files, "_raise_limit", lambda hard, size: float(LIMIT)):
        yield


@contextlib.contextmanager
def files(descriptors: list[int]) -> Iterator[list[int]]:
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@soft_limit()
def test_a_file_is_larger_than_the_soft_limit_which_is_put_back() -> None:
    former = resource.getrlimit(_FSIZE)
    with files(files_with_content(CONTENT, "test")) as made:
        assert 1 == len(made)
        assert CONTENT == content_of_files(made)
    assert former == resource.getrlimit(_FSIZE)


@soft_limit()
def test_the_limit_is_put_back_after_a_failure() -> None:
    former = resource.getrlimit(_FSIZE)
    with pytest.raises(ZeroDivisionError), room_for_file(math.inf):
        raise ZeroDivisionError

    assert former == resource.getrlimit(_FSIZE)


@hard_limit()
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, len(CONTENT)])
def test_content_is_in_several_files_where_one_may_not_have_it(size: int) -> None:
    with files(files_with_content(CONTENT[:size], "test")) as made:
        assert max(1, math.ceil(size / 4096)) == len(made)
        assert CONTENT[:size] == content_of_files(made)


@hard_limit()
def test_one_file_without_room_is_an_error() -> None:
    with files(files_with_content(b"", "test")) as (descriptor,), pytest.raises(OSError, match="ulimit -f") as caught:
        write_exactly(descriptor, CONTENT)

    assert errno.EFBIG == caught.value.errno


@hard_limit()
def test_a_report_is_found_in_several_files() -> None:
    report = _report.Report("result", CONTENT)

    with files(_report.report_files(report)) as made:
        assert len(made) > 1
        assert report == _report.read_report(*made)
        assert _report.read_report(*made[:-1]) is None


@hard_limit()
def test_content_passed_to_workers_is_found_by_its_name() -> None:
    memories = descriptors_of_memories({"function": CONTENT, "definitions": b"short"})

    with files(list(memories.values())):
        assert len(memories) > 2
        assert CONTENT == content_of_memory("function", memories)
        assert b"short" == content_of_memory("definitions", memories)


@hard_limit()
def test_no_more_of_stderr_is_noted_than_the_file_may_have() -> None:
    with files(files_with_content(b"", "note")) as (note,):
        noted = _report.NotedFile(note)
        for number in range(3000):
            noted._keep(f"line {number}\n".encode())

        text = _report.read_text(note)
    assert len(text) <= 4096
    assert text.endswith("line 2999\n")
