"""The coordinator's document in a launcher's memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from elasticlib.rendezvous.stores import _kept_document
from elasticlib.rendezvous.stores._kept_document import KeptDocument


@pytest.fixture
def document() -> Iterator[KeptDocument]:
    document = KeptDocument()
    yield document
    document.close()


def test_another_process_reads_what_was_saved_last(document: KeptDocument) -> None:
    other = KeptDocument(os.dup(document.fileno()))
    assert other.load() is None
    for size in (10, 3, 5000, 4999, 20, 0, 7):
        document.save(b"x" * size)
        assert (b"x" * size or None) == other.load()

    document.purge()

    assert other.load() is None
    other.close()


def test_a_writer_that_dies_before_it_is_done_leaves_the_last_document(
    document: KeptDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any length of the one that it did not finish."""
    write = _kept_document.write_exactly

    def die(descriptor: int, data: bytes, offset: int = 0) -> None:
        if not offset:
            raise KeyboardInterrupt
        write(descriptor, data, offset)

    for size in (1, 16, 100, 5000):
        document.save(b"last" * size)
        with monkeypatch.context() as patch:
            patch.setattr(_kept_document, "write_exactly", die)
            for length in (1, 4 * size, 9000):
                with pytest.raises(KeyboardInterrupt):
                    document.save(b"new!" * length)
                assert b"last" * size == document.load()


def test_its_memory_does_not_grow_with_the_number_of_documents(document: KeptDocument) -> None:
    for size in range(100, 1000):
        document.save(b"x" * size)

    assert 4 * 1000 > os.fstat(document.fileno()).st_size


def test_nothing_is_kept_where_a_limit_of_a_files_size_leaves_no_room(
    document: KeptDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    document.save(b"old")
    write = _kept_document.write_exactly

    def write_little(descriptor: int, data: bytes, offset: int = 0) -> None:
        if offset + len(data) > 100:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        write(descriptor, data, offset)

    monkeypatch.setattr(_kept_document, "write_exactly", write_little)

    document.save(b"x" * 200)

    assert document.load() is None
