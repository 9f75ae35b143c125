"""The tee with real files, real writers and real consoles: nothing lost, nothing torn, nobody held up."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.logs._console import LineFilter, console_sink
from elasticlib.logs._lines import LineAssembler
from elasticlib.logs._tee import BLOCK, Tee
from elasticlib.spec import Std
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for i in range(int(sys.argv[2])):
    os.write(fd, b"line ")
    os.write(fd, b"%d of this writer\\n" % i)
"""


class Console:
    """A sink that keeps what it gets; `held` makes it as stuck as a stopped terminal."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.times: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __call__(self, block: bytes) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        self.blocks.append(block)
        self.times.append(time.monotonic())

    def has_more_than(self, blocks: int) -> bool:
        return len(self.times) > blocks

    @property
    def text(self) -> bytes:
        return b"".join(self.blocks)


@pytest.fixture(params=[True, False], ids=["notified", "polling"])
def notify(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Record the threads that do not belong to the test, such as the tee of warm ranks."""
    _others.clear()
    _others.update(threading.enumerate())


def begun() -> list[threading.Thread]:
    """The threads of the tees that the test has made."""
    return [each for each in threading.enumerate() if each.name == "elasticlib-tee" and each not in _others]


@pytest.fixture
def console() -> Console:
    return Console()


@pytest.fixture
def tee(console: Console, notify: bool) -> Iterator[Tee]:
    tee = Tee(console, console, notify=notify)
    yield tee
    console.gate.set()
    assert tee.finish(30)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "stdout.log"
    path.touch()
    return path


def append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def writer(path: Path, lines: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", WRITER, str(path), str(lines)])


def test_four_writers_of_two_part_lines_lose_and_tear_none(tee: Tee, console: Console, tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.log" for rank in range(4)]
    for rank, path in enumerate(paths):
        path.touch()
        tee.follow(str(path), b"[w%d]:" % rank, Std.OUT)

    writers = [writer(path, 20_000) for path in paths]
    codes = [process.wait(120) for process in writers]
    tee.finish()

    assert [0] * 4 == codes
    lines = console.text.split(b"\n")
    for rank in range(4):
        prefix = b"[w%d]:" % rank
        expected = [b"%sline %d of this writer" % (prefix, i) for i in range(20_000)]
        assert expected == [line for line in lines if line.startswith(prefix)]
    assert 80_001 == len(lines)


def test_the_end_of_a_burst_reaches_the_console_unasked(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)

    assert 0 == writer(log, 5_000).wait(60)

    wait_until(lambda: sum(map(len, console.blocks)) == log.stat().st_size)


def test_lines_written_before_the_follow_are_printed_first(tee: Tee, console: Console, log: Path) -> None:
    append(log, b"early\n")

    tee.follow(str(log), b"p:", Std.OUT)
    wait_until(lambda: console.text == b"p:early\n")
    append(log, b"late\n")

    wait_until(lambda: console.text == b"p:early\np:late\n")


def test_bytes_of_no_encoding_reach_the_console(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)

    append(log, b"\xff\xfe\x00caf\xe9\n")

    wait_until(lambda: console.text == b"\xff\xfe\x00caf\xe9\n")


def test_last_line_without_newline_is_printed_at_the_end(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"p:", Std.ERR)
    append(log, b"one\ntwo")

    tee.finish()

    assert b"p:one\np:two\n" == console.text


def test_the_last_bytes_of_a_killed_writer_arrive(tee: Tee, console: Console, log: Path) -> None:
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'whole\\nlast words'); os.kill(os.getpid(), 9)"
    tee.follow(str(log), b"p:", Std.OUT)

    dead = subprocess.run([sys.executable, "-S", "-E", "-c", code, str(log)], check=False, timeout=60)
    drained = tee.drain_and_forget([str(log)], timeout=20)

    assert -signal.SIGKILL == dead.returncode
    assert drained
    assert b"p:whole\np:last words\n" == console.text


def test_a_stuck_console_does_not_hold_up_the_writer_and_loses_nothing(tee: Tee, console: Console, log: Path) -> None:
    console.gate.clear()
    tee.follow(str(log), b"", Std.OUT)

    process = writer(log, 50_000)
    code = process.wait(120)
    nothing_yet = console.text
    console.gate.set()
    tee.finish()

    assert (0, b"") == (code, nothing_yet)
    assert log.read_bytes() == console.text


def test_a_round_does_not_wait_for_a_stuck_console(tee: Tee, console: Console, log: Path) -> None:
    console.gate.clear()
    tee.follow(str(log), b"", Std.OUT)
    append(log, b"a\nb")
    assert console.entered.wait(20)

    in_time = tee.drain_and_forget([str(log)], timeout=0.01)
    console.gate.set()
    tee.finish()

    assert not in_time
    assert b"a\nb\n" == console.text


def test_a_forgotten_file_is_followed_no_more(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)
    append(log, b"a\n")

    assert tee.drain_and_forget([str(log), "/not/followed"], timeout=20)
    append(log, b"b\n")
    tee.finish()

    assert b"a\n" == console.text


def test_survivor_that_continues_writing_does_not_delay_the_end(tee: Tee, log: Path) -> None:
    stop = threading.Event()

    def babble() -> None:
        while not stop.is_set():
            append(log, b"x" * 100_000 + b"\n")

    survivor = threading.Thread(target=babble)
    survivor.start()
    tee.follow(str(log), b"", Std.OUT)
    try:
        finished = tee.finish(30)
    finally:
        stop.set()
        survivor.join()

    assert finished


def test_a_flood_does_not_keep_other_streams_from_the_console(tee: Tee, console: Console, tmp_path: Path) -> None:
    flood, drop = tmp_path / "flood", tmp_path / "drop"
    flood.write_bytes(b"f" * 99 + b"\n" + (b"f" * 99 + b"\n") * (40 * BLOCK // 100))
    drop.write_bytes(b"drop\n")
    console.gate.clear()
    tee.follow(str(flood), b"", Std.OUT)
    tee.follow(str(drop), b"", Std.OUT)

    console.gate.set()
    tee.finish()

    at = console.text.index(b"drop\n")
    assert at <= 3 * BLOCK


def test_line_without_end_is_printed_in_pieces_of_a_mebibyte(tee: Tee, console: Console, log: Path) -> None:
    os.truncate(log, 20 << 20)

    tee.follow(str(log), b"", Std.OUT)
    tee.finish()

    assert [1 << 20] * 20 == [len(piece) for piece in console.text.split(b"\n")[:-1]]
    assert max(map(len, console.blocks)) <= (1 << 20) + 1


def test_a_file_that_is_emptied_is_followed_from_its_new_start(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)
    append(log, b"a long line\n")
    wait_until(lambda: console.text == b"a long line\n")

    os.truncate(log, 0)
    append(log, b"new\n")

    wait_until(lambda: console.text == b"a long line\nnew\n")


def test_rewritten_text_is_shown_while_it_waits_for_its_newline(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"p:", Std.OUT)

    append(log, b" 1%\r 2%\r")

    wait_until(lambda: console.text == b"p: 2%\n")


def test_a_line_is_on_the_console_within_five_milliseconds(console: Console, log: Path) -> None:
    tee = Tee(console, console)
    tee.follow(str(log), b"", Std.OUT)
    random_gap = random.Random(7)
    behind = []

    for _ in range(50):
        seen = len(console.times)
        written = time.monotonic()
        append(log, b"line\n")
        wait_until(functools.partial(console.has_more_than, seen))
        behind.append(console.times[-1] - written)
        time.sleep(random_gap.uniform(0, 0.005))  # the writer's rhythm, not a wait
    tee.finish()

    assert statistics.median(behind) <= 0.005


@pytest.mark.parametrize("gather", [0.0, 0.01])
def test_an_idle_tee_does_not_wake_up(console: Console, log: Path, gather: float) -> None:
    tee = Tee(console, console, gather=gather)
    tee.follow(str(log), b"", Std.OUT)
    append(log, b"line\n")
    wait_until(lambda: console.text == b"line\n")
    (thread,) = begun()
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def wakeups() -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("voluntary")]
        return int(line.split()[1])

    time.sleep(0.05)  # lets it fall asleep
    before = wakeups()
    time.sleep(0.3)  # the span in which nothing may happen
    after = wakeups()
    tee.finish()

    assert before == after


def test_lines_gather_into_one_block_until_somebody_waits_for_them(console: Console, log: Path, notify: bool) -> None:
    tee = Tee(console, console, notify=notify, gather=1000.0)
    tee.follow(str(log), b"", Std.OUT)
    append(log, b"first\n")
    wait_until(lambda: console.blocks == [b"first\n"])

    append(log, b"1\n")
    append(log, b"2\n")
    assert tee.catch_up(20)
    append(log, b"3\n")
    append(log, b"4\n")
    assert tee.drain_and_forget([str(log)], 20)
    tee.follow(str(log), b"", Std.OUT)
    assert tee.finish(20)

    assert [b"first\n", b"1\n2\n", b"3\n4\n", b"first\n1\n2\n3\n4\n"] == console.blocks


def test_gathered_lines_reach_the_console_without_a_request(console: Console, tmp_path: Path, notify: bool) -> None:
    """Whenever a flow of lines stops, or begins again."""
    tee = Tee(console, console, notify=notify, gather=0.002)
    randoms, written = random.Random(5), bytearray()
    paths = [tmp_path / str(rank) for rank in range(3)]
    for path in paths:
        path.touch()
        tee.follow(str(path), b"", Std.OUT)

    for _ in range(200):
        for number in range(randoms.randrange(1, 8)):
            append(randoms.choice(paths), b"%d\n" % number)
            written += b"%d\n" % number
            time.sleep(randoms.choice([0.0, 0.0005, 0.002]))  # the writers' rhythm, not a wait
        wait_until(lambda: sorted(console.text) == sorted(written))  # noqa: B023 - it is called at once
    assert tee.finish(20)


def test_tee_leaves_a_lost_console_alone_and_continues_with_other_one(
    console: Console, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def lost(block: bytes) -> None:
        calls.append(block)
        raise BrokenPipeError

    out, err = tmp_path / "out", tmp_path / "err"
    out.touch()
    err.touch()
    tee = Tee(lost, console)
    tee.follow(str(out), b"", Std.OUT)
    tee.follow(str(err), b"", Std.ERR)

    append(out, b"a\nopen")
    wait_until(lambda: Std.OUT in tee.broken)
    append(out, b"b\n")
    append(err, b"c\n")
    finished = tee.finish(20)

    assert finished
    assert [b"a\n"] == calls
    assert b"c\n" == console.text
    assert isinstance(tee.broken[Std.OUT], BrokenPipeError)
    assert 1 == sum("stdout cannot be written" in record.message for record in caplog.records)


def test_finishing_leaves_no_thread_and_no_descriptor(console: Console, log: Path, notify: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    tee = Tee(console, console, notify=notify)
    tee.follow(str(log), b"", Std.OUT)

    assert tee.finish()
    assert tee.finish()

    assert before == set(os.listdir("/proc/self/fd"))
    assert not begun()


def test_a_tee_that_follows_nothing_starts_nothing(console: Console) -> None:
    tee = Tee(console, console)

    assert not begun()
    assert tee.finish()


def test_waiting_tee_looks_again_when_its_wait_ends_or_is_woken(console: Console, log: Path) -> None:
    waits: list[float | None] = [0.01, 0.01, None]
    looks: list[float] = []

    def look() -> float | None:
        looks.append(time.monotonic())
        return waits.pop(0) if waits else None

    tee = Tee(console, console, look=look)
    tee.wake()
    assert [] == looks
    tee.follow(str(log), b"", Std.OUT)
    wait_until(lambda: not waits)
    count = len(looks)
    tee.wake()
    wait_until(lambda: len(looks) > count)

    assert tee.finish()
    tee.wake()


def test_a_missing_file_a_second_follow_and_a_finished_tee_are_errors(tee: Tee, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)

    with pytest.raises(FileNotFoundError):
        tee.follow(str(log) + ".missing", b"", Std.OUT)
    with pytest.raises(ValueError, match="already followed"):
        tee.follow(str(log), b"", Std.OUT)
    tee.finish()
    with pytest.raises(RuntimeError, match="finished"):
        tee.follow(str(log), b"", Std.OUT)


def test_round_after_a_fault_is_copied_and_the_fault_logged_once(
    tee: Tee, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = paths = [tmp_path / f"{number}.log" for number in range(3)]
    for path in paths:
        path.touch()

    def no_room(lines: LineAssembler, data: bytes, now: float) -> bytes:
        raise MemoryError("no room for a line")

    with monkeypatch.context() as patch:
        patch.setattr(LineAssembler, "feed", no_room)
        tee.follow(str(first), b"", Std.OUT)
        [thread] = begun()
        append(first, b"lost\n")
        thread.join(20)
    drained = tee.drain_and_forget([str(first)], timeout=None)
    tee.follow(str(second), b"p:", Std.OUT)
    append(second, b"again\n")
    wait_until(lambda: console.text == b"p:again\n")
    tee.follow(str(third), b"p:", Std.OUT)
    append(third, b"at the end")

    assert tee.finish(30)
    assert drained
    assert b"p:again\np:at the end\n" == console.text
    [line] = [record for record in caplog.records if record.exc_info]
    assert "log files are complete" in line.getMessage()


def test_a_fault_at_the_end_of_a_file_holds_nobody_up(
    tee: Tee, console: Console, tmp_path: Path, hits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close
    refused: list[int] = []

    def fails(fd: int) -> None:
        if fd in descriptors:
            refused.append(fd)
            raise OSError("no such descriptor")
        close(fd)

    logs = [tmp_path / name for name in ("one.log", "two.log")]
    copy = LineFilter(str(hits), ["a"])
    with monkeypatch.context() as patch:
        for log in logs:
            log.write_bytes(b"a\n")
            tee.follow(str(log), b"", Std.OUT, copy=copy)
        descriptors = {stream.fd for stream in tee._followed.values()}
        patch.setattr(os, "close", fails)

        in_time = tee.drain_and_forget(map(str, logs), timeout=20)

        assert tee.finish(20)
    for fd in descriptors:
        os.close(fd)
    assert in_time
    assert descriptors == set(refused)
    assert set(console.text.split()) <= {b"a"}


@pytest.fixture
def hits(tmp_path: Path) -> Path:
    """The file of the lines that match."""
    return tmp_path / "filtered.log"


def test_matching_lines_go_to_the_second_file_and_all_to_the_console(
    tee: Tee, console: Console, tmp_path: Path, hits: Path
) -> None:
    paths = [tmp_path / f"{rank}.log" for rank in range(4)]
    copy = LineFilter(str(hits), ["e 1234 ", "77 of"])
    for rank, path in enumerate(paths):
        path.touch()
        tee.follow(str(path), b"[w%d]:" % rank, Std.OUT, copy=copy)

    codes = [process.wait(120) for process in [writer(path, 10_000) for path in paths]]
    drained = tee.drain_and_forget(map(str, paths), timeout=60)

    assert ([0] * 4, True) == (codes, drained)
    found = hits.read_bytes().split(b"\n")
    for rank in range(4):
        wanted = [i for i in range(10_000) if i == 1234 or i % 100 == 77]
        expected = [b"[w%d]:line %d of this writer" % (rank, i) for i in wanted]
        assert expected == [line for line in found if line.startswith(b"[w%d]:" % rank)]
    assert 4 * 101 + 1 == len(found)
    assert 40_001 == len(console.text.split(b"\n"))


def test_long_line_and_last_line_without_newline_are_matched_whole(tee: Tee, log: Path, hits: Path) -> None:
    long = b"x" * (BLOCK - 2) + b"needle" + b"y" * BLOCK
    log.write_bytes(b"hay\n" + long + b"\nhay\nneedle at the end")

    copy = LineFilter(str(hits), ["needle"])
    tee.follow(str(log), b"p:", Std.OUT, copy=copy)
    tee.finish()

    assert b"p:" + long + b"\np:needle at the end\n" == hits.read_bytes()


def test_matching_lines_are_kept_when_the_console_is_lost(console: Console, log: Path, hits: Path) -> None:
    def lost(block: bytes) -> None:
        raise BrokenPipeError

    broken = Tee(lost, console)
    copy = LineFilter(str(hits), ["a"])
    broken.follow(str(log), b"", Std.OUT, copy=copy)

    append(log, b"a 1\n")
    wait_until(lambda: Std.OUT in broken.broken)
    append(log, b"b 2\na 3\n")
    broken.finish(20)

    assert b"a 1\na 3\n" == hits.read_bytes()


def test_lines_are_in_the_second_file_before_they_are_on_the_console(
    tee: Tee, console: Console, log: Path, hits: Path
) -> None:
    console.gate.clear()
    copy = LineFilter(str(hits), ["a"])
    tee.follow(str(log), b"", Std.OUT, copy=copy)

    append(log, b"a 1\n")

    wait_until(lambda: hits.read_bytes() == b"a 1\n")
    assert b"" == console.text


def test_the_second_file_is_closed_with_the_last_stream(console: Console, tmp_path: Path, hits: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    tee = Tee(console, console)
    copy = LineFilter(str(hits), ["a"])
    for name in ("one", "two"):
        (tmp_path / name).touch()
        tee.follow(str(tmp_path / name), b"", Std.OUT, copy=copy)
    del copy

    tee.drain_and_forget([str(tmp_path / "one")], timeout=20)
    append(tmp_path / "two", b"a\n")
    tee.finish()

    assert b"a\n" == hits.read_bytes()
    assert set() == set(os.listdir("/proc/self/fd")) - before  # what an earlier test left may go meanwhile


@pytest.mark.parametrize("buffering", [-1, 0], ids=["buffered", "unbuffered"])
def test_a_full_non_blocking_console_is_waited_for(buffering: int) -> None:
    block = b"".join([b"line %d\n" % i for i in range(200_000)])
    read, write = os.pipe()
    os.set_blocking(write, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    received = bytearray()

    def slow_reader() -> None:
        while data := os.read(read, 1 << 16):
            received.extend(data)

    with os.fdopen(write, "wb", buffering=buffering) as binary:
        sink = console_sink(FakeText(binary))  # type: ignore[arg-type]
        sending = threading.Thread(target=sink, args=(block,))
        sending.start()
        reader = threading.Thread(target=slow_reader)
        reader.start()
        sending.join(60)
    reader.join(60)
    os.close(read)

    assert block == received


class FakeText:
    def __init__(self, buffer: io.BufferedIOBase) -> None:
        self.buffer = buffer


def test_a_reader_that_left_is_an_error_of_the_sink() -> None:
    read, write = os.pipe()
    os.close(read)
    binary = os.fdopen(write, "wb")

    with pytest.raises(BrokenPipeError):
        console_sink(FakeText(binary))(b"line\n")  # type: ignore[arg-type]
    with contextlib.suppress(BrokenPipeError):
        binary.close()


def test_a_console_of_text_alone_gets_text() -> None:
    text = io.StringIO()

    console_sink(text)(b"caf\xc3\xa9 \xff\n")

    assert "café \ufffd\n" == text.getvalue()


def test_the_captured_stdout_of_a_test_gets_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console_sink(sys.stdout)(b"line\n")

    assert "line\n" == capsys.readouterr().out


def test_no_console_at_all_takes_everything() -> None:
    sink = console_sink(None)

    sink(b"line\n")


# Caught up with writers that live.


def test_catch_up_copies_all_that_was_written(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"[0] ", Std.OUT)

    for number in range(200):
        append(log, b"%d\nopen" % number)
        assert tee.catch_up(20)
        assert console.text.endswith(b"[0] %d\n[0] open\n" % number)
    assert tee.catch_up(0)


def test_a_console_that_takes_nothing_is_not_waited_for_longer(tee: Tee, console: Console, log: Path) -> None:
    tee.follow(str(log), b"", Std.OUT)
    console.gate.clear()
    append(log, b"line\n")

    assert not tee.catch_up(0.05)
    console.gate.set()
    assert tee.catch_up(20)
    assert b"line\n" == console.text
