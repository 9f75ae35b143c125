"""
The terminal under ``--progress``: the job's rows at its foot, and above them output and log messages.

Rules of this file: the package ``rich`` draws, and is imported only for drawing. A closed terminal does
not affect the job. A row contains only printable text, for any output of a worker. If there are more
ranks than rows, the failed ranks come first, then the slowest.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from attrs import frozen

from elasticlib._wording import counted, duration
from elasticlib.errors import ConfigError
from elasticlib.job import ENDED_STATES, JobStatus, RankStatus

if TYPE_CHECKING:
    import rich.console

_STYLES = {"running": "green", "succeeded": "bold green", "stopped": "yellow", "failed": "red"}
_PER_SECOND = 4
"""Number of drawings of the rows."""
BETWEEN_BLOCKS = 0.05
"""Seconds between two blocks of output above the rows; each block redraws the rows."""
_SILENT = 10.0
"""Seconds after which a row shows the age of its last step."""
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|[@-Z\\-_])")


def why_not(stream: TextIO | None, environ_term: str | None) -> str:
    """
    Return the reason why no rows can be drawn on *stream*; empty if they can.

    Raises `ConfigError` if ``rich`` is not installed.
    """
    if stream is None or not stream.isatty():
        return "stderr is not a terminal"
    if environ_term in (None, "", "dumb", "unknown"):
        return f"TERM={environ_term or ''} is not a terminal that can move its cursor"
    try:
        import rich.live  # noqa: F401
    except ImportError:
        raise ConfigError("--progress needs the package rich: pip install rich") from None
    return ""


@contextlib.contextmanager
def progress_screen() -> Iterator[Callable[[Callable[[], JobStatus]], contextlib.AbstractContextManager[None]]]:
    """
    Print this program's terminal output above the rows within the block.

    Yields a function that takes a job's ``status`` and returns a context manager, which shows the rows. The
    last rows stay on the terminal.
    """
    from rich.console import Console

    terminal, output = sys.stderr, sys.stdout
    console = Console(file=terminal, highlight=False)
    above = _Above(console)
    handlers = [
        each
        for each in logging.getLogger("elasticlib").handlers
        if isinstance(each, logging.StreamHandler) and each.stream is terminal
    ]
    with contextlib.ExitStack() as until_end:
        # A handler keeps the stream that it was made with, whatever sys.stderr becomes.
        for handler in handlers:
            handler.setStream(above)
            until_end.callback(handler.setStream, terminal)

        until_end.enter_context(contextlib.redirect_stderr(above))

        # A pipe or a file gets the output unchanged.
        if output is not None and output.isatty():
            until_end.enter_context(contextlib.redirect_stdout(above))
        # Runs first at the end: a line without an end still appears above the rows.
        until_end.callback(above.end)
        yield lambda status: _shown(console, status)


@contextlib.contextmanager
def _shown(console: rich.console.Console, status: Callable[[], JobStatus]) -> Iterator[None]:
    from rich.live import Live

    def draw() -> rich.console.RenderableType:
        # At most half of the terminal: the rest is for the output above.
        return _drawn(picture_of(status(), console.height // 2 - 2))

    live = Live(
        get_renderable=draw,
        console=console,
        refresh_per_second=_PER_SECOND,
        # The streams are redirected already, together with the handlers of the log.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with contextlib.suppress(OSError):
        live.start(refresh=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            live.stop()


def _drawn(picture: JobPicture) -> rich.console.RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def one_line(text: str, style: str = "") -> Text:
        return Text(text, style, no_wrap=True, overflow="ellipsis")

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    has_bars = any(row.share is not None for row in picture.rows)
    if has_bars:
        table.add_column(width=12)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, max_width=40)
    table.add_column(no_wrap=True, ratio=1)
    for row in picture.rows:
        bar = [Text() if row.share is None else ProgressBar(1.0, row.share, width=12)] if has_bars else []
        state = one_line(row.shown_state, _STYLES.get(row.state, "dim"))
        cells = [one_line(row.rank), state, *bar, one_line(row.steps), one_line(row.metrics), one_line(row.line, "dim")]
        table.add_row(*cells)

    rest = [one_line(picture.rest, "dim")] if picture.rest else []
    return Group(one_line(picture.head, "bold"), table, *rest)


class _Above(io.TextIOBase):
    """A stream whose whole lines appear above the rows, with colours but without other escape sequences."""

    def __init__(self, console: rich.console.Console) -> None:
        from rich.ansi import AnsiDecoder

        self._console = console
        self._decoder = AnsiDecoder()
        self._open = ""
        """Line without an end."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *whole, self._open = (self._open + text).split("\n")
        self._print(whole)
        return len(text)

    def end(self) -> None:
        """Print a last line without an end."""
        left, self._open = self._open, ""
        with contextlib.suppress(OSError):
            self._print([left] if left else [])

    def _print(self, lines: list[str]) -> None:
        from rich.text import Text

        if lines:
            # As on a terminal: text after a carriage return replaces the line.
            seen = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            text = Text("\n").join([self._decoder.decode_line(line) for line in seen])
            self._console.print(text, soft_wrap=True)


# The rows, as data.


@frozen
class Row:
    """The row of one rank."""

    rank: str
    state: str
    """State as in `RankStatus`."""
    shown_state: str
    """State with the exit status of a failed rank."""
    share: float | None
    """Completed share of its steps, 0 to 1; None if it did not report their number."""
    steps: str
    metrics: str
    line: str
    """Last line of its output."""


@frozen
class JobPicture:
    """The present picture of a job."""

    head: str
    rows: Sequence[Row]
    rest: str
    """Text about the ranks without a row; empty if there are none."""


def picture_of(status: JobStatus, room: int) -> JobPicture:
    """Return the picture of *status* with at most *room* rows, but at least one."""
    ranks = sorted(status.ranks, key=lambda each: each.rank)
    kept, left = ranks, []
    if len(ranks) > max(1, room):
        by_need = sorted(ranks, key=lambda each: (each.state != "failed", _steps_done(each), each.rank))
        kept = sorted(by_need[: max(1, room)], key=lambda each: each.rank)
        left = by_need[max(1, room) :]
    return JobPicture(_head(status), [_row(each) for each in kept], _rest(left))


def _head(status: JobStatus) -> str:
    when = "after" if status.state in ENDED_STATES else "for"
    parts = [f"{printable(status.name)}: {status.state} {when} {duration(status.seconds)}"]
    if status.restarts:
        parts.append(f"restart {status.restarts}")
    if status.nodes > 1:
        parts.append(f"node {status.ranks[0].node if status.ranks else '?'} of {status.nodes}")
    head = ", ".join(parts)
    return f"{head}: {printable(status.why)}" if status.why else head


def _row(rank: RankStatus) -> Row:
    *_, shown_state, _, steps, metrics, _ = rank.cells()
    share = None
    if rank.total and rank.step is not None:
        share = min(1.0, max(0.0, rank.step / rank.total))
    if rank.state == "running" and rank.age is not None and rank.age > _SILENT:
        metrics = f"{metrics} ({duration(rank.age)} ago)".strip()
    return Row(str(rank.rank), rank.state, shown_state, share, steps, printable(metrics), printable(rank.last_line))


def _steps_done(rank: RankStatus) -> float:
    return -1.0 if rank.step is None else rank.step


def _rest(left: Sequence[RankStatus]) -> str:
    if not left:
        return ""
    who = counted(len(left), "more rank")
    steps = [rank.step for rank in left if rank.step is not None]
    if not steps:
        return f"and {who}"
    at = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    return f"and {who}, at {at}"


def printable(text: str) -> str:
    """Return *text* in one line, without characters that control a terminal."""
    return "".join(each if each.isprintable() else " " for each in _ESCAPE.sub("", text)).strip()
