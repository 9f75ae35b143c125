"""
Writing blocks of whole lines to whatever stands for the console.

Rules of this file: a block is written whole, however often the stream takes only a part; a stream that is
full is waited for, one that is gone raises.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias

Sink: TypeAlias = Callable[[bytes], None]
"""Takes one block of whole lines; returns when it is written, raises when its reader is gone."""


def console_sink(stream: TextIO | None) -> Sink:
    """
    A sink that writes to *stream*, such as ``sys.stdout``, and flushes after each block.

    Bytes go unchanged to ``stream.buffer`` where there is one, else as UTF-8 text to ``stream.write`` (notebooks),
    with U+FFFD for what is not UTF-8. A full non-blocking descriptor is waited for. None, which is what Python
    makes of a descriptor that is closed at start, drops everything.
    """
    if stream is None:
        return lambda block: None
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        return lambda block: _write_text(stream, block)
    return lambda block: _write_bytes(buffer, block)


def _write_text(stream: TextIO, block: bytes) -> None:
    stream.write(block.decode("utf-8", "replace"))
    stream.flush()


def _write_bytes(buffer: Any, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        try:
            taken = buffer.write(rest)
        except BlockingIOError as full:
            taken = full.characters_written
            _wait_until_writable(buffer)
        if taken is None:  # a raw stream (python -u) that is full says so in this way
            _wait_until_writable(buffer)
            taken = 0
        rest = rest[taken:]
    while True:
        try:
            return buffer.flush()  # type: ignore[no-any-return]
        except BlockingIOError:
            _wait_until_writable(buffer)


def _wait_until_writable(buffer: Any) -> None:
    poll = select.poll()
    poll.register(buffer.fileno(), select.POLLOUT)
    poll.poll()
