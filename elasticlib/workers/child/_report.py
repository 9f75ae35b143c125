"""
What a worker leaves behind: its return value or its exception, and its last lines, in memory that outlives it.

Each worker gets an anonymous file. It writes one report there; the head comes last, so a report
is whole or absent even when a SIGKILL falls in the middle. Its launcher reads it after the worker's
end: no pipe that fills, no reader to wait for, any size.

The same facts go to ``TORCHELASTIC_ERROR_FILE`` in torch's JSON form for tools that read it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps
from typing import Any

from elasticlib import processes
from elasticlib._clock import wall_time
from elasticlib._untrusted import exactly, parse
from elasticlib.processes import (
    content_of_files,
    files_with_content,
    make_private_folder,
    read_exactly,
    room_for_file,
    write_exactly,
)
from elasticlib.workers.child import _frame_values

_HEAD = struct.Struct("!8sQQ")
_MOST_TEXT = 65536
_MOST_READ = 2**24
_MOST_NOTED = 32768
"""Bytes that the note of stderr may have; half of it, the newer, stays when it is full."""
_MOST_FILES = 16384
"""The highest number for a descriptor: each fork copies a table of that size."""
_MAGIC = b"elastic1"
has_the_stacks_of_crashes = False
"""Whether this process is a worker whose fault handler writes for the report."""

# Names and phrases with which torch, gloo and NCCL say that a *peer* went away.
_SECONDARY_TYPES = frozenset({"DistNetworkError", "DistStoreError", "DistBackendError"})
_CHANNELS = re.compile(r"/torch/(distributed|multiprocessing)/|/multiprocessing/")
"""Code that reads from a peer: an end of file elsewhere is that of a file."""
_SECONDARY_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|socket (closed|timeout)"
    r"|remote process exited|pair closure|transport retry counter|unhandled system error|ncclRemoteError",
    re.IGNORECASE,
)
_DEVICE_TYPES = frozenset({"OutOfMemoryError", "AcceleratorError", "DistError"})
"""Classes of torch for errors of devices, of collectives and of stores; or a base of these."""
_DEVICE_TEXT = re.compile(
    r"\b(CUDA|HIP|XPU|cuDNN) (error|driver)|\b(NCCL|RCCL|CUDNN|CUBLAS|CUFFT|CUSOLVER|CUSPARSE)|No CUDA GPUs"
    r"|gloo|timed? ?out|out of memory|can't allocate memory|shared memory|DataLoader worker .* (killed|exited)"
)
"""Phrases of what torch raises as a plain RuntimeError for them, or for what the system did not give."""


@dataclass(frozen=True)
class Report:
    """One worker's last word."""

    kind: str
    """``result`` or ``error``."""
    payload: bytes
    """The pickled return value, or the pickled exception; empty when it could not be pickled."""
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    timestamp: float = 0.0
    """Unix seconds with fraction."""
    secondary: bool = False
    frames: str = "[]"
    """Those of the exception, in JSON: ``[[file, line, function, {variable: text}], ...]``."""
    external: bool = False
    """True when a peer, a device or the system caused the exception."""
    is_shown: bool = False
    """True when the worker is about to write the traceback to its stderr."""


_FACTS: dict[str, type] = {
    "kind": str,
    "exception_type": str,
    "message": str,
    "traceback": str,
    "timestamp": float,
    "secondary": bool,
    "frames": str,
    "external": bool,
    "is_shown": bool,
}
"""What is written of it besides the payload, each of just this type."""


def identity(descriptor: int) -> tuple[int, int]:
    """What tells the file behind *descriptor* from any other; (0, 0) when it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def reopened(descriptor: int, expected: tuple[int, int], owner: int) -> int:
    """
    *descriptor* if it still is the file *expected*, else the same memory opened through process *owner*.

    User code may close every descriptor it finds, and open files of its own under their numbers. Raises
    OSError when the memory is out of reach.
    """
    if identity(descriptor) == expected:
        return descriptor
    found = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if identity(found) != expected:
        os.close(found)
        raise OSError(f"descriptor {descriptor}, where the launcher awaits this worker's report, was closed")
    return found


def moved_up(descriptor: int) -> int:
    """
    Move *descriptor* to a number that no file of the program will get, and return it; stay where none can be had.

    User code may close every descriptor it finds. The kernel gives new ones numbers below the soft limit of open files,
    the lowest that is free: so this one goes above the limit, or, where the hard limit or a table of that size does not
    allow it, far up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    above = soft != hard and soft <= _MOST_FILES
    least = soft if above else min(soft - 1, _MOST_FILES)
    try:
        if above:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, hard))
        try:
            moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
        finally:
            if above:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return descriptor
    os.close(descriptor)
    return moved


def write_report(descriptor: int, report: Report) -> None:
    """Put *report* into the file *descriptor*; it can be read once this returns, whatever happens then."""
    head, facts = _head_and_facts(report)
    with room_for_file(len(head) + len(facts) + len(report.payload)):
        write_exactly(descriptor, facts, len(head))
        write_exactly(descriptor, report.payload, len(head) + len(facts))
        # The head comes last: a report is whole or absent, wherever a SIGKILL falls.
        write_exactly(descriptor, head, 0)


def report_files(report: Report) -> list[int]:
    """New files for `read_report`: one, or several where a limit of size leaves no room. The caller closes them."""
    descriptor = processes.anonymous_file("report")
    try:
        write_report(descriptor, report)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EFBIG:
            raise
        return files_with_content(packed_report(report), "report")
    return [descriptor]


def packed_report(report: Report) -> bytes:
    """*report* as `read_report` finds it in one file, or in several that have it in parts."""
    return b"".join((*_head_and_facts(report), report.payload))


def _head_and_facts(report: Report) -> tuple[bytes, bytes]:
    facts = dumps({name: getattr(report, name) for name in _FACTS}).encode()
    return _HEAD.pack(_MAGIC, len(facts), len(report.payload)), facts


def read_report(descriptor: int, *more: int) -> Report | None:
    """
    The report in the file *descriptor*; None when the worker left none, not a whole one, or wrote over it.

    A limit of a file's size may have left it in *more* files.
    """
    if more:
        content = content_of_files((descriptor, *more))
        return _parsed(len(content), lambda size, offset: content[offset : offset + size])
    return _parsed(os.fstat(descriptor).st_size, lambda size, offset: read_exactly(descriptor, size, offset))


def _parsed(whole: int, part: Callable[[int, int], bytes]) -> Report | None:
    """Return the report of *whole* bytes, of which *part* gives some, by number and place."""
    if whole < _HEAD.size:
        return None
    magic, facts_size, payload_size = _HEAD.unpack(part(_HEAD.size, 0))
    is_complete = _HEAD.size + facts_size + payload_size <= whole
    if magic != _MAGIC or not is_complete:
        return None
    try:
        facts = _checked_facts(parse(part(facts_size, _HEAD.size)))
        payload = part(payload_size, _HEAD.size + facts_size)
    except (ValueError, EOFError, MemoryError):
        return None
    return Report(payload=payload, **facts)


def _checked_facts(facts: object) -> dict[str, Any]:
    """Return *facts* if they are those of a report; raise ValueError otherwise."""
    if not isinstance(facts, dict) or facts.keys() != _FACTS.keys():
        raise ValueError("these are no facts of a report")
    return {name: exactly(facts[name], kind) for name, kind in _FACTS.items()}


def read_text(descriptor: int) -> str:
    """The text in a file; of one that somebody made larger than any text of ours, the beginning."""
    size = min(os.fstat(descriptor).st_size, _MOST_READ)
    return read_exactly(descriptor, size).decode(errors="replace")


def qualified_name(kind: type) -> str:
    """Return the name by which tracebacks call a class."""
    if kind.__module__ in ("builtins", "__main__", "__mp_main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_secondary(error: BaseException) -> bool:
    """Whether *error* says no more than that the connection to a peer was lost."""
    if type(error).__name__ in _SECONDARY_TYPES or isinstance(error, ConnectionError):
        return True
    if isinstance(error, EOFError):
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
        return any(_CHANNELS.search(frame.filename) for frame in frames)
    return isinstance(error, RuntimeError) and _SECONDARY_TEXT.search(text_of_exception(error)) is not None


def is_external(error: BaseException) -> bool:
    """True if a peer, a device or the system caused *error*, or an error that it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, (OSError, MemoryError)) or is_secondary(each) or _is_of_device(each):
            return True
        seen.add(id(each))
        each = _raised_from(each)
    return False


def _raised_from(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _is_of_device(error: BaseException) -> bool:
    if any(kind.__name__ in _DEVICE_TYPES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_TEXT.search(text_of_exception(error)) is not None


def text_of_exception(error: BaseException) -> str:
    """The text of an exception, whatever its class makes of it."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def _cut(text: str) -> str:
    """*text*, or its beginning and end where it is longer than anybody reads."""
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def report_of_exception(error: BaseException, pickled: bytes, formatted: str | None = None) -> Report:
    """The report of an exception that ended a worker."""
    name = qualified_name(type(error))
    text = text_of_exception(error)
    return Report(
        kind="error",
        payload=pickled,
        exception_type=name,
        message=_cut(f"{name}: {text}" if text else name),
        traceback=_cut(formatted if formatted is not None else "".join(traceback.format_exception(error))),
        timestamp=wall_time(),
        secondary=is_secondary(error),
        external=is_external(error),
        frames=_frame_values.of(error.__traceback__),
    )


def error_file_content(report: Report) -> dict[str, Any]:
    """
    *report* in torch's JSON form.

    The seconds are whole since torch's readers take nothing else; the fraction stands beside them.
    """
    extra = {
        "py_callstack": report.traceback,
        "timestamp": str(int(report.timestamp)),
        "timestamp_fraction": report.timestamp % 1,
    }
    return {"message": {"message": report.message, "extraInfo": extra}}


def write_json(path: str, content: Any) -> None:
    """Write *content* to *path* so that a reader sees all of it or the former file; a missing folder is made anew."""
    folder = os.path.dirname(path) or "."
    make_private_folder(folder)
    temporary = os.path.join(folder, f".error{os.urandom(8).hex()}")
    # Not a private file, as tempfile makes: who else may read it is the user's umask to say.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        text = dumps(content)
        with room_for_file(len(text)), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class NotedFile(io.FileIO):
    """
    Descriptor 2, with a copy of what Python writes to it in a file.

    The stream itself goes where it always went, so that a terminal stays a terminal and the order of lines
    stays what it was. Native code that writes to descriptor 2 by itself is not noted: it can be read on the console,
    or in the file where stderr is redirected.
    """

    def __init__(self, note: int) -> None:
        super().__init__(2, "wb", closefd=False)
        self.name = "<stderr>"
        self._note = note
        self._identity = identity(note)
        self._size = 0

    def write(self, data: Any, /) -> int:
        """Write *data* to stderr, then note it: an error of the stream is the writer's, one of the note nobody's."""
        count = super().write(data)
        # The user's code may have closed all descriptors, and opened a file of its own under this number.
        if identity(self._note) == self._identity:
            self._keep(bytes(memoryview(data)[:count])[-_MOST_NOTED // 2 :])
        return count

    def _keep(self, data: bytes) -> None:
        with room_for_file(_MOST_NOTED) as most:
            room = int(min(_MOST_NOTED, most))
            if self._size + len(data) > room:
                data = (os.pread(self._note, _MOST_NOTED, 0) + data)[-room // 2 :] if room else b""
                self._size = 0
                os.ftruncate(self._note, len(data))
            self._size += os.pwrite(self._note, data, self._size)


def note_stderr(note: int) -> None:
    """Have ``sys.stderr`` noted in the file *note*; it looks as it did before."""
    former = sys.stderr
    if former is None:
        return
    file = NotedFile(note)
    stream: Any = io.TextIOWrapper(
        # Without a buffer, as with python -u.
        file,
        encoding=former.encoding,
        errors=former.errors,
        line_buffering=file.isatty(),
        write_through=True,
    )
    stream.mode = "w"
    sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
