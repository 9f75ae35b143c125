"""
Acts of the chaos campaign in which nothing of a job stands still alone: it sleeps as a whole, is slow, or imports long.

Nothing may be replaced, and no restart be spent. See `chaos`, of which this is ``--asleep``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from tests.benchmarks import tree
from tests.benchmarks.job import JOBS, Job, new_folder, started

HOWS = ("whole", "one by one", "import", "load")
"""
The whole job is stopped and continued at once; process by process, as ``scontrol suspend`` and freezers do it; its fork
server is at an import that holds the interpreter's lock; the machine has thirty busy loops more.
"""
LONGEST = {"whole": 45.0, "one by one": 45.0, "import": 60.0, "load": 20.0}
"""Seconds that it lasts: beyond those after which a helper that stands still is replaced."""
LOOPS = 30
LIMIT = 240.0
REPLACED = ("and was killed", "is started again", "killed by")

_IMPORT = """
import ctypes
ctypes.PyDLL(None).usleep({microseconds})  # a call that keeps the interpreter's lock
"""


@frozen
class Sleep:
    """Kind, phase, moment and duration of a disturbance that keeps a job from running."""

    how: str
    phase: str
    moment: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.how:10} {self.phase:8} {self.moment:.2f} {self.seconds:4.0f} s"


def sleeps(count: int, seed: int) -> list[Sleep]:
    """*count* of them in the order of *seed*, each kind as often as any other."""
    draw = random.Random(seed)
    kinds = [(how, phase) for how in HOWS for phase in ("start", "training")]
    drawn = [kinds[index % len(kinds)] for index in range(count)]
    draw.shuffle(drawn)
    return [Sleep(how, phase, draw.random(), draw.uniform(2.0, LONGEST[how])) for how, phase in drawn]


def perform(sleep: Sleep, up: float) -> tuple[str, str]:
    """Run a job with this *sleep*; return its fault (empty if there is none) and its stderr."""
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "elasticlib.run", "--max-restarts=1", "--nproc-per-node=2"]
        variables = {"OMP_NUM_THREADS": "1"}
        if sleep.how == "import":
            folder = Path(stack.enter_context(_module(sleep.seconds)))
            variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        command += ["--preload", "takes_long" if sleep.how == "import" else "", str(JOBS / "chaos_worker.py")]
        job = stack.enter_context(started(command, variables=variables))
        if sleep.phase == "training" and sleep.how != "import":
            _await_up(job)
        else:
            time.sleep(up * sleep.moment)
        if sleep.how in ("whole", "one by one"):
            _stop_and_continue(job, sleep)
        elif sleep.how == "load":
            stack.enter_context(_busy())
        try:
            code = job.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"hung for {LIMIT:g} s", job.complaints()
        return _judge(code, max((mark.attempt for mark in job.marks()), default=0), job.complaints()), job.complaints()


def _judge(code: int, restarts: int, text: str) -> str:
    if code or restarts:
        return f"the job ended with {code} after {restarts} restarts"
    return next((f"something was replaced: {phrase!r}" for phrase in REPLACED if phrase in text), "")


def _await_up(job: Job) -> None:
    deadline = time.monotonic() + LIMIT
    while not any(mark.what == "up" for mark in job.marks()):
        if time.monotonic() > deadline or job.process.poll() is not None:
            return
        time.sleep(0.01)


def _stop_and_continue(job: Job, sleep: Sleep) -> None:
    """Stop all processes of the job, those too that come meanwhile, and continue them after its seconds."""
    draw = random.Random(sleep.seconds)
    gap = 0.0 if sleep.how == "whole" else 0.1
    stopped: list[tree.Process] = []
    while new := [each for each in tree.of_job(job.process.pid, job.folder) if each not in stopped]:
        draw.shuffle(new)
        _send(new, signal.SIGSTOP, gap)
        stopped += new
    time.sleep(sleep.seconds)
    draw.shuffle(stopped)
    _send(stopped, signal.SIGCONT, gap)


def _send(some: Sequence[tree.Process], signum: int, gap: float) -> None:
    for each in some:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signum)
        time.sleep(gap)


@contextlib.contextmanager
def _module(seconds: float) -> Iterator[str]:
    with new_folder() as folder:
        (folder / "takes_long.py").write_text(_IMPORT.format(microseconds=int(seconds * 1e6)))
        yield str(folder)


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
