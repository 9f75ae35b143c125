"""
A worker's report: its return value or its exception, and its last lines, in memory that outlives
it.

Each worker gets an anonymous file, and writes one report there. The head is written last, so a
report is whole or absent even after a SIGKILL in the middle. Its launcher reads it after the
worker's end: no pipe fills, no reader is needed, and any size fits.

The same facts are written to ``TORCHELASTIC_ERROR_FILE`` in torch's JSON form for tools that read
it.

Rules of this file: of a value in a frame, objects that are not Python's own are shown by their
class, tensors by their shape, and only the shown part of a large value is read. A frame that cannot
be described must not cause a failure.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import reprlib
import resource
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from json import dumps
from types import FrameType, TracebackType
from typing import Any

from elasticlib import processes
from elasticlib._clock import monotonic, wall_time
from elasticlib._untrusted import exactly, parse
from elasticlib.processes import (
    content_of_files,
    files_with_content,
    make_private_folder,
    read_exactly,
    room_for_file,
    write_exactly,
)

_HEAD = struct.Struct("!8sQQ")
_MOST_TEXT = 65536
_MOST_READ = 2**24
_MOST_NOTED = 32768
"""Most bytes of the copy of stderr; when it is full, the newer half stays."""
_MOST_FILES = 16384
"""The highest number for a descriptor: each fork copies a table as large as that."""
_MAGIC = b"elastic1"
_MOST_FRAMES = 60
_MOST_LOCALS = 60
_DESCRIBE_LIMIT = 0.5
"""Seconds after which no more variables are described."""
_PLAIN = (bool, float, complex, type(None))
_MOST_BITS = 4096
"""Bits of the largest integer that is shown: the text of a longer one takes long, or is refused."""

has_the_stacks_of_crashes = False
"""True in a worker whose fault handler writes for the report."""

# Names and phrases with which torch, gloo and NCCL report that a *peer* is gone.
_SECONDARY_TYPES = frozenset({"DistNetworkError", "DistStoreError", "DistBackendError"})
_CHANNELS = re.compile(r"/torch/(distributed|multiprocessing)/|/multiprocessing/")
"""Code that reads from a peer: an end of file elsewhere is that of a file."""
_SECONDARY_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|socket (closed|timeout)"
    r"|remote process exited|pair closure|transport retry counter|unhandled system error|ncclRemoteError",
    re.IGNORECASE,
)
_DEVICE_TYPES = frozenset({"OutOfMemoryError", "AcceleratorError", "DistError"})
"""Torch's classes for errors of devices, of collectives and of stores; or a base of these."""
_DEVICE_TEXT = re.compile(
    r"\b(CUDA|HIP|XPU|cuDNN) (error|driver)|\b(NCCL|RCCL|CUDNN|CUBLAS|CUFFT|CUSOLVER|CUSPARSE)|No CUDA GPUs"
    r"|gloo|timed? ?out|out of memory|can't allocate memory|shared memory|DataLoader worker .* (killed|exited)"
)
"""Phrases of torch's plain RuntimeErrors for the same, or for resources that the system refused."""


@dataclass(frozen=True)
class Report:
    """Report of one worker."""

    kind: str
    """``result`` or ``error``."""
    payload: bytes
    """The pickled return value, or the pickled exception; empty if it could not be pickled."""
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    timestamp: float = 0.0
    """Unix seconds with fraction."""
    secondary: bool = False
    frames: str = "[]"
    """Frames of the exception, in JSON: ``[[file, line, function, {variable: text}], ...]``."""
    external: bool = False
    """True if a peer, a device or the system caused the exception."""
    is_shown: bool = False
    """True if the worker is about to write the traceback to its stderr."""


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
"""Fields that are written besides the payload, each of exactly this type."""


def identity(descriptor: int) -> tuple[int, int]:
    """Return device and inode of the file behind *descriptor*; (0, 0) if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def reopened(descriptor: int, expected: tuple[int, int], owner: int) -> int:
    """
    Return *descriptor* if it still is the file *expected*, else the same memory opened through
    process *owner*.

    User code may close every descriptor it finds, and open files of its own under their numbers.
    Raises OSError if the memory is out of reach.
    """
    if identity(descriptor) == expected:
        return descriptor
    found = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if identity(found) != expected:
        os.close(found)
        raise OSError(f"file descriptor {descriptor}, through which this worker reports to the launcher, was closed")
    return found


def moved_up(descriptor: int) -> int:
    """
    Move *descriptor* to a number that no file of the program will get, and return it; unchanged
    without a free one.

    User code may close every descriptor it finds. The kernel gives new ones the lowest free
    number below the soft limit of open files. So this one is placed above the limit. If the hard
    limit or the size of the table does not allow that, it is placed far up.
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
    """
    Write *report* into the file *descriptor*; it can be read after this returns, even after a
    crash.
    """
    head, facts = _head_and_facts(report)
    with room_for_file(len(head) + len(facts) + len(report.payload)):
        write_exactly(descriptor, facts, len(head))
        write_exactly(descriptor, report.payload, len(head) + len(facts))
        # The head is written last: a report is whole or absent, wherever a SIGKILL falls.
        write_exactly(descriptor, head, 0)


def report_files(report: Report) -> list[int]:
    """
    Return new files for `read_report`: one, or several if a size limit requires it.

    The caller closes them.
    """
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
    """
    Return *report* as the bytes that `read_report` reads, from one file or in parts from several.
    """
    return b"".join((*_head_and_facts(report), report.payload))


def _head_and_facts(report: Report) -> tuple[bytes, bytes]:
    facts = dumps({name: getattr(report, name) for name in _FACTS}).encode()
    return _HEAD.pack(_MAGIC, len(facts), len(report.payload)), facts


def read_report(descriptor: int, *more: int) -> Report | None:
    """
    Return the report in the file *descriptor*; None if it is missing, incomplete or overwritten.

    If a limit of a file's size divided it, the rest is in *more* files.
    """
    if more:
        content = content_of_files((descriptor, *more))
        return _parsed(len(content), lambda size, offset: content[offset : offset + size])
    return _parsed(os.fstat(descriptor).st_size, lambda size, offset: read_exactly(descriptor, size, offset))


def _parsed(whole: int, part: Callable[[int, int], bytes]) -> Report | None:
    """
    Return the report of *whole* bytes; *part* reads some, by number and place.

    None if it is not valid.
    """
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
        raise ValueError("this is not a report")
    return {name: exactly(facts[name], kind) for name, kind in _FACTS.items()}


def read_text(descriptor: int) -> str:
    """
    Return the text in a file; only the beginning of a file that was made larger than any of these
    texts.
    """
    size = min(os.fstat(descriptor).st_size, _MOST_READ)
    return read_exactly(descriptor, size).decode(errors="replace")


def qualified_name(kind: type) -> str:
    """Return the name of a class in tracebacks."""
    if kind.__module__ in ("builtins", "__main__", "__mp_main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_secondary(error: BaseException) -> bool:
    """Return True if *error* only reports that the connection to a peer was lost."""
    if type(error).__name__ in _SECONDARY_TYPES or isinstance(error, ConnectionError):
        return True
    if isinstance(error, EOFError):
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
        return any(_CHANNELS.search(frame.filename) for frame in frames)
    return isinstance(error, RuntimeError) and _SECONDARY_TEXT.search(text_of_exception(error)) is not None


def is_external(error: BaseException) -> bool:
    """
    Return True if a peer, a device or the system caused *error*, or an error that it was raised
    from.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    # A chain of causes may be a circle.
    while each is not None and id(each) not in seen:
        if isinstance(each, (OSError, MemoryError)) or is_secondary(each) or _is_of_device(each):
            return True
        seen.add(id(each))
        each = _raised_from(each)
    return False


def _raised_from(error: BaseException) -> BaseException | None:
    # The exception that a traceback shows: `raise ... from None` hides the context.
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _is_of_device(error: BaseException) -> bool:
    # By name: a program without torch must not import it for its report.
    if any(kind.__name__ in _DEVICE_TYPES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_TEXT.search(text_of_exception(error)) is not None


def text_of_exception(error: BaseException) -> str:
    """Return the text of an exception, even if its class cannot make one."""
    try:
        return str(error)
    except Exception as failure:
        return f"(str() failed: {type(failure).__name__})"


def _cut(text: str) -> str:
    """Return *text*, or its beginning and end if it is too long to read."""
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def report_of_exception(error: BaseException, pickled: bytes, formatted: str | None = None) -> Report:
    """Return the report of an exception that ended a worker."""
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
        frames=frames_of(error.__traceback__),
    )


def error_file_content(report: Report) -> dict[str, Any]:
    """
    Return *report* in torch's JSON form.

    The seconds are whole, because torch's readers accept nothing else; the fraction stands beside
    them.
    """
    extra = {
        "py_callstack": report.traceback,
        "timestamp": str(int(report.timestamp)),
        "timestamp_fraction": report.timestamp % 1,
    }
    return {"message": {"message": report.message, "extraInfo": extra}}


def write_json(path: str, content: Any) -> None:
    """
    Write *content* to *path* so that a reader sees all of it or the former file.

    A missing folder is created.
    """
    folder = os.path.dirname(path) or "."
    make_private_folder(folder)
    temporary = os.path.join(folder, f".error{os.urandom(8).hex()}")

    # Not a private file, as tempfile makes: the user's umask decides who else may read it.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        text = dumps(content)
        with room_for_file(len(text)), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# The frames of an exception, for a debugger in another process. No code of the user's runs, and
# nothing is copied from a device.


class _ValueText(reprlib.Repr):
    """Text of values of Python's own types."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 200, 200, 60

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x)
        describe = self._rule_of(kind)
        if describe is not None:
            return describe(x, level)
        if kind.__module__ == "torch" or kind.__module__.startswith("torch.nn.parameter"):
            return _text_of_tensor(x)
        if kind.__module__ == "numpy" and hasattr(x, "shape"):
            return f"<numpy.{kind.__name__} of shape {tuple(x.shape)}, {x.dtype}>"
        return _class_of(x)

    def _rule_of(self, kind: type) -> Callable[[Any, int], str] | None:
        """Return the function that describes Python's own *kind*; None for others."""
        if kind.__module__ != "builtins":
            return None
        if kind in _PLAIN:
            return lambda x, _: repr(x)
        return getattr(self, f"repr_{kind.__name__}", None)

    # reprlib's own methods sort all elements, by the user's comparisons, and find them by the
    # user's hashes.

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        shown = islice(x.items(), self.maxdict) if level > 0 else ()
        parts = []
        for key, value in [*shown]:
            parts.append(f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}")
        return self._in_braces(parts, len(x))

    def repr_set(self, x: Iterable[Any], level: int) -> str:
        every: Any = x
        if not len(every):
            return "set()"
        shown = islice(x, self.maxset) if level > 0 else ()
        parts = [self.repr1(each, level - 1) for each in [*shown]]
        return self._in_braces(parts, len(every))

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        content = self.repr_set(x, level) if x else ""
        return f"frozenset({content})"

    @staticmethod
    def _in_braces(parts: list[str], count: int) -> str:
        if len(parts) < count:
            parts = [*parts, "..."]
        return f"{{{', '.join(parts)}}}"

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        if bits > _MOST_BITS:
            return f"<int of {bits} bits>"
        return super().repr_int(x, level)

    def repr_range(self, x: range, level: int) -> str:
        numbers = [x.start, x.stop]
        if x.step != 1:
            numbers.append(x.step)
        parts = [self.repr_int(number, level) for number in numbers]
        return f"range({', '.join(parts)})"


def _class_of(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, type):
        # Not by isinstance, which also asks the object.
        return f"<class {value.__module__}.{value.__qualname__}>"
    return f"<{kind.__module__}.{kind.__qualname__}>"


def _text_of_tensor(value: Any) -> str:
    torch: Any = sys.modules.get("torch")
    # A subclass could run the user's code when it is asked for its shape.
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
    return f"<{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, {value.device}>"


def frames_of(trace: TracebackType | None) -> str:
    """Return JSON of ``[[file, line, function, {variable: text}], ...]``, the innermost frame last."""
    text = _ValueText()
    until = monotonic() + _DESCRIBE_LIMIT
    found: list[Any] = []
    # In a deep stack the innermost frames show the failure.
    for frame, line in [*traceback.walk_tb(trace)][-_MOST_FRAMES:]:
        variables = _variables_of(frame, text, until)
        found.append([frame.f_code.co_filename, line, frame.f_code.co_name, variables])
    return dumps(found)


def _variables_of(frame: FrameType, text: _ValueText, until: float) -> dict[str, str]:
    """
    Return the variables of *frame* as text, as many as can be described before the time *until*.
    """
    variables: dict[str, str] = {}
    # A copy: a repr may run code that changes the variables of a module.
    for name, value in [*islice(frame.f_locals.items(), _MOST_LOCALS)]:
        if monotonic() >= until:
            break
        is_of_module = name.startswith("__") and frame.f_locals is frame.f_globals
        if is_of_module:
            continue
        try:
            variables[name] = text.repr(value)
        except Exception as error:
            variables[name] = f"<repr() failed: {type(error).__name__}>"

    return variables


# The copy of stderr.


class NotedFile(io.FileIO):
    """
    Descriptor 2, with a copy of Python's output to it in a file.

    The stream itself is unchanged: a terminal stays a terminal, and the order of lines stays.
    Native code that writes to descriptor 2 directly is not copied: its output is on the console,
    or in the file to which stderr is redirected.
    """

    def __init__(self, note: int) -> None:
        super().__init__(2, "wb", closefd=False)
        self.name = "<stderr>"
        self._note = note
        self._identity = identity(note)
        self._size = 0

    def write(self, data: Any, /) -> int:
        """
        Write *data* to stderr, then copy it.

        An error of the stream is raised, an error of the copy is not.
        """
        count = super().write(data)
        # The user's code may have closed all descriptors, and opened a file of its own under this
        # number.
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
    """Copy ``sys.stderr`` into the file *note* from now on; the stream looks the same as before."""
    former = sys.stderr
    if former is None:
        return

    file = NotedFile(note)
    stream: Any = io.TextIOWrapper(
        # Without a buffer of bytes, as with python -u.
        file,
        encoding=former.encoding,
        errors=former.errors,
        line_buffering=bool(former.line_buffering) or file.isatty(),
        write_through=getattr(former, "write_through", True),
    )
    stream.mode = "w"
    sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
