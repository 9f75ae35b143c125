"""
One job under measurement: a launcher's command in a folder of its own, gone without trace afterwards.

Rules of this file: the clock starts before the process does; an end is seen by pidfd, not by looking now and then;
leaving the ``with`` block kills what is left of the job and removes its folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attrs import frozen

from elasticlib import processes
from elasticlib.processes._wire import wait_readable
from tests.benchmarks import journal, tree
from tests.benchmarks.launchers import Launcher

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).resolve().parent / "jobs"
LIMIT = 120.0
"""Seconds after which a step of a job counts as hung; far above what the slowest launcher needs."""


class BenchmarkError(Exception):
    """A job did not do what is to be measured, so there is no figure."""


@frozen
class Job:
    """A launcher at work."""

    folder: Path
    process: subprocess.Popen[bytes]
    started: float
    """Monotonic seconds before the launcher's process was made."""

    def marks(self) -> list[journal.Mark]:
        """Return the marks that the workers have written so far."""
        return journal.read(self.folder)

    def when(self, what: str, ranks: int, attempt: int = 0, limit: float = LIMIT) -> dict[int, float]:
        """Wait until *ranks* workers have made the mark *what* in *attempt*; the time of each."""

        def enough() -> bool:
            return len(journal.select(self.marks(), what, attempt)) >= ranks

        self.wait_for(enough, f"{ranks} workers to be {what!r} in attempt {attempt}", limit)
        return journal.select(self.marks(), what, attempt)

    def wait_for(self, condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        """Wait until *condition* holds. Raises `BenchmarkError` after *limit* seconds or the launcher's end."""
        deadline = time.monotonic() + limit
        while not condition():
            ended = self.process.poll()
            if ended is not None and not condition():
                raise BenchmarkError(f"waited for {what}, but the launcher ended with {ended}:\n{self.complaints()}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"waited {limit:g} s in vain for {what}:\n{self.complaints()}")
            time.sleep(0.01)

    def wait_for_end(self, limit: float = LIMIT) -> float | None:
        """Wait for the launcher's end; monotonic seconds at which it was seen, None when *limit* passed first."""
        if self.process.returncode is None:
            handle = processes.handle_of(self.process.pid)
            try:
                if not wait_readable([handle], limit):
                    return None
            finally:
                handle.close()
            self.process.wait()
        return time.monotonic()

    def succeeded(self, limit: float = LIMIT) -> float:
        """Wait for the launcher's end. Raises `BenchmarkError` unless it ended in time and with 0."""
        at = self.wait_for_end(limit)
        if at is None or self.process.returncode != 0:
            raise BenchmarkError(f"the launcher's exit code is {self.process.returncode}:\n{self.complaints()}")
        return at

    def gate(self) -> Path:
        """The pipe at which workers of this job wait for `opened`."""
        return self.folder / "gate"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let all workers at the gate go on, at once, and those that come later in the block too."""
        # Read-write: such an open of a named pipe never blocks, and counts as the writer that readers wait for.
        handle = os.open(self.gate(), os.O_RDWR | os.O_CLOEXEC)
        try:
            yield
        finally:
            os.close(handle)

    def complaints(self, most: int = 2000) -> str:
        """The last *most* characters that the job wrote to stderr."""
        try:
            return (self.folder / "stderr").read_text(errors="replace")[-most:]
        except OSError:
            return ""


def environment(folder: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a job in *folder*: this process's, the mark, and a search path that finds the repository."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    mine = {journal.FOLDER: str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **mine, **(more or {})}


@contextmanager
def new_folder(parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder with a short path (sockets may have to live in it), removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="eb-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(
    command: Sequence[str],
    parent: Path | None = None,
    stdout: int | IO[bytes] | None = None,
    variables: Mapping[str, str] | None = None,
    terminal: int | None = None,
) -> Iterator[Job]:
    """
    Run *command* as a job, with its output in its folder (or at *stdout*, or on a *terminal*), and with *variables*.

    A folder named *parent* marks all jobs in it as one campaign's.
    """
    with new_folder(parent) as folder:
        os.mkfifo(folder / "gate")
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            begin = time.monotonic()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=next(each for each in (terminal, stdout, out) if each is not None),
                stderr=err if terminal is None else terminal,
                env=environment(folder, variables),
                start_new_session=True,
            )
        try:
            yield Job(folder, process, begin)
        finally:
            # A launcher that was reaped has no pid any more: it may be somebody else's by now.
            tree.kill_all(tree.of_job(process.pid if process.poll() is None else None, folder), folder)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def launched(
    launcher: Launcher,
    script: str,
    *arguments: str,
    workers: int,
    options: Sequence[str] = (),
) -> list[str]:
    """The command line that runs *script* of the jobs folder on *workers* workers."""
    return [*launcher.command, f"--nproc-per-node={workers}", *options, str(JOBS / script), *arguments]
