"""Anonymous files promise the same with and without the kernel's own ones."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import pytest

from elasticlib import processes
from elasticlib.processes import _memory_files


@pytest.fixture(params=["", "refused"], ids=["memfd", "no memfd"])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(processes.memfds, "_known", request.param)
    return str(request.param)


def check_file(descriptor: int) -> None:
    """It is empty, private, listed nowhere, not inherited, and may be written, mapped and opened again."""
    facts = os.fstat(descriptor)
    assert (facts.st_size, facts.st_nlink) == (0, 0)
    assert not os.get_inheritable(descriptor)
    os.pwrite(descriptor, b"text", 4096)
    assert os.fstat(descriptor).st_size == 4100
    with mmap.mmap(descriptor, 4100) as memory:
        memory[:3] = b"abc"
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    assert os.pread(again, 3, 0) == b"abc"
    os.ftruncate(again, 0)
    assert os.fstat(descriptor).st_size == 0
    os.close(again)


def test_file_is_private_and_unlisted(refusal: str) -> None:
    descriptor = processes.anonymous_file("name")
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)

    check_file(descriptor)

    os.close(descriptor)
    assert mode == (0o600 if refusal else 0o777)  # the kernel's own can be reached by nobody else at all


def test_sealed_file_can_be_read(refusal: str) -> None:
    descriptor = processes.sealable_file("name")
    os.pwrite(descriptor, b"text", 0)

    processes.seal(descriptor)

    assert os.pread(descriptor, 9, 0) == b"text"
    if not refusal:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"more", 0)
    os.close(descriptor)


def test_file_system_without_unlisted_files_gets_one_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As overlay file systems of old kernels."""
    plain = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)

    descriptor = _memory_files._unlisted_in(str(tmp_path))

    assert os.listdir(tmp_path) == []
    check_file(descriptor)
    os.close(descriptor)


def test_little_shared_memory_is_left_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(processes.memfds, "_known", "refused")
    monkeypatch.setattr(_memory_files, "_ENOUGH", 1 << 62)

    descriptor = processes.anonymous_file("name")

    assert os.fstat(descriptor).st_dev == tmp_path.stat().st_dev
    os.close(descriptor)


def test_folders_that_cannot_be_written_to_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_files, "_folders", lambda: ["/proc", "/no/such/folder", "/tmp"])

    os.close(_memory_files._unlisted_file())


def test_no_folder_at_all_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory_files, "_folders", list)

    with pytest.raises(OSError, match="set TMPDIR to a writable folder"):
        _memory_files._unlisted_file()


def test_kernel_support_is_tested_by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    here = processes.memfds.ask()
    monkeypatch.setattr(os, "memfd_create", refuse)

    assert (here, processes.memfds.ask()) == ("", "memfd_create: Function not implemented")
