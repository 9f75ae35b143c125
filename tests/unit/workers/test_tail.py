"""The note of what a worker wrote to stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticlib.workers import _tail

ROOT = Path(__file__).parents[3]


def noted(code: str) -> tuple[bytes, bytes]:
    """What a program wrote to stderr, and what was noted of it."""
    note = os.memfd_create("note")
    os.set_inheritable(note, True)
    program = f"from elasticlib.workers import _tail; _tail.install({note})\nimport os, sys\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, pass_fds=[note], cwd=ROOT, check=True)
    content = os.pread(note, 1 << 20, 0)
    os.close(note)
    return done.stderr, content


def test_what_python_writes_is_noted_and_still_written() -> None:
    code = "print('a', file=sys.stderr); sys.stderr.buffer.write(b'b\\xff'); sys.stderr.write('c')"

    assert (b"a\nb\xffc",) * 2 == noted(code)


def test_the_newest_stays_when_the_note_is_full() -> None:
    """However much is written, the note is bounded and ends with what was written last."""
    written, content = noted("for i in range(20000): print('line', i, file=sys.stderr)")

    assert written.endswith(content)
    assert _tail.MOST // 2 - 100 <= len(content) <= _tail.MOST


def test_a_write_larger_than_the_note_is_cut_at_its_front() -> None:
    written, content = noted(f"sys.stderr.write('x' * {3 * _tail.MOST} + 'end')")

    assert 3 * _tail.MOST + 3 == len(written)
    assert written[-_tail.MOST // 2 :] == content


def test_a_closed_note_is_nobodys_error() -> None:
    written, _ = noted("os.closerange(3, 100); print('still here', file=sys.stderr)")

    assert b"still here\n" == written


def test_the_stream_looks_as_before() -> None:
    code = (
        "o = sys.stdout; e = sys.stderr; "
        "assert (e.name, e.mode, e.fileno(), e.errors) == ('<stderr>', 'w', 2, 'backslashreplace'); "
        "assert sys.__stderr__ is e and type(e) is type(o)"
    )

    assert b"" == noted(code)[0]


def test_last_lines_are_the_last_and_rewritten_ones_count_once() -> None:
    text = "".join(f"line {i}\n" for i in range(20)) + "10%\r50%\r100%\r\n\nend"

    assert ("line 18", "line 19", "100%", "end") == _tail.last_lines(text, most=5)
