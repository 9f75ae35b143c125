"""
Exceptions that elasticlib raises, grouped by cause.

Rules of this file: a bad call raises `ConfigError`. If the machine cannot start processes, that is
a `StartError`. Failures between nodes are `RendezvousError`, failures of the user's code
`ChildFailedError`, and signals `SignalException`. Each class also derives from the built-in type
that people catch. It keeps its facts in fields and can be pickled, since exceptions cross processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticlib._clock import wall_time
from elasticlib._untrusted import parse_shallow
from elasticlib.notebook import render_error
from elasticlib.stacks import Frame as Frame, place_of

if TYPE_CHECKING:
    from typing_extensions import Self


class ElasticError(Exception):
    """Base class of all exceptions that elasticlib raises on purpose."""

    lost_hosts: tuple[str, ...] = ()
    """Some of the hosts whose nodes a launch has lost, for a scheduler that can exclude hosts."""
    _elastic_exit_status: int | None = None
    """Exit status of the command, by its options; None: that of the class."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of its own traceback: only the user's frames."""
        return render_error(self)


class ConfigError(ElasticError, ValueError):
    """
    Raised before anything is started, for a value that breaks a rule.

    `setting` names the field or argument with that value; it is empty if no single one is at fault.
    """

    setting = ""
    complaint = ""
    """Text after ``setting=``: the value, the rule, and the fix."""

    @classmethod
    def of_setting(cls, setting: str, complaint: str) -> Self:
        """Return the error for one *setting*; *complaint* begins with its value."""
        error = cls(f"{setting}={complaint}")
        error.setting, error.complaint = setting, complaint
        return error

    def with_name(self, name: str) -> ConfigError:
        """Return this error with *name*, such as a command's option, instead of the setting's name."""
        return self.of_setting(name, self.complaint)

    def on_machine(self, host: str) -> Self:
        """Return this error of another machine, with its name *host* before the text."""
        self.args = (f"on {host}: {self}",)
        return self


class SpecError(ConfigError, AssertionError):
    """Raised for a number that breaks its rule, where torch raises an AssertionError."""


class NodesError(ConfigError, RuntimeError):
    """Raised for a range of nodes that is not MIN:MAX, where torch raises a RuntimeError."""


class UnknownNameError(ConfigError, KeyError):
    """Raised for an unknown name, where torch raises a KeyError."""

    def __str__(self) -> str:
        # KeyError would put its text in quotes.
        return Exception.__str__(self)


class LogDirError(ConfigError, NotADirectoryError):
    """Raised when the log folder is a file, or cannot be written."""


class EntrypointError(ConfigError):
    """Raised when the script, module or program does not exist or may not be run."""


class JobRunsError(ConfigError, RuntimeError):
    """Raised when a notebook's cell starts a job again while the job of its last run still runs."""


class PoolError(ElasticError, RuntimeError):
    """Raised when a pool is used after its end, by two threads at once, or in a forked child."""


class PicklingError(ConfigError, TypeError):
    """Raised when the function or one of its arguments cannot be sent to a worker."""


class PreloadError(ConfigError):
    """Raised when a module cannot be imported ahead of the workers without changing them."""

    def __init__(self, module: str, why: str) -> None:
        # All arguments, since pickle makes the error again from them.
        super().__init__(module, why)
        self.module = module
        self.why = why
        self.setting, self.complaint = "preload", self._refusal().complaint

    def _refusal(self) -> ConfigError:
        return ConfigError.of_setting(
            "preload",
            f"{self.module!r} cannot be preloaded: {self.why.strip()}; import it in the workers instead: "
            f"leave {self.module!r} out of preload",
        )

    def __str__(self) -> str:
        return str(self._refusal())

    def on_machine(self, host: str) -> Self:
        """Return the error for a module that cannot be preloaded on the machine *host*."""
        return type(self)(self.module, f"on {host}: {self.why}")

    def with_name(self, name: str) -> ConfigError:
        """Return a `ConfigError` with *name*; an error of this class always names *preload*."""
        return self._refusal().with_name(name)


class TimerError(ConfigError, RuntimeError):
    """Raised when a countdown timer cannot be set: no client is configured, or its scope is too long."""


class TimerServerError(ElasticError, BrokenPipeError):
    """Raised when no server listens for the announcement of a countdown timer."""


class StartError(ElasticError, RuntimeError):
    """Raised when this machine, or an engine on others, could not start the processes that a launch needs."""


class RendezvousError(ElasticError):
    """Base class of failures between the nodes of a job."""


class RendezvousClosedError(RendezvousError):
    """Raised when a node joins a job that has already ended."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Raised when too few nodes joined within the join time."""


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """Raised when the store that the nodes share cannot be reached."""


class RendezvousNotFoundError(RendezvousConnectionError, RendezvousTimeoutError):
    """Raised when no store answered at the job's endpoint within the join time."""


class RendezvousStateError(RendezvousError):
    """Raised when the store holds data that this job did not write."""


class RendezvousGracefulExitError(RendezvousError):
    """Raised when the job succeeded without this node: a spare, or replaced after its workers were done."""


class InvalidTransitionError(ElasticError, RuntimeError):
    """
    Raised when *what* takes a step that the table of its life cycle does not have.

    A hook of your own agent returned a state that cannot follow, or elasticlib has a bug. `story`
    holds the last steps before, each with its reason.
    """

    def __init__(self, what: str, start: str, finish: str, story: tuple[str, ...] = ()) -> None:
        # All arguments, since pickle makes the error again from them.
        super().__init__(what, start, finish, story)
        self.what = what
        self.start = start
        self.finish = finish
        self.story = story

    def __str__(self) -> str:
        steps = "".join(f"\n  {step}" for step in self.story) or " none"
        return f"{self.what} cannot go from {self.start} to {self.finish}; the steps before:{steps}"


class SignalException(ElasticError):  # noqa: N818 - torch's name
    """Raised when a handled signal stopped the launch; `sigval` is the signal."""

    is_notice: bool = False
    """True if a scheduler ended this node: the same job could run again."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg, sigval)
        self.sigval = sigval

    def __str__(self) -> str:
        return str(self.args[0])


PREEMPTED = 75
"""Exit status of a command whose job was preempted: EX_TEMPFAIL of sysexits.h, "try again later"."""


class PreemptedError(SignalException):
    """
    Raised when a signal stopped the launch, and all workers have returned after a `Stop` of `should_stop`.

    `results` is {global rank: return value} of this node's workers.
    """

    def __init__(self, msg: str, sigval: signal.Signals, results: dict[int, Any] | None = None) -> None:
        super().__init__(msg, sigval)
        self.results = {} if results is None else results

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.sigval, self.results)


class LaunchInterrupted(SignalException, KeyboardInterrupt):
    """Raised for SIGINT: a `SignalException` that is a `KeyboardInterrupt` too."""


NOT_AVAILABLE = "<N/A>"
_LONGEST_LINE = 300
about_signal: Callable[[str, str], str] | None = None
"""
Hook (text, error file) -> text, which adds facts about a worker that a signal ended. Must not raise.

The module of `ErrorHandler` sets it, so that subclasses can add facts; None before.
"""
_LATEST = 1e11
"""Unix seconds; a later timestamp is not the time of a failure."""
# A worker may write anything into its error file.
_LONGEST_FILE = 2**24


@dataclass
class ProcessFailure:
    """
    A failed worker, with all that is known about it.

    The first four fields, and what is read from *error_file* when `error_file_data` is not given, are
    those of ``torch.distributed.elastic.multiprocessing.errors.ProcessFailure``. A missing, truncated
    or foreign error file is ignored: the other fields report the failure.
    """

    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` if signal ``n`` ended the worker."""
    error_file: str
    error_file_data: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    timestamp: float = 0.0
    """Time of the failure in whole Unix seconds, as in the error file; `moment` has the fraction."""
    rank: int = -1
    exception_type: str = ""
    """Qualified name of the exception's class; empty if the worker did not raise."""
    traceback: str = ""
    """Python traceback, or the fault handler's stacks after a crash."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the worker's stderr, from its log file, else from what Python wrote."""
    hint: str = ""
    """Most likely meaning of the signal or the exit status on this machine."""
    secondary: bool = False
    """True if the failure is a lost connection to a peer, and so most likely a consequence."""
    host: str = ""
    """Host of the worker; this machine if left empty."""
    root: bool = False
    """True if the job found it to be the first failure on all nodes, independent of their clocks."""
    fatal: bool = False
    """True if a restart would fail in the same way, so that the job makes none."""
    process: str = ""
    """Name of elasticlib's own process that ended, such as ``worker store``; empty for a worker.

    `rank` is then the rank that represents this process.
    """
    frames: tuple[Frame, ...] = field(default=(), repr=False, compare=False)
    """Stack of a worker of this node that raised, innermost frame last; `traceback` is its text."""
    moment: float = 0.0
    """`timestamp` with its fraction, if the worker or its launcher knows it."""
    external: bool = False
    """True if a peer, a device or the system caused the exception, so that a retry may succeed."""

    log_files: tuple[str, ...] = ()
    """Files with the worker's stdout and stderr; empty if it has none."""
    is_on_console: bool = field(default=False, repr=False, compare=False)
    """True if the worker has written its traceback to this program's own stderr."""

    def __post_init__(self) -> None:
        if not self.error_file_data:
            self._read_error_file()
        # Without a time in its error file, a failure counts as seen now.
        self.happened(self.when() or wall_time())
        if not self.message:
            self.message = self._describe()
        if not self.host:
            self.host = os.uname().nodename

    def _read_error_file(self) -> None:
        """Fill the fields that are still empty from the error file."""
        data = self._error_file_content()
        if data is None:
            self.error_file_data = {"message": "<NONE>"}
            return

        self.error_file_data = data
        message, trace, stamp = data["message"], "", data.get("timestamp", 0)

        # torch's error handler writes a dictionary.
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            if not isinstance(extra, dict):
                extra = {}
            trace, stamp = str(extra.get("py_callstack") or ""), extra.get("timestamp", 0)
            message = message.get("message", "")

        self.message = self.message or str(message)
        self.traceback = self.traceback or trace
        self.timestamp = self.timestamp or _seconds_of(stamp)

    def _error_file_content(self) -> dict[str, Any] | None:
        """Return the data of the error file; None if it has no message, or if the file is missing."""
        if not self.error_file or not os.path.isfile(self.error_file):
            self.error_file = NOT_AVAILABLE
            return None
        data: Any = None
        with contextlib.suppress(OSError, ValueError):
            data = read_error_file(self.error_file)
        if not isinstance(data, dict) or "message" not in data:
            return None
        return data

    def _describe(self) -> str:
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        return f"The worker ended with exit status {self.exitcode} and left no exception"

    def happened(self, when: float) -> None:
        """Set `timestamp` and `moment`."""
        self.timestamp, self.moment = int(when), float(when)

    def when(self) -> float:
        """Return the time in Unix seconds: `moment`, or `timestamp` if that was set later."""
        return self.moment if int(self.moment) == int(self.timestamp) else self.timestamp

    def signal_name(self) -> str:
        """Return the name of the signal that ended the worker, or ``<N/A>``."""
        return NOT_AVAILABLE if self.exitcode >= 0 else name_of_signal(-self.exitcode, "SIG")

    def summary(self, *, with_place: bool = True) -> str:
        """Return one line: the event and the reason, and with *with_place* the place in the user's code."""
        place = place_of(self.traceback)
        event, reason = self._event_and_reason(has_place=bool(place))
        text = f"{event}: {reason}" if reason else event
        line = " ".join(text.split())
        if len(line) > _LONGEST_LINE:
            line = f"{line[: _LONGEST_LINE - 3]}..."
        return f"{line} ({place})" if place and with_place else line

    def _event_and_reason(self, *, has_place: bool) -> tuple[str, str]:
        """Return how the worker failed, and the reason; "" if the first part gives the reason already."""
        # The message is the worker's own, not made from the exit status.
        if self.message != self._describe():
            lines = (line for line in self.message.splitlines() if line.strip())
            return next(lines, "no message"), ""
        if self.exitcode < 0 and not self.exception_type:
            return f"ended by {self.signal_name()}", "" if has_place else self.hint
        last_line = self.log_tail[-1] if self.log_tail else self.hint
        return f"exit status {self.exitcode}", last_line

    def timestamp_isoformat(self) -> str:
        """Return the local time of the failure, with ``_`` between date and time."""
        return datetime.datetime.fromtimestamp(self.when()).isoformat(sep="_", timespec="milliseconds")


def _seconds_of(stamp: Any) -> float:
    """Return the timestamp of an error file in Unix seconds; 0 if it cannot be the time of a failure."""
    try:
        seconds = float(stamp)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    # NaN fails both comparisons, and datetime cannot hold a much later time.
    is_time = 0 < seconds < _LATEST
    return seconds if is_time else 0.0


def name_of_signal(number: int, unnamed: str = "signal ") -> str:
    """Return the name of a signal; *unnamed* and the *number* for one without, such as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"{unnamed}{number}"


def read_error_file(path: str) -> Any:
    """
    Return the JSON value in a worker's error file.

    Raises OSError if the file cannot be read, ValueError if its content is not valid.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(_LONGEST_FILE + 1)
    if len(text) > _LONGEST_FILE:
        raise ValueError(f"{path} is longer than {_LONGEST_FILE} characters")
    return parse_shallow(text)


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """
    Return the (rank, failure) that the job's nodes agreed on, else the earliest.

    A lost connection is the root cause only if the nodes agreed on it, or if no other kind of
    failure exists.
    """
    return min(failures.items(), key=lambda item: (not item[1].root, item[1].secondary, item[1].when(), item[0]))


class ChildFailedError(ElasticError):
    """
    Raised when workers failed and no restart was left.

    `failures` maps global rank to `ProcessFailure`. The first line of the text is the root cause. A
    table of all failures follows, which `format_msg` returns. The error is raised *from* the worker's
    own exception, if that could be rebuilt.
    (torch: ``torch.distributed.elastic.multiprocessing.errors.ChildFailedError``)
    """

    _elastic_title = ""
    """Title of the work in the text, if `name` is an attribute of the worker's own exception."""
    _elastic_ranks = 0
    """Number of ranks of the job; 0 if unknown."""

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        if not failures:
            raise SpecError("failures={} is empty: a ChildFailedError needs the failure of at least one rank")
        super().__init__(name, failures)
        self.name = name
        self.failures = failures

    def __str__(self) -> str:
        return self.summary() + self.format_msg()

    def summary(self) -> str:
        """Return the root cause in one line, such as ``rank 1: ValueError: bad batch (train.py:54)``."""
        rank, failure = self.get_first_failure()
        return failure.summary() if failure.process else f"rank {rank}: {failure.summary()}"

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure of the root cause."""
        return root_cause(self.failures)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the table of all failures as text (the keyword is spelled as in torch)."""
        return self._format(
            {rank: _trace_of(failure) for rank, failure in self.failures.items()}, boarder_delim, section_delim
        )

    @property
    def may_pass(self) -> bool:
        """
        True if another try may succeed: a signal, a peer, a device or the system caused the root failure.

        False if the program itself raised or ended with an exit status: a scheduler does not have to requeue the job.
        """
        _, failure = self.get_first_failure()
        is_from_outside = failure.external or failure.secondary or bool(failure.process)
        # After its exception a worker may be killed: others of the job are being stopped.
        is_killed = failure.exitcode < 0 and not failure.exception_type
        return not failure.fatal and (is_from_outside or is_killed)

    def console_text(self) -> str:
        """Return the text for the console of this program, without tracebacks that it already shows."""
        traces = {
            rank: f"{failure.summary()}: see above" if failure.is_on_console else _trace_of(failure)
            for rank, failure in self.failures.items()
        }
        return self.summary() + self._format(traces)

    def _format(self, traces: dict[int, str], border_delim: str = "=", section_delim: str = "-") -> str:
        root_rank, _ = self.get_first_failure()
        blocks = {}
        for index, (rank, failure) in enumerate(self.failures.items()):
            blocks[rank] = _record(index, rank, failure, traces[rank])
        root = blocks.pop(root_rank)
        others = [*blocks.values()] or ["  <NO_OTHER_FAILURES>"]
        unseen = self._elastic_ranks - len(self.failures)
        if unseen > 0 and len(self.failures) > 1:
            others.append(
                f"  and {unseen} more of {self._elastic_ranks} ranks, which had ended or were stopped",
            )

        title = f"{self._elastic_title or self.name} FAILED"
        lines = [title, "Failures:", *others, "Root Cause (first observed failure):", root]
        longest = max(len(line) for block in lines for line in block.split("\n"))
        width = min(60, longest)
        border, section = border_delim * width, section_delim * width
        return "\n".join(["", border, title, section, *lines[1:-2], section, *lines[-2:], border])


def _who(rank: int, failure: ProcessFailure) -> dict[str, str]:
    """Return the line of the table that names the failed rank, or the failed process of elasticlib."""
    if failure.process:
        return {"process": f"{failure.process} of elasticlib"}
    return {"rank": f"{rank} (local_rank: {failure.local_rank})"}


def _trace_of(failure: ProcessFailure) -> str:
    """Return the traceback, the stacks or the message of the *failure*."""
    trace = failure.traceback or failure.message or NOT_AVAILABLE
    # The stacks of a crash do not name the signal, as the message does.
    if failure.traceback and failure.exitcode < 0 and not failure.exception_type:
        trace = f"{failure.message}\n{failure.traceback}"
    if failure.exitcode < 0 and about_signal is not None:
        trace = about_signal(trace, failure.error_file)
    return trace


def _record(index: int, rank: int, failure: ProcessFailure, trace: str) -> str:
    by_signal = f", {failure.signal_name()}" if failure.exitcode < 0 else ""
    pid = failure.pid or "not known"
    facts = {
        "time": failure.timestamp_isoformat(),
        "host": failure.host,
        **_who(rank, failure),
        "exitcode": f"{failure.exitcode} (pid: {pid}{by_signal})",
        "error_file": failure.error_file,
        "traceback": trace.rstrip("\n").replace("\n", "\n    "),
    }
    if failure.hint:
        facts["hint"] = failure.hint.replace("\n", "\n    ")
    # The files may contain more than the exit status shows.
    if failure.log_files and not failure.traceback:
        facts["log files"] = ", ".join(failure.log_files)
    if failure.log_tail:
        facts["stderr"] = "\n    ".join(("last lines of the worker:", *failure.log_tail))
    body = [f"  {name:<10}: {value}" for name, value in facts.items()]
    return "\n".join([f"[{index}]:", *body])
