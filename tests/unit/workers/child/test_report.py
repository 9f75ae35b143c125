"""A worker's last word: whole or absent, of any size; and the error file that other tools read."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib.processes._large_files import read_exactly
from elasticlib.workers.child import _record, _report
from elasticlib.workers.child._report import (
    Report,
    is_external,
    is_secondary,
    qualified_name,
    read_report,
    report_of_exception,
    write_report,
)
from tests.unit.untrusted import spoiled, strange


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("report")
    yield descriptor
    os.close(descriptor)


REPORTS = st.builds(
    Report,
    st.sampled_from(["result", "error"]),
    st.binary(max_size=300),
    st.text(max_size=30),
    st.text(max_size=300),
    st.text(max_size=300),
    st.floats(0, 1e11),
    st.booleans(),
)


FACTS = json.dumps(
    {"kind": "error", "exception_type": "E", "message": "E: x", "traceback": "", "timestamp": 1.5, "secondary": False}
).encode()


@given(REPORTS)
def test_written_report_is_read_back(report: Report) -> None:
    descriptor = os.memfd_create("report")
    try:
        write_report(descriptor, report)
        found = read_report(descriptor)
    finally:
        os.close(descriptor)

    assert found == report


def test_writes_that_the_kernel_cuts_short_are_continued(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda number, data, offset: plain(number, bytes(data[:7]), offset))
    report = Report("error", b"payload", "ValueError", "a bad value", "Traceback", 1.5, True)

    write_report(memory, report)

    assert read_report(memory) == report


def test_a_worker_that_wrote_nothing_left_no_report(memory: int) -> None:
    assert read_report(memory) is None


@pytest.mark.parametrize("survives", range(3))
def test_a_report_that_was_cut_off_is_absent(memory: int, survives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = os.pwrite, [survives]

    def dies(number: int, data: Any, offset: int) -> int:
        if not left[0]:
            raise InterruptedError("killed")
        left[0] -= 1
        return plain(number, data, offset)

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(InterruptedError):
        write_report(memory, Report("result", b"payload"))

    assert read_report(memory) is None


def test_bytes_that_are_missing_are_an_error(memory: int) -> None:
    os.pwrite(memory, b"abc", 0)

    with pytest.raises(EOFError, match="is 2 bytes shorter"):
        read_exactly(memory, 5)


# The memory that a worker lost and finds again.


@pytest.fixture
def owner(memory: int) -> Iterator[int]:
    """A process that holds the memory under the same number."""
    os.set_inheritable(memory, True)
    sleep = shutil.which("sleep") or "sleep"
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_file_has_a_stable_identity_different_from_others(memory: int) -> None:
    other, copy = os.memfd_create("other"), os.dup(memory)

    found = [_report.identity(each) for each in (memory, copy, other)]
    os.close(other)
    os.close(copy)

    assert found[0] == found[1] != found[2]
    assert _report.identity(copy) == (0, 0)


def test_memory_that_is_still_there_is_not_looked_for(memory: int) -> None:
    before = open_descriptors()

    found = _report.reopened(memory, _report.identity(memory), owner=0)

    assert found == memory
    assert open_descriptors() == before


@pytest.mark.parametrize("reused", [False, True])
def test_memory_whose_descriptor_was_closed_is_found_through_its_owner(memory: int, owner: int, reused: bool) -> None:
    expected, kept, users = _report.identity(memory), os.dup(memory), os.memfd_create("of the user")
    os.close(memory)
    if reused:
        os.dup2(users, memory)

    found = _report.reopened(memory, expected, owner)
    write_report(found, Report("result", b"payload"))
    os.dup2(kept, memory)  # for the fixture to close
    sizes = os.fstat(kept).st_size, os.fstat(users).st_size
    for descriptor in {found, kept, users} - {memory}:
        os.close(descriptor)

    assert read_report(memory) == Report("result", b"payload")
    assert sizes[0] > 0 and sizes[1] == 0


def test_memory_that_its_owner_has_lost_too_is_an_error(memory: int, owner: int) -> None:
    before = open_descriptors()

    with pytest.raises(OSError, match="this worker reports to the launcher, was closed"):
        _report.reopened(memory, (1, 1), owner)
    assert open_descriptors() == before


def test_memory_of_an_ended_owner_raises_an_error(memory: int) -> None:
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)

    with pytest.raises(OSError, match=str(ended)):
        _report.reopened(memory, (1, 1), ended)


# What an exception says.


class TroubleError(Exception):
    pass


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_exception_is_reported_with_type_message_and_traceback() -> None:
    report = report_of_exception(raised(ValueError("a bad value")), b"pickled")

    assert (report.kind, report.payload) == ("error", b"pickled")
    assert (report.exception_type, report.message) == ("ValueError", "ValueError: a bad value")
    assert "in raised\n    raise error\n" in report.traceback
    assert report.timestamp > 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ValueError, "ValueError"),
        (TroubleError, f"{__name__}.TroubleError"),
        (json.JSONDecodeError, "json.decoder.JSONDecodeError"),
        (type("TroubleError", (Exception,), {"__module__": "__main__"}), "TroubleError"),
    ],
    ids=["builtin", "module", "package", "main"],
)
def test_an_exception_is_called_by_its_module_and_type(kind: type[BaseException], name: str) -> None:
    assert qualified_name(kind) == name


def test_an_exception_without_a_text_is_called_by_its_type() -> None:
    assert report_of_exception(ValueError(), b"").message == "ValueError"


def test_exception_whose_str_raises_is_reported() -> None:
    assert report_of_exception(WordlessError(), b"").exception_type.endswith("WordlessError")


def error_of(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing")


def closed_pipe() -> Connection:
    ours, theirs = Pipe()
    theirs.close()
    return ours


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        error_of(lambda: closed_pipe().recv()),
        type("DistNetworkError", (RuntimeError,), {})("timed out"),
        RuntimeError("[/pytorch/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("Connection was reset"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_a_lost_connection_to_a_peer_is_secondary(error: BaseException) -> None:
    assert is_secondary(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("connection closed by peer"),
        RuntimeError("CUDA out of memory"),
        OSError("no space left"),
        KeyError("connection reset"),
        error_of(lambda: pickle.loads(b"")),  # such as a checkpoint that is cut off
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_any_other_failure_is_primary(error: BaseException) -> None:
    assert not is_secondary(error)


def raised_from(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except Exception as error:
            raise ValueError("the data cannot be loaded") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("data.csv"),
        MemoryError(),
        RuntimeError("[../third_party/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1"),
        type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})("NCCL error in: x.cpp:1"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        raised_from(OSError("no space left")),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_an_error_of_a_peer_a_device_or_the_system_is_external(error: BaseException) -> None:
    assert is_external(error)
    assert report_of_exception(error, b"").external


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: it says"),
        KeyError("gloo"),
        AssertionError(),
        RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        raised_from(KeyError("label")),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_an_error_of_the_program_is_not_external(error: BaseException) -> None:
    assert not is_external(error)
    assert not report_of_exception(error, b"").external


def test_a_circle_of_causes_is_followed_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    assert not is_external(first)


# The error file.


def write_error_file(path: str, report: Report) -> None:
    """Write the error file as a worker does whose launcher named *path*."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_record.VARIABLE, path)
        _record.leave(report)


def test_the_error_file_has_torchs_form(tmp_path: Path) -> None:
    path = tmp_path / "error.json"

    write_error_file(str(path), Report("error", b"", "ValueError", "ValueError: bad", "Trace", 1234.75))

    assert json.loads(path.read_text()) == {
        "message": {
            "message": "ValueError: bad",
            "extraInfo": {"py_callstack": "Trace", "timestamp": "1234", "timestamp_fraction": 0.75},
        }
    }


def test_the_first_error_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("of an earlier failure")

    write_error_file(str(path), Report("error", b""))

    assert path.read_text() == "of an earlier failure"


@pytest.mark.parametrize("former", [None, "former"])
def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path: Path, former: str | None) -> None:
    path = tmp_path / "error.json"
    if former is not None:
        path.write_text(former)

    with pytest.raises(TypeError):
        _report.write_json(str(path), {"message": "begins well", "then": object()})

    assert [each.read_text() for each in tmp_path.iterdir()] == ([] if former is None else [former])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_umask_decides_the_mode_of_the_error_file(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "error.json"
    former = os.umask(umask)
    try:
        write_error_file(str(path), Report("error", b""))
    finally:
        os.umask(former)

    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.slow
def test_torchs_own_reader_understands_the_error_file(tmp_path: Path) -> None:
    torchs = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")

    path = str(tmp_path / "error.json")
    report = report_of_exception(raised(ValueError("a bad value")), b"")
    write_error_file(path, report)

    failure = torchs.ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=path)

    assert failure.timestamp == int(report.timestamp)
    assert "ValueError: a bad value" in str(torchs.ChildFailedError("train.py", {1: failure}))


def test_a_missing_folder_of_the_error_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "gone" / "0"

    write_error_file(str(folder / "error.json"), Report("error", b""))

    assert (folder / "error.json").is_file()
    assert ["0o700", "0o700"] == [oct(each.stat().st_mode & 0o777) for each in (folder.parent, folder)]


@given(spoiled(FACTS) | strange, st.integers(0, 20), st.sampled_from([0, 1, 2**40, 2**63]))
def test_report_overwritten_by_a_worker_is_valid_or_none(facts: bytes, payload: int, more: int) -> None:
    descriptor = os.memfd_create("report")
    try:
        os.pwrite(descriptor, _report._HEAD.pack(_report._MAGIC, len(facts), payload + more), 0)
        os.pwrite(descriptor, facts + b"x" * payload, _report._HEAD.size)

        found = read_report(descriptor)
    finally:
        os.close(descriptor)

    assert found is None or (more == 0 and b"x" * payload == found.payload)


def test_a_memory_that_was_made_larger_than_any_is_read_in_part(memory: int) -> None:
    os.pwrite(memory, b"said", 0)
    os.ftruncate(memory, 2**50)

    assert _report.read_text(memory).startswith("said")
    os.pwrite(memory, _report._HEAD.pack(_report._MAGIC, 2**49, 4), 0)
    assert read_report(memory) is None


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_moved_descriptor_is_above_what_files_get(memory: int, limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))

    moved = _report.moved_up(os.dup(memory))

    assert (256, 256) == (moved, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert _report.identity(moved) == _report.identity(memory)
    assert not os.get_inheritable(moved)
    os.close(moved)


def test_a_descriptor_stays_where_no_other_is_free(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (memory, memory))

    def refuse(*_: int) -> int:
        raise OSError

    monkeypatch.setattr(fcntl, "fcntl", refuse)

    assert memory == _report.moved_up(memory)


def test_no_table_of_millions_is_made_for_it(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    requested = []
    monkeypatch.setattr(fcntl, "fcntl", lambda _, __, least: requested.append(least) or os.dup(memory))

    os.close(_report.moved_up(os.dup(memory)))

    assert [16384] == requested
