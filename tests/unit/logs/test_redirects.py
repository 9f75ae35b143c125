"""A stream sent to a file for a while; what C code writes is seen in the process tests."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from elasticlib.elastic.multiprocessing.api import get_std_cm
from elasticlib.errors import ConfigError
from elasticlib.logs._redirects import redirect, redirect_stderr, redirect_stdout


@contextlib.contextmanager
def stream(tmp_path: Path) -> Iterator[TextIO]:
    """Stands for this process' stdout and stderr, with a descriptor of its own (pytest sets its own before a test)."""
    with open(tmp_path / "console", "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        yield file


def open_files() -> dict[str, str]:
    """Return the open files of this process, without those that earlier tests left unclosed."""
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def console(tmp_path: Path) -> str:
    return (tmp_path / "console").read_text()


@pytest.mark.parametrize("way", [redirect_stdout, redirect_stderr])
def test_redirect_writes_to_the_file_and_restores_the_stream(
    way: Callable[[str], contextlib.AbstractContextManager[None]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("something long from before")
    with stream(tmp_path) as out:
        open_now = open_files()
        out.write("before ")
        with get_std_cm(str(tmp_path / "file"), way):
            out.write("within")
        out.write("after")
        out.flush()
        open_then = open_files()

    assert console(tmp_path) == "before after"
    assert (tmp_path / "file").read_text() == "within"
    assert open_then == open_now


def test_stream_is_restored_after_an_error(tmp_path: Path) -> None:
    with stream(tmp_path) as out:
        with pytest.raises(KeyError), redirect_stdout(str(tmp_path / "file")):
            raise KeyError
        out.write("after")
        out.flush()

    assert console(tmp_path) == "after"


def test_a_stream_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="standard stream 'stdin' is unknown: give one of stdout, stderr"):
        with redirect("stdin", str(tmp_path / "file")):
            pass
    assert not (tmp_path / "file").exists()


def test_a_file_that_cannot_be_opened_changes_nothing(tmp_path: Path) -> None:
    with stream(tmp_path) as out:
        open_now = open_files()

        with pytest.raises(FileNotFoundError), redirect_stdout(str(tmp_path / "none" / "file")):
            pass
        out.write("still here")
        out.flush()
        open_then = open_files()

    assert console(tmp_path) == "still here"
    assert open_then == open_now


def test_a_python_stream_without_a_descriptor_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)

    with redirect_stdout(str(tmp_path / "file")):
        print("for the cell")
        os.system("echo from a child")

    assert cell.getvalue() == "for the cell\n"
    assert (tmp_path / "file").read_text() == "from a child\n"


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing_is_redirected_if_no_file_is_named(nothing: str | None, tmp_path: Path) -> None:
    with stream(tmp_path) as out:
        with get_std_cm(nothing, redirect_stdout):
            out.write("on the console")
        out.flush()

    assert console(tmp_path) == "on the console"
