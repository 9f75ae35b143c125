"""Display of ``--progress`` for a job, and the options that exclude it."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from attrs import evolve
from hypothesis import given, strategies as st

from elasticlib import Std
from elasticlib.cli._parser import Parser
from elasticlib.cli._request import Request, request_of
from elasticlib.cli._terminal import picture_of, printable
from elasticlib.errors import ConfigError
from elasticlib.job._status import JobStatus, RankStatus

RANK = RankStatus(0, 0, 0, "host", "running", 7, None, 0, 3, 12, {"loss": 0.25}, 0.1, "a line")
JOB = JobStatus("train.py", "running", "", 12.4, 0, 0, 1, (RANK,))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ranks(*steps: int | None) -> tuple[RankStatus, ...]:
    return tuple(evolve(RANK, rank=rank, local_rank=rank, step=step) for rank, step in enumerate(steps))


def requested(*options: str, terminal: io.StringIO | None = None, term: str = "xterm") -> Request:
    environ = {"TERM": term}
    return request_of(Parser(environ).parse_args([*options, "a.py"]), environ, terminal or Terminal())


def test_row_shows_state_step_metrics_and_last_line() -> None:
    """A row is a rank: number, state, share and number of its steps, metrics, last line."""
    (row,) = picture_of(JOB, 5).rows
    assert ("0", "running", 0.25, "3/12", "loss=0.25", "a line") == (
        *(row.rank, row.shown_state, row.share, row.steps),
        *(row.metrics, row.line),
    )


def test_head_shows_restarts_and_the_reason() -> None:
    """The head has what is true of the whole group: state, time, restarts, node and reason."""
    assert picture_of(JOB, 5).head == "train.py: running for 12 s"
    later = evolve(JOB, state="stopping", seconds=4000.0, restarts=2, nodes=3, why="rank 1 failed")
    assert picture_of(later, 5).head == "train.py: stopping for 1 h 6 min, restart 2, node 0 of 3: rank 1 failed"


def test_row_shows_time_since_the_last_step_of_a_silent_rank() -> None:
    """After ten seconds without a step the row has the time since the last one; never once the rank has ended."""
    silent = evolve(RANK, age=75.0)
    assert picture_of(evolve(JOB, ranks=(silent,)), 5).rows[0].metrics == "loss=0.25 (1 min 15 s ago)"
    ended = evolve(silent, state="succeeded")
    assert picture_of(evolve(JOB, ranks=(ended,)), 5).rows[0].metrics == "loss=0.25"


def test_failed_and_slowest_ranks_are_shown_when_rows_are_few() -> None:
    """Of more ranks than rows those are shown that a reader must see, by rank, and the rest is counted."""
    several = [*ranks(9, 4, 8, 7, 2, 9)]
    several[5] = evolve(several[5], state="failed", exitcode=1)
    picture = picture_of(evolve(JOB, ranks=tuple(several)), 3)
    assert ["1", "4", "5"] == [row.rank for row in picture.rows]
    assert picture.rest == "and 3 more ranks, at steps 7 to 9"
    assert picture_of(evolve(JOB, ranks=ranks(None, None)), 0).rest == "and 1 more rank"


@given(st.text(), st.integers(-3, 30), st.lists(st.none() | st.integers(0, 99), max_size=20))
def test_row_is_one_printable_line_for_any_worker_output(text: str, room: int, steps: list[int | None]) -> None:
    """No row moves the cursor, and none is lost without being counted."""
    shown = tuple(evolve(each, last_line=text, metrics={text: 1.0}) for each in ranks(*steps))
    picture = picture_of(evolve(JOB, name=text, why=text, ranks=shown), room)
    assert len(picture.rows) == min(len(steps), max(1, room))
    for row in picture.rows:
        assert (row.line + row.metrics).isprintable()
    assert picture.head.isprintable()
    assert bool(picture.rest) == (len(steps) > len(picture.rows))


def test_printable_text_leaves_out_colours_and_cursor_moves() -> None:
    """Escape sequences are left out whole."""
    assert printable("\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07end\r") == "red end"


def test_progress_redirects_output_to_files_and_shows_local_rank_0() -> None:
    """Nobody but the launcher writes to the terminal; the user's own choice of what is shown holds."""
    request = requested("--progress")
    specs = request.config.logs_specs
    assert request.progress and specs is not None
    assert (Std.ALL, Std.ALL, {0}) == (specs._redirects, specs._tee, specs._local_ranks_filter)
    chosen = requested("--progress", "--tee", "2").config.logs_specs
    assert chosen is not None and (Std.ALL, Std.ERR) == (chosen._redirects, chosen._tee)


@pytest.mark.parametrize(
    "options",
    [("--redirects", "1"), ("-r", "0:3"), ("--logs-specs", "other"), ("--log-dir", "/dev/null")],
)
def test_option_that_leaves_output_on_the_terminal_is_refused(options: tuple[str, ...]) -> None:
    """An option that would have workers write across the rows is named, and what to do."""
    with pytest.raises(ConfigError, match=r"^--progress .*leave (one of the two options|--redirects|-r) out$"):
        requested("--progress", *options)


@pytest.mark.parametrize(
    ("terminal", "term", "why"),
    [(io.StringIO(), "xterm", "stderr is not a terminal"), (Terminal(), "dumb", "TERM=dumb is not a terminal")],
)
def test_progress_is_off_with_a_warning_without_a_terminal(
    terminal: io.StringIO, term: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a batch job the option changes nothing, and says why; rich is not needed then."""
    with caplog.at_level(logging.WARNING, "elasticlib"):
        request = requested("--progress", terminal=terminal, term=term)
    assert not request.progress
    assert request.config.logs_specs == requested().config.logs_specs
    assert f"no effect: --progress ({why}" in caplog.text


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing package and its install command, before anything is started."""
    for name in ("rich", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install rich"):
        requested("--progress")
