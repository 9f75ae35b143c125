"""
The client's side of a call on a batch system: submit it, show its output, wait for its files, cancel it.

Rules of this file: files of the nodes are looked at often, and the batch system is asked seldom. Only its word, or a
node's outcome, ends the call. An interrupt or a stop cancels the job, and returns once its processes are gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from elasticlib._clock import monotonic
from elasticlib.engines import (
    AgentEnded,
    BatchEngine,
    RaiseError,
    ReturnResults,
    SlurmJob,
    cancel_job,
    slurm_job,
    steps_of,
)
from elasticlib.errors import SignalException, StartError
from elasticlib.job import Results
from elasticlib.processes import wait_readable
from elasticlib.remote._batch_decision import decide
from elasticlib.remote._batch_files import ERRORS, KILL, OUTPUT, BatchFolder, Submission
from elasticlib.remote._call import error_of_place, merged_results, pack_call, read_outcome
from elasticlib.remote._remote_launch import least_nodes
from elasticlib.remote._shown_output import STDERR, STDOUT, ShownOutput
from elasticlib.remote._whole_lines import WholeLines
from elasticlib.remote._workers_of_batch import WorkersOfBatch
from elasticlib.spec import Entrypoint, LaunchConfig
from elasticlib.workers import HandledSignals, StopRequest, interruption, parse_signals

if TYPE_CHECKING:
    from elasticlib.job import Job

_log = logging.getLogger("elasticlib")
_LOOK_SECONDS = 0.1
_BEHIND_SECONDS = 0.02
_ASK_SECONDS = 5.0
_SOON_SECONDS = 0.5
"""Seconds between questions at the end of a run."""
_LATE_SECONDS = 15.0
"""Seconds for which files of a job that is over may appear late: network file systems keep old lists of files."""
_WITH_FILES = ("COMPLETED", "FAILED", "UNKNOWN")
"""States of jobs whose nodes have written files before."""
_END_SECONDS = 10.0
_MOST_OUTPUT = 2**20
"""Bytes of a file that are shown at a time."""


class BatchLaunch:
    """A checked launch on a batch system, which can run once. *begin* submits it, or finds it."""

    quit_shows_stacks = False
    outlives_program = True
    folder = ""

    def __init__(
        self, begin: Callable[[], Submission], title: str, grace: float, signums: tuple[signal.Signals, ...]
    ) -> None:
        self.title, self.grace, self.signums = title, grace, signums
        self._begin = begin
        self._output = ShownOutput()

    def abandon(self) -> None:
        """Release nothing: nothing was submitted."""

    def __call__(self, job: Job) -> Results:
        """Run the job to its end, and return the results of all ranks."""
        with HandledSignals(self.signums, job.inbox), contextlib.ExitStack() as stack:
            self._output.begin()
            stack.callback(self._output.end, job.inbox.drain)
            watch = _BatchWatch(self._begin(), job, self.grace, self._output)
            stack.callback(watch.end)
            return watch.to_its_end()


def batch_launch(
    engine: BatchEngine,
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    title: str,
    grace: float,
) -> BatchLaunch:
    """Return the launch of a call on *engine*. Raises `ConfigError` or `PicklingError`."""
    least = least_nodes(config, engine)
    # The token does not go through the folder.
    sent = evolve(config, token=None, min_nodes=least, max_nodes=engine.nodes)
    packed = pack_call(sent, entrypoint, args, kwargs)
    begin = partial(engine.submit, title, packed, config)
    return BatchLaunch(begin, title, grace, parse_signals(config.signals_to_handle))


@define
class _GrowingFile:
    """A file of output, which is shown as it grows."""

    path: str
    stream: bytes
    _output: ShownOutput
    _read: int = 0
    _lines: WholeLines = field(factory=WholeLines)

    def skip(self) -> None:
        """Leave out the output so far."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            self._read = file.seek(0, 2)

    def show(self) -> bool:
        """Show new output; return True if there may be more."""
        if self._output.is_behind:
            return True
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(self._read)
            data = file.read(_MOST_OUTPUT)
            self._read += len(data)
            # A line that nobody has continued since the last look is shown without its end.
            text = self._lines.add(data) if data else self._lines.rest()
            if text:
                self._output.show(self.stream + text)
            return len(data) == _MOST_OUTPUT
        return False


class _Outcomes:
    """The outcomes of nodes that a job's folder has, of all runs of job *number*."""

    def __init__(self, folder: BatchFolder, number: str) -> None:
        self._folder, self._number = folder, number
        self._packed: dict[tuple[int, int], bytes] = {}
        self._read: dict[tuple[int, int], AgentEnded] = {}
        self._refused = set[str]()

    def read(self) -> None:
        """Read outcomes that are new; one that cannot be read is logged once."""
        for place, name in self._folder.results().items():
            if place in self._read or name in self._refused:
                continue
            try:
                packed = self._folder.read(name)
                self._read[place] = read_outcome(packed).of_agent(place[1])
            # The next look may find it readable.
            except OSError:
                continue
            except (ValueError, KeyError, TypeError) as error:
                self._refused.add(name)
                _log.warning("a result of job %s is ignored: %s", self._number, error)
            else:
                self._packed[place] = packed

    def restarts(self) -> int:
        """Return the restarts of the job before the last run with an outcome."""
        return max((restarts for restarts, _ in self._read), default=0)

    def of_run(self, run: int) -> list[AgentEnded]:
        """Return the outcomes of the run after *run* restarts."""
        return [outcome for (restarts, _), outcome in self._read.items() if restarts == run]

    def packed(self, run: int) -> dict[int, bytes]:
        """Return the outcomes of the run after *run* restarts as the nodes have packed them, by node."""
        return {node: data for (restarts, node), data in self._packed.items() if restarts == run}


class _BatchWatch:
    """One submission, until its end."""

    def __init__(self, submission: Submission, job: Job, grace: float, output: ShownOutput) -> None:
        self._submission, self._job, self._grace = submission, job, grace
        self._files = submission.folder
        self._output = output
        output.name_file(self._files.file(OUTPUT))
        self._growing = (
            _GrowingFile(self._files.file(OUTPUT), STDOUT, output),
            _GrowingFile(self._files.file(ERRORS), STDERR, output),
        )
        if submission.is_attached:
            for each in self._growing:
                each.skip()
        self._outcomes = _Outcomes(self._files, submission.number)
        self._seen = SlurmJob(submission.number)
        self._ask_at = -math.inf
        self._over_since = math.inf
        self._has_ended = False
        """True if the job was cancelled, or has its outcome."""
        job.note_engine({"engine": "slurm", "job_id": submission.number, "folder": self._files.path})
        silence = (
            f"the workers of Slurm job {submission.number} do not answer this program: "
            f"read their output in {self._files.file(OUTPUT)} and {self._files.file(ERRORS)}"
        )
        self._workers = WorkersOfBatch(self._files, submission.record.nodes, silence)
        job.attach_elsewhere(self._workers)

    def to_its_end(self) -> Results:
        """Return the results of all ranks, or raise the error of the job."""
        decision = None
        while decision is None:
            for item in self._next(_LOOK_SECONDS):
                self._check_stop(item)
            decision = self._turn()
        return self._conclude(decision)

    def end(self) -> None:
        """End a job that this client has submitted, and does not wait for any more."""
        if not (self._submission.is_attached or self._has_ended or self._is_over()):
            self._cancel(self._grace)
        # An interrupt of a client that has attached leaves the job.
        self._workers.end(is_over=self._is_over() or not self._submission.is_attached)

    def _next(self, seconds: float) -> list[object]:
        inbox = self._job.inbox
        wait_readable([inbox], seconds)
        return inbox.drain()

    # The files and Slurm's view.

    def _turn(self) -> RaiseError | ReturnResults | None:
        self._show_output()
        self._outcomes.read()
        self._ask()
        is_over = self._is_over()
        decision = decide(self._of_last_run(), self._submission.record.nodes, is_over=is_over)
        return self._without_outcome() if decision is None and is_over else decision

    def _show_output(self) -> bool:
        """Show new output; return True if there may be more."""
        return any([file.show() for file in self._growing])

    def _show_rest(self) -> None:
        """Show all output of a job that writes no more, or until a signal if the stream takes none."""
        while self._show_output():
            if self._output.is_behind and _has_signal(self._next(_BEHIND_SECONDS)):
                return
        # The last line may have no end.
        self._show_output()

    def _restarts(self) -> int:
        """Return the restarts of the job before its last run."""
        return max(self._seen.restarts, self._outcomes.restarts())

    def _of_last_run(self) -> list[AgentEnded]:
        return self._outcomes.of_run(self._restarts())

    def _ask(self) -> None:
        """Ask Slurm for the state of the job, if it is time."""
        now = monotonic()
        if now < self._ask_at:
            return
        seen = slurm_job(self._submission.number)
        # Without an answer the last one counts.
        if seen.state:
            if seen.may_never_start and seen.reason != self._seen.reason:
                _log.warning("%s may never start: its reason is explained in `man squeue`", seen)
            self._seen = seen
        self._job.note_engine({"state": self._seen.state, "reason": self._seen.reason})
        self._workers.note_state(self._restarts(), is_pending=self._seen.is_pending)
        is_soon = self._files.has_ended(self._restarts())
        self._ask_at = monotonic() + (_SOON_SECONDS if is_soon else _ASK_SECONDS)

    def _is_over(self) -> bool:
        """Return True if no process of the call is left."""
        script = self._submission.script
        if script is not None:
            return script.poll() is not None
        has_ended = self._files.has_ended(self._restarts())
        # Slurm lists a job for some moments after its script has ended.
        if has_ended and not self._seen.is_over:
            self._ask_at = min(self._ask_at, monotonic() + _SOON_SECONDS)
        return self._seen.is_over or (has_ended and self._submission.record.is_step)

    def _without_outcome(self) -> RaiseError | None:
        """Return the error of a job that is over without an outcome; None while files may be late."""
        if self._submission.is_attached and not os.path.isdir(self._files.path):
            return RaiseError(
                f"the program that submitted Slurm job {self._submission.number} has its results: "
                f"it has removed {self._files.path}"
            )
        now = monotonic()
        self._over_since = min(self._over_since, now)
        is_late = now >= self._over_since + _LATE_SECONDS
        if not is_late and self._may_have_files():
            return None

        present = {outcome.place for outcome in self._of_last_run()}
        missing = sorted(set(range(self._submission.record.nodes)) - present)
        why = f"{self._seen} is over, without an outcome of nodes {missing}"
        if present:
            # A node keeps its results until the others have ended.
            why = f"{why}, whose results were lost with their machines: let workers write to files what must stay"
        if os.path.exists(self._files.file(OUTPUT)):
            return RaiseError(f"{why}; its output is in {self._files.path}")
        return RaiseError(f"{why}, and without output in {self._files.path}: give a folder that all nodes share")

    def _may_have_files(self) -> bool:
        """Return True if nodes may have written files before the job's end."""
        return self._submission.script is None and self._seen.state in _WITH_FILES

    # The end.

    def _check_stop(self, item: object) -> None:
        """Cancel the job and raise, if *item* asks for its end."""
        if isinstance(item, int):
            raise self._interrupted(item)
        if isinstance(item, StopRequest):
            self._cancel(self._grace if item.grace is None else item.grace)
            raise SignalException(item.why, signal.SIGTERM)

    def _interrupted(self, signum: int) -> SignalException:
        """Return the exception for a signal; it cancels the job, unless another program has submitted it."""
        number = self._submission.number
        if self._submission.is_attached:
            self._has_ended = True
            return interruption(signum, f"it watched Slurm job {number}, which goes on: `scancel {number}` cancels it")
        self._cancel(self._grace)
        return interruption(signum, f"it ran job {self._job.name!r} as Slurm job {number}")

    def _cancel(self, grace: float) -> None:
        """Cancel the job, with *grace* for its workers; another signal kills it at once."""
        is_step = self._submission.record.is_step
        self._send("--signal=TERM" if is_step else "")
        self._has_ended = True
        if not self._wait_for_end(grace):
            self._kill()
            if not self._wait_for_end(_END_SECONDS):
                _log.warning("%s may still run: Slurm does not say that it was cancelled", self._seen)
        self._show_rest()
        script = self._submission.script
        if script is not None and script.poll() is None:
            script.kill()
            script.wait()

    def _kill(self) -> None:
        # Slurm refuses a signal to a job that it has begun to end: the nodes look for the file.
        with contextlib.suppress(OSError):
            self._files.write_text(KILL, "")
        self._send("--signal=KILL")

    def _send(self, option: str) -> None:
        number, options = self._submission.number, filter(None, [option])
        steps = steps_of(number, self._submission.step_name) if self._submission.record.is_step else [number]
        for each in steps:
            cancel_job(each, *options)

    def _wait_for_end(self, seconds: float) -> bool:
        """Return True once the job is over; False after *seconds*, or after another signal."""
        until = monotonic() + seconds
        while not self._is_over():
            items = self._next(_LOOK_SECONDS)
            self._show_output()
            if monotonic() >= until or _has_signal(items):
                return False
            self._ask_at = min(self._ask_at, monotonic() + _SOON_SECONDS)
            self._ask()
        return True

    def _conclude(self, decision: RaiseError | ReturnResults) -> Results:
        """Return or raise the outcome of the call."""
        self._has_ended = True
        has_all = isinstance(decision, ReturnResults) or len(self._of_last_run()) == self._submission.record.nodes
        if has_all:
            if not self._wait_for_mark() and not self._submission.is_attached:
                self._end_script()
        elif not self._is_over():
            self._cancel(self._grace)
        self._show_rest()
        if isinstance(decision, RaiseError):
            error = self._error(decision)
            raise error from error.__cause__

        merged = merged_results(self._outcomes.packed(self._restarts()).values())
        self._job.note_engine({"state": "COMPLETED", "reason": ""})
        self._workers.end(is_over=True)
        # A cell that has not shown all output names the file.
        self._output.end(self._job.inbox.drain)
        if not self._submission.is_attached and not self._output.is_full:
            self._submission.remove()
        return merged

    def _error(self, decision: RaiseError) -> BaseException:
        if decision.place is None:
            is_cancelled = self._seen.state == "CANCELLED"
            return SignalException(decision.why, signal.SIGTERM) if is_cancelled else StartError(decision.why)
        packed = self._outcomes.packed(self._restarts())
        return error_of_place(packed, decision.place, self._submission.record.raise_as)

    def _wait_for_mark(self) -> bool:
        """Wait until the script has ended, so that all output is in the files; return False if it stays."""
        until = monotonic() + _END_SECONDS
        while not (self._files.has_ended(self._restarts()) or self._is_over()):
            if _has_signal(self._next(_LOOK_SECONDS)) or monotonic() >= until:
                return False
            self._ask()
        return True

    def _end_script(self) -> None:
        """Cancel what stays of a job whose nodes have all ended: srun may wait for a lost machine."""
        _log.warning("%s is cancelled: all nodes have ended, and its script has not", self._seen)
        self._send("--signal=KILL" if self._submission.record.is_step else "")


def _has_signal(items: Sequence[object]) -> bool:
    return any(isinstance(item, int) for item in items)
