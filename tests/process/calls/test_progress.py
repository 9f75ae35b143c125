"""``elasticrun --progress`` on a real terminal, as somebody who sits before it sees it."""

from __future__ import annotations

import fcntl
import os
import pathlib
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SCRIPT = """
import os, sys, time
from elasticlib import progress

rank = int(os.environ["RANK"])
many = "many" in sys.argv
for step in range(400 if many else 20):
    progress(step + 1, total=20, loss=1 / (step + 1))
    print(f"rank {rank}: line {step} " + "x" * 100, flush=True)
    time.sleep(0.005 if many else 0.02)
print("\\x1b[2Jerased?", file=sys.stderr, flush=True)
if rank == 1 and "fail" in sys.argv:
    raise ValueError("rank 1 is unwell")
if "hang" in sys.argv:
    print("hangs", flush=True)
    time.sleep(1000)
"""


def on_a_terminal(
    tmp_path: pathlib.Path, *args: str, options: tuple[str, ...] = (), seen: Callable[[str, int], None] | None = None
) -> tuple[int, str]:
    """Exit status of a job of two workers under ``--progress``, and all that came to a terminal of 24 x 100."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "elasticlib", "--progress", "--nproc-per-node=2", *options, str(tmp_path / "train.py"), *args]
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
            os.execve(sys.executable, [sys.executable, *command], {**os.environ, "TERM": "xterm"})
        finally:
            os._exit(127)
    text = ""
    with os.fdopen(terminal, "rb", buffering=0) as output:
        while True:
            try:
                block = output.read(65536)
            except OSError:  # its last user has ended
                break
            if not block:
                break
            text += block.decode("utf-8", "replace")
            if seen is not None:
                seen(text, pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def lines_of(text: str) -> list[str]:
    return ESCAPE.sub("", text).replace("\r", "\n").splitlines()


def test_rows_stand_below_a_log_that_stays_readable(tmp_path: pathlib.Path) -> None:
    """Each rank has its row with step and metrics, and each line of rank 0 is there once, whole and unwrapped."""
    status, text = on_a_terminal(tmp_path)
    assert status == 0
    lines = lines_of(text)
    for step in range(20):
        assert lines.count(f"rank 0: line {step} " + "x" * 100) == 1
    assert "\x1b[2Jerased?" not in text
    assert "erased?" in lines
    head = max(index for index, line in enumerate(lines) if line.startswith("train.py: succeeded after"))
    rows = [line.split() for line in lines[head + 1 :] if "20/20" in line and "loss=0.05" in line]
    assert [["0", "succeeded"], ["1", "succeeded"]] == [row[:2] for row in rows]
    # The temporary folder of their output is gone by then.
    assert ["erased?", "erased?"] == [row[-1] for row in rows]


def test_rows_are_not_redrawn_for_each_line_above_them(tmp_path: pathlib.Path) -> None:
    """Drawing them costs more than many lines do: it is done about twenty times in a second at most."""
    times: list[float] = []

    def note(text: str, _: int) -> None:
        if "rank 0: line 0" in text and "rank 0: line 399" not in text:
            times.append(time.monotonic())

    status, text = on_a_terminal(tmp_path, "many", seen=note)

    assert status == 0
    drawn = text.partition("rank 0: line 1 ")[2].partition("rank 0: line 399")[0].count("train.py: ")
    assert drawn <= 5 + (20 + 4) * (times[-1] - times[0])


def test_after_a_failure_the_rows_stay_and_the_report_follows(tmp_path: pathlib.Path) -> None:
    """The last picture tells who failed after which restarts; the report is whole below it."""
    status, text = on_a_terminal(tmp_path, "fail", options=("--max-restarts=1",))
    assert status == 1
    lines = lines_of(text)
    head = max(index for index, line in enumerate(lines) if line.startswith("train.py: failed after"))
    assert "restart 1" in lines[head]
    assert any(re.match(r"1 +failed \(1\)", line) for line in lines[head + 1 :])
    assert any("ValueError: rank 1 is unwell" in line for line in lines[head + 1 :])


def test_ctrl_c_ends_it_and_leaves_a_cursor(tmp_path: pathlib.Path) -> None:
    """An interrupt ends the job as without the rows, and the terminal's cursor is shown again."""
    sent: list[int] = []

    def interrupt(text: str, pid: int) -> None:
        if "hangs" in text and not sent:
            sent.append(pid)
            os.kill(pid, signal.SIGINT)

    status, text = on_a_terminal(tmp_path, "hang", seen=interrupt)
    assert (1, [text.rfind("\x1b[?25h")]) == (status, [max(text.rfind("\x1b[?25h"), text.rfind("\x1b[?25l"))])
    assert any(line.startswith("train.py: stopped after") for line in lines_of(text))
