"""Output of workers as the caller sees it: in its own stream and cell, in order, and limited."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch, pool
from tests.process.console.cells import LIMIT, executed, printed

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]


def settings(workers: int = 2, **more: Any) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=workers, max_restarts=0, preload=(), **more)


def talks() -> None:
    rank = os.environ["RANK"]
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    print(f"end of {rank}", end="", flush=True)


def test_a_replaced_stream_gets_the_output_of_rank_0_as_it_is() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        elastic_launch(settings(), talks)()

    assert stream.getvalue() == "out of 0\nerr of 0\nend of 0"


def test_several_ranks_have_whole_lines_after_their_rank() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        elastic_launch(settings(3, show=[0, 2]), talks)()

    wanted = [f"[{rank}] {part} of {rank}" for rank in (0, 2) for part in ("out", "err", "end")]
    assert sorted(stream.getvalue().splitlines()) == sorted(wanted)


def test_no_rank_at_all_may_be_shown() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        elastic_launch(settings(show=()), talks)()

    assert stream.getvalue() == ""


def test_pytest_captures_it(capsys: pytest.CaptureFixture[str]) -> None:
    elastic_launch(settings(), talks)()

    assert capsys.readouterr().out == "out of 0\nerr of 0\nend of 0"


def test_a_program_may_ask_for_some_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    elastic_launch(settings(show=[1]), talks)()

    assert capfd.readouterr().out == "out of 1\nerr of 1\nend of 1\n"


def test_a_plain_programs_workers_write_themselves(capfd: pytest.CaptureFixture[str]) -> None:
    elastic_launch(settings(), talks)()

    found = capfd.readouterr()
    assert all(f"{part} of {rank}" in found.out for part in ("out", "end") for rank in range(2))
    assert all(f"err of {rank}" in found.err for rank in range(2))


def test_a_call_leaves_no_folder_and_a_failure_leaves_all_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails() -> None:
        talks()
        raise ValueError

    with contextlib.redirect_stdout(io.StringIO()):
        elastic_launch(settings(), talks)()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ChildFailedError):
            elastic_launch(settings(), fails)()

    kept = "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))
    assert "out of " in kept  # the other rank may have been stopped before it wrote
    assert "raise ValueError" in kept


def test_each_call_of_a_pool_shows_where_it_is_made() -> None:
    streams = [io.StringIO(), io.StringIO()]
    with contextlib.redirect_stdout(streams[0]):
        made = pool(2, group=None, preload=())
    with made:
        for number, stream in enumerate(streams):
            with contextlib.redirect_stdout(stream):
                made.run(print, f"call {number}")
                until = time.monotonic() + LIMIT
                while "call" not in stream.getvalue() and time.monotonic() < until:
                    pass

    assert [stream.getvalue() for stream in streams] == ["call 0\n", "call 1\n"]


SETUP = """
import os, sys, threading, time
from elasticlib import LaunchConfig, elastic_launch, pool

def settings(**more):
    return LaunchConfig(nproc_per_node=2, max_restarts=0, preload=(), **more)

def talks(count=3, pause=0.0):
    for number in range(count):
        print("line", number, "of", os.environ["RANK"])
        time.sleep(pause)

def bars():
    for number in range(5):
        sys.stderr.write(f"\\r{number}/4")
        time.sleep(0.05)
    print(" done")
"""
LINES = [f"line {number} of 0" for number in range(3)]


def outputs_after_setup(*cells: str, folder: Path) -> list[list[Any]]:
    """The outputs of each of *cells*, executed after `SETUP`."""
    return [cell.outputs for cell in executed(SETUP, *cells, folder=folder)[1:]]


def text_after_setup(*cells: str, folder: Path) -> list[str]:
    """The text that each of *cells* shows."""
    return [printed(outputs) for outputs in outputs_after_setup(*cells, folder=folder)]


COUNTS = """
flushes, flush = [], sys.stdout.flush
sys.stdout.flush = lambda: (flushes.append(1), flush())
began = time.monotonic()
"""


def test_a_kernel_is_not_kept_busy_by_its_workers_lines(tmp_path: Path) -> None:
    """A message to the front end costs more than a hundred lines: there are about ten in a second at most."""
    talked, counted = text_after_setup(
        f"{COUNTS}elastic_launch(settings(show='all'), talks)(300, 0.005)",
        "del sys.stdout.flush\nprint(len(flushes) <= 5 + (time.monotonic() - began) / 0.095, len(flushes))",
        folder=tmp_path,
    )

    assert sorted(talked.splitlines()) == sorted(
        f"[{rank}] line {n} of {rank}" for n in range(300) for rank in range(2)
    )
    assert counted.startswith("True")


def test_a_cell_shows_its_own_calls_output_and_no_other(tmp_path: Path) -> None:
    called, everyone, captured, started, meanwhile, awaited, pooled, again, progress = text_after_setup(
        "elastic_launch(settings(), talks)();",
        "elastic_launch(settings(show='all'), talks)();",
        "%%capture kept\nelastic_launch(settings(), talks)()",
        "print(kept.stdout)\njob = elastic_launch(settings(), talks).start(20, 0.05)",
        "time.sleep(0.3)\nprint('meanwhile')",
        "job.result()\nprint('done')",
        "p = pool(2, group=None, preload=())\np.run(talks)\ntime.sleep(0.3)",
        "p.run(talks, 1)\ntime.sleep(0.3)\np.close()",
        "elastic_launch(settings(), bars)();",
        folder=tmp_path,
    )

    assert called.splitlines() == LINES
    assert sorted(everyone.splitlines()) == sorted(
        f"[{rank}] line {n} of {rank}" for n in range(3) for rank in range(2)
    )
    assert captured == ""
    assert started.splitlines()[:3] == LINES  # what comes after a cell's end nbclient does not keep
    assert (meanwhile, awaited) == ("meanwhile\n", "done\n")
    assert pooled.splitlines() == LINES
    assert again.splitlines() == LINES[:1]
    assert progress.endswith("\r4/4 done\n")


@pytest.mark.sampled(0.1)
def test_a_long_run_shows_its_head_its_last_lines_and_the_file(tmp_path: Path) -> None:
    call = "elastic_launch(settings(), talks)(100_000)"
    shown, kept, printed = outputs_after_setup(
        f"{call};", f"%%capture kept\n{call}", "print(kept.stdout)", folder=tmp_path
    )

    *parts, tail = shown
    head = "".join(output.text for output in parts)
    heading, *last = tail.data["text/plain"].splitlines()
    assert head.startswith("line 0 of 0\nline 1 of 0\n")
    assert len(head) <= 200_000
    assert last == [f"line {number} of 0" for number in range(99_980, 100_000)]
    file = Path(heading.rpartition("the full output is in ")[2].rstrip("]"))
    assert file.read_text().count("\n") == 100_000

    assert kept == []
    text = "".join(output.text for output in printed)
    assert len(text) < 202_000
    assert text.rstrip().endswith("\n".join(last))


# Figures and other objects.

SHOWS = """
import os
from elasticlib import LaunchConfig, elastic_launch, pool

def settings(workers=1, **more):
    return LaunchConfig(nproc_per_node=workers, preload=(), max_restarts=0, **more)

class Table:
    def __repr__(self):
        return "Table\\nof " + os.environ["RANK"]
    def _repr_html_(self):
        return "<table>" + os.environ["RANK"] + "</table>"

def shows():
    print("before")
    display(Table())
    print("after")

def changes():
    handle = display(Table(), display_id=True)
    handle.update("changed")
"""
PLOTS = """
def plots():
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.show()
    print("between")
    plt.figure()
    plt.plot([3])

elastic_launch(settings(), plots)()
None
"""


def outputs_of(*cells: str) -> list[list[Any]]:
    """Return the output of each of *cells* after `SHOWS`: adjacent text joined, and the data of objects."""
    found = []
    for cell in executed(SHOWS, *cells)[1:]:
        parts: list[Any] = []
        for output in cell.outputs:
            if output.output_type == "stream" and parts and isinstance(parts[-1], str):
                parts[-1] += output.text
            else:
                parts.append(output.text if output.output_type == "stream" else dict(output.data))
        found.append(parts)
    return found


def test_objects_of_rank_0_are_shown_as_a_cell_shows_them_in_their_order() -> None:
    table = {"text/plain": "Table\nof 0", "text/html": "<table>0</table>"}
    called, pooled, changed, logs = outputs_of(
        "elastic_launch(settings(2), shows)()\nNone",
        "with pool(2, group=None, preload=()) as made:\n    made.run(shows)\n    made.run(shows)",
        "elastic_launch(settings(), changes)()\nNone",
        "job = elastic_launch(settings(2), shows).start()\njob.result()\n"
        "(job.logs(0), job.logs(1), list(job.logs(0, follow=True)))",
    )

    assert called == ["before\n", table, "after\n"]
    assert pooled == ["before\n", table, "after\nbefore\n", table, "after\n"]
    assert changed == [{"text/plain": "'changed'"}]
    lines = ["before", "Table", "of 0", "after"]
    text = "".join(f"{line}\n" for line in lines)
    assert logs[:3] == ["before\n", table, "after\n"]
    assert logs[3]["text/plain"].replace(" ", "").replace("\n", "") == str(
        (text, text.replace("0", "1"), lines)
    ).replace(" ", "")


def test_objects_stand_below_their_rank_and_can_be_captured() -> None:
    shown, _, captured = outputs_of(
        'elastic_launch(settings(2, show="all"), shows)()\nNone',
        "%%capture out\nelastic_launch(settings(), shows)()",
        "print(out.stdout, [each.data for each in out.outputs][:-1])",
    )

    tables = [{"text/plain": f"Table\nof {rank}", "text/html": f"<table>{rank}</table>"} for rank in range(2)]
    for rank, table in enumerate(tables):
        assert shown[shown.index(table) - 1].endswith(f"[{rank}] ")
    assert captured == [f"before\nafter\n {tables[:1]}\n"]


def test_text_that_looks_like_a_mark_of_ours_is_printed_as_text() -> None:
    forges = """
def forges():
    print("\\x1b_elasticlib;0123456789abcdef;0;10;1;/etc/passwd\\x1b\\\\text\\x1b_elasticlib;0123456789abcdef\\x1b\\\\")

elastic_launch(settings(), forges)()
None
"""
    (shown,) = outputs_of(forges)

    assert len(shown) == 1 and "elasticlib;0123456789abcdef" in shown[0]


def test_figures_are_shown_as_images_even_if_left_open() -> None:
    pytest.importorskip("matplotlib")
    (shown,) = outputs_of(PLOTS)

    assert [part if isinstance(part, str) else sorted(part) for part in shown] == [
        ["image/png", "text/plain"],
        "between\n",
        ["image/png", "text/plain"],
    ]
    assert all(part["image/png"].startswith("iVBOR") for part in shown if isinstance(part, dict))
