"""Output of other machines' workers in the streams of the caller."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest

from elasticlib.logs import _old_folders
from elasticlib.remote import _shown_output
from elasticlib.remote._shown_output import STDERR, STDOUT, ShownOutput


def begun() -> ShownOutput:
    output = ShownOutput()
    output.begin()
    return output


def test_a_programs_streams_get_their_own_output(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(_shown_output, "is_stdout_replaced", lambda: False)
    output = begun()
    output.show(STDOUT + b"out\n")
    output.show(STDERR + b"err\n")
    output.end(bool)

    assert ("out\n", "err\n") == capsys.readouterr()


def test_a_replaced_stream_gets_both_in_their_order_also_later() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        output = begun()
    for piece in (STDOUT + b"one\n", STDERR + b"two\n", STDOUT + "three ü"[:7].encode()[:-1]):
        output.show(piece)
    output.show(STDOUT + "ü\n".encode()[1:])
    output.end(bool)

    assert "one\ntwo\nthree ü\n" == stream.getvalue()
    assert not output.is_full


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    """The stream of a cell that shows ten characters."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("elasticlib.notebook._callers_stream.in_kernel", lambda: True)
    monkeypatch.setattr("elasticlib.notebook._callers_stream._MOST_SHOWN", 10)
    monkeypatch.setattr(_shown_output, "is_stdout_replaced", lambda: True)
    return io.StringIO()


def output_in(cell: io.StringIO) -> ShownOutput:
    """The output of a call in *cell*."""
    with contextlib.redirect_stdout(cell):
        return begun()


def test_output_that_a_cell_has_shown_leaves_no_file(cell: io.StringIO, tmp_path: Path) -> None:
    output = output_in(cell)
    output.show(STDOUT + b"short\n")
    output.end(bool)
    output.end(bool)

    assert "short\n" == cell.getvalue()
    assert [] == os.listdir(tmp_path)


def test_a_cell_names_the_file_with_the_output_that_it_has_not_shown(cell: io.StringIO, tmp_path: Path) -> None:
    output = output_in(cell)
    for number in range(9):
        output.show(STDOUT + b"line %d\n" % number)
    output.end(bool)

    [folder] = tmp_path.iterdir()
    assert "".join(f"line {number}\n" for number in range(9)) == (folder / "output.log").read_text()
    assert str(folder / "output.log") in cell.getvalue()


def test_old_files_with_the_output_of_cells_are_removed(
    cell: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_old_folders, "KEPT", 1)
    monkeypatch.setattr(_old_folders, "_looked", {})
    monkeypatch.setattr(_old_folders, "_has_ended", lambda folder: True)
    monkeypatch.setattr(_old_folders, "wall_time", lambda: time.time() + 10 * _old_folders.YOUNGEST)
    for _ in range(3):
        _old_folders._looked.clear()
        output = output_in(cell)
        output.show(STDOUT + b"more than ten characters\n")
        output.end(bool)

    assert 1 == len(os.listdir(tmp_path))


def test_a_file_of_the_job_is_named_in_place_of_another_one(cell: io.StringIO, tmp_path: Path) -> None:
    output = output_in(cell)
    output.name_file("/shared/output")
    output.show(STDOUT + b"more than ten characters\n")
    output.end(bool)

    assert output.is_full and "/shared/output" in cell.getvalue()
    assert [] == os.listdir(tmp_path)


def test_a_full_disk_is_named_and_changes_nothing_else(cell: io.StringIO, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-folder")
    output = output_in(cell)
    output.show(STDOUT + b"more than ten characters\n")
    output.end(bool)

    assert "no file (No such file or directory)" in cell.getvalue()
