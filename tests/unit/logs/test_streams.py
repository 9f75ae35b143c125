"""From the destinations of a round, whoever made them, to files that are there and followed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.errors import ConfigError, LogDirError, StartError
from elasticlib.logs import _tee
from elasticlib.logs._layout import destinations_of
from elasticlib.logs._streams import Duplicates, LogRounds, follow_streams, prepare_streams
from elasticlib.logs._tee import Tee
from elasticlib.spec import LogsDest, LogsSpecs, Std


class Spy(Tee):
    """A tee that records what it is to follow."""

    def __init__(self) -> None:
        super().__init__(lambda block: None, lambda block: None)
        self.followed: list[tuple[str, bytes, Std, bool]] = []

    def follow(
        self, path: str, prefix: bytes, std: Std, *, copy: object = None, verbatim: bool = False, bar: object = None
    ) -> None:
        self.followed.append((os.path.basename(path), prefix, std, copy is not None))


@pytest.fixture
def spy() -> Iterator[Spy]:
    spy = Spy()
    yield spy
    assert spy.finish()


@pytest.fixture
def dest(tmp_path: Path) -> LogsDest:
    paths = {name: str(tmp_path / name) for name in ("out0", "out1", "err0")}
    for path in paths.values():
        Path(path).touch()
    out, err = {0: paths["out0"], 1: paths["out1"]}, {0: paths["err0"]}
    return LogsDest(out, err, dict(out), dict(err), {}, str(tmp_path / "f_out"), str(tmp_path / "f_err"))


PREFIXES = {0: b"0:", 1: b"1:"}


def test_each_teed_file_is_followed_after_its_own_prefix(spy: Spy, dest: LogsDest) -> None:
    follow_streams(spy, dest, PREFIXES, Duplicates())

    assert [
        ("out0", b"0:", Std.OUT, False),
        ("out1", b"1:", Std.OUT, False),
        ("err0", b"0:", Std.ERR, False),
    ] == spy.followed
    assert not os.path.exists(dest.filtered_stdout)


def test_only_the_streams_that_filters_were_given_for_are_duplicated(spy: Spy, dest: LogsDest) -> None:
    follow_streams(spy, dest, PREFIXES, Duplicates([], ["x"]))

    assert {"out0": False, "out1": False, "err0": True} == {name: copied for name, _, _, copied in spy.followed}
    assert not os.path.exists(dest.filtered_stdout)
    assert os.path.exists(dest.filtered_stderr)


def test_the_files_of_matching_lines_are_closed_when_nothing_is_teed(
    spy: Spy, dest: LogsDest, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    dest.tee_stderrs.clear()
    duplicates = Duplicates(None, ["x"])

    with caplog.at_level(logging.WARNING):
        follow_streams(spy, dest, PREFIXES, duplicates)
        follow_streams(spy, dest, PREFIXES, duplicates)

    assert os.path.exists(dest.filtered_stderr)
    assert before == set(os.listdir("/proc/self/fd"))
    (record,) = caplog.records  # once for all rounds
    assert "duplicate_stderr_filters" in record.message
    assert "--tee 2" in record.message


@pytest.mark.parametrize(("name", "std"), [("stdout", Std.OUT), ("stderr", Std.ERR)])
def test_filters_without_a_file_for_their_lines_are_refused(spy: Spy, dest: LogsDest, name: str, std: Std) -> None:
    setattr(dest, f"filtered_{name}", "")
    duplicates = Duplicates(["x"], None) if std == Std.OUT else Duplicates(None, ["x"])

    with pytest.raises(ConfigError, match=rf"duplicate_{name}_filters=\['x'\] needs a file for the filtered lines"):
        follow_streams(spy, dest, PREFIXES, duplicates)
    assert [] == spy.followed


def test_a_file_that_streams_share_is_followed_once(spy: Spy, dest: LogsDest) -> None:
    dest.tee_stdouts[1] = dest.tee_stderrs[0] = dest.tee_stdouts[0]

    follow_streams(spy, dest, PREFIXES, Duplicates())

    assert [("out0", b"0:", Std.OUT, False)] == spy.followed


def test_destination_that_is_not_a_file_is_refused(spy: Spy, dest: LogsDest, tmp_path: Path) -> None:
    dest.tee_stdouts[1] = str(tmp_path)

    with pytest.raises(ConfigError, match=r"tee_stdouts\[1\]="):
        follow_streams(spy, dest, PREFIXES, Duplicates())


class Writes(LogsSpecs):
    """A specification that writes into the environments, as torch's own does."""

    root_log_dir = "/logs"

    def reify(self, envs: Any) -> LogsDest:
        envs[0].update(TORCHELASTIC_ERROR_FILE="/mine/error.json", MINE="1")
        return LogsDest(stdouts={0: ""}, error_files={0: "/other", 1: "/logs/1/error.json", 2: os.devnull})


def test_environments_that_a_specification_writes_are_the_workers() -> None:
    envs = {rank: {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": ""} for rank in range(3)}

    dest = LogRounds(Writes()).reify(envs)

    assert {
        0: {"RANK": "0", "TORCHELASTIC_ERROR_FILE": "/mine/error.json", "MINE": "1"},
        1: {"RANK": "1", "TORCHELASTIC_ERROR_FILE": "/logs/1/error.json"},
        2: {"RANK": "2", "TORCHELASTIC_ERROR_FILE": ""},
    } == envs
    assert {} == dest.stdouts


def test_preparing_creates_files_and_empties_those_of_earlier_rounds(dest: LogsDest, tmp_path: Path) -> None:
    Path(dest.stdouts[0]).write_text("of an earlier round")
    os.unlink(dest.stdouts[1])
    dest.stderrs[1] = os.devnull

    prepare_streams(dest)

    assert 0 == os.path.getsize(dest.stdouts[0])
    assert os.path.isfile(dest.stdouts[1])


def test_preparing_a_file_below_no_folder_is_refused_by_name(dest: LogsDest, tmp_path: Path) -> None:
    dest.stdouts[0] = str(tmp_path / "missing" / "out")

    with pytest.raises(LogDirError, match="missing/out"):
        prepare_streams(dest)


def test_destinations_of_a_torch_specification_are_translated() -> None:
    foreign = SimpleNamespace(
        stdouts={0: "", 1: "/logs/1/stdout.log"},
        stderrs={0: os.devnull, 1: ""},
        tee_stdouts={0: os.devnull, 1: "/logs/1/stdout.log"},
        tee_stderrs={0: os.devnull, 1: os.devnull},
        error_files={0: os.devnull, 1: "/logs/1/error.json"},
        filtered_stdout="/dev/null/filtered_stdout.log",
        filtered_stderr="/logs/filtered_stderr.log",
    )

    assert destinations_of(foreign) == LogsDest(
        stdouts={1: "/logs/1/stdout.log"},
        stderrs={0: os.devnull},
        tee_stdouts={1: "/logs/1/stdout.log"},
        error_files={1: "/logs/1/error.json"},
        filtered_stderr="/logs/filtered_stderr.log",
    )


def test_destinations_without_newer_fields_or_with_paths_are_read() -> None:
    foreign = SimpleNamespace(stdouts={0: Path("/logs/out")}, stderrs={}, tee_stdouts=None, error_files={})

    assert destinations_of(foreign) == LogsDest(stdouts={0: "/logs/out"})


def test_our_own_destinations_stay_as_they_are(dest: LogsDest) -> None:
    assert dest == destinations_of(dest)


def test_a_tee_whose_thread_cannot_start_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stdout.log").touch()

    def refuse(_: threading.Thread) -> threading.Thread:
        raise StartError("no thread can be started")

    monkeypatch.setattr(_tee, "start_thread", refuse)
    tee, before = _tee.Tee(lambda _: None, lambda _: None), os.listdir("/proc/self/fd")
    for _ in range(2):
        with pytest.raises(StartError, match="no thread"):
            tee.follow(str(tmp_path / "stdout.log"), b"", Std.OUT)

    assert before == os.listdir("/proc/self/fd")
