"""
A set of worker processes behind one handle: started together, waited for together, ended
together.

Rules of this file:

* A call that cannot work is refused before anything is started, with the rank of the fault. A
  failed start leaves no process. One worker's failure ends all.
* The caller's mappings are copied, never changed.
* Any thread may wait or close. One lock guards shared state, and only the thread that ends the
  set waits while it holds the lock.
"""

from __future__ import annotations

import abc
import logging
import math
import numbers
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from attrs import Factory, define, evolve

from elasticlib import _rules
from elasticlib._clock import monotonic
from elasticlib._times import soonest
from elasticlib.errors import ConfigError, EntrypointError, PicklingError, ProcessFailure, SpecError
from elasticlib.logs import ERROR_FILE, Duplicates, LogRounds
from elasticlib.processes import Waitable, wait_readable
from elasticlib.spec import DEFAULT_SIGNALS, START_METHODS, LogsSpecs, WorkerSpec
from elasticlib.stacks import ranks_text
from elasticlib.utils import DataclassView
from elasticlib.workers import _environment, _machine, _packing, _plan, _signals
from elasticlib.workers._processes import Processes
from elasticlib.workers._subprocess_handler import ProcessOfSet, ProcessView
from elasticlib.workers.child._start_spec import StartSpec

logger = logging.getLogger(__name__)

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_GRACE = 30.0
"""Seconds from SIGTERM to SIGKILL for the other workers, once one has failed."""
_CONSOLE_TIMEOUT = 5.0
"""Seconds for the console to take the last lines; the rest follows later."""

_running: set[PContext] = set()
"""Running sets: they stay alive without a handle."""


@define
class RunProcsResult(DataclassView):
    """
    Outcome of a set of processes, by local rank.

    (torch: ``torch.distributed.elastic.multiprocessing.RunProcsResult``)
    """

    return_values: dict[int, Any] = Factory(dict)
    """Return values of functions, None for programs; empty unless all succeeded."""
    failures: dict[int, ProcessFailure] = Factory(dict)
    """Processes that failed on their own, without those that were ended because of it."""
    stdouts: dict[int, str] = Factory(dict)
    """Paths of the log files, ``""`` for the console."""
    stderrs: dict[int, str] = Factory(dict)

    def is_failed(self) -> bool:
        """Return True if any process failed."""
        return bool(self.failures)


class PContext(abc.ABC):
    """
    A set of worker processes; `start_processes` makes and starts one.

    (torch: ``torch.distributed.elastic.multiprocessing.PContext``.) Unlike torch's, workers never
    outlive this program, signal handlers are restored at the end, and calls may come from any
    thread.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        numa_options: object | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = check_arguments(args)
        self.nprocs = len(self.args)
        self.envs = check_variables(envs, self.nprocs)
        _rules.check_logs_specs(logs_specs)
        self._job = self._plan(
            partial(
                WorkerSpec,
                str(name),
                # A specification has at least one worker; an empty set is never started.
                max(self.nprocs, 1),
                None,
                numa_options=numa_options,
                duplicate_stdout_filters=duplicate_stdout_filters,
                duplicate_stderr_filters=duplicate_stderr_filters,
            )
        )
        self._prefixes = line_prefixes(name, log_line_prefixes, self.nprocs)

        # The caller's error file counts if the logs name none.
        given = {rank: env.pop(ERROR_FILE, "") for rank, env in self.envs.items()}
        self._logs = LogRounds(logs_specs)
        dest = self._logs.reify(self.envs)
        for rank, env in self.envs.items():
            env[ERROR_FILE] = env[ERROR_FILE] or given[rank]
        self.error_files = {rank: env[ERROR_FILE] for rank, env in self.envs.items()}
        self._dest = evolve(dest, error_files=self.error_files)
        self.stdouts = {rank: self._dest.stdouts.get(rank, "") for rank in range(self.nprocs)}
        self.stderrs = {rank: self._dest.stderrs.get(rank, "") for rank in range(self.nprocs)}
        duplicates = Duplicates(duplicate_stdout_filters, duplicate_stderr_filters)
        self._processes = Processes(self._job, self.nprocs, duplicates=duplicates)
        self._lock = threading.Lock()

        # Wakes waits in other threads.
        self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._ended)
        self._doing = f"it ran the processes of {name!r}"
        self._handlers = _signals.Raising((), self._doing)
        self._started = self._stopping = self._over = False
        self._result: RunProcsResult | None = None

    @abc.abstractmethod
    def _plan(self, spec: MakesSpec) -> _plan.LaunchPlan:
        """Return the plan that all workers share. Raises the error of an invalid call."""

    def _spec(self, rank: int) -> StartSpec:
        """Return the `StartSpec` of worker *rank*."""
        return with_threads(self._job.spec(rank, self.envs[rank]))

    def start(self) -> None:
        """
        Start all processes. Raises `StartError` if that fails, and then leaves none.

        A second start is a `ConfigError` (a ``ValueError``).

        In the main thread, signals raise `SignalException` from now until all processes have
        ended (SIGINT: `LaunchInterrupted`, a ``KeyboardInterrupt``). These are the signals in the
        variable ``TORCHELASTIC_SIGNALS_TO_HANDLE`` (TERM, INT, HUP, QUIT). The processes continue
        after that exception, and you must close them.
        """
        with self._lock:
            if self._started or self._over:
                done = "started" if self._started else "closed"
                raise ConfigError(
                    f"the processes of {self.name!r} were already {done}: create new ones with start_processes(...)"
                )

            handled = _signals.parse_signals(os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS))
            self._handlers = _signals.Raising(handled, self._doing)
            self._started = True
            if not self.nprocs:
                # As torch does: an empty set starts nothing, and its result is empty.
                return
            try:
                self._handlers.install()
                specs = [self._spec(rank) for rank in range(self.nprocs)]
                with _signals.Signals(handled) as arrived:
                    self._processes.start(0, specs, self._dest, self._prefixes, interrupt=arrived.fileno())
                    self._raise(arrived)
            except BaseException:
                self._started = False
                self._let_go()
                self._handlers.remove()
                raise

            _running.add(self)

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank; empty before the start."""
        return dict(self._processes.round.pids)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """
        Return the result once all processes have succeeded, or one has failed and all are gone;
        None before that.

        It waits up to *timeout* seconds, not at all for 0, and without limit below 0. *period*
        exists for compatibility with torch: an end is noticed at once. Raises `PicklingError` if
        a return value cannot be rebuilt here, and `SignalException` as described in `start`.
        """
        if not self._started:
            raise SpecError(f"the processes of {self.name!r} were not started: call start() first")

        timeout = check_seconds("timeout", timeout)
        deadline = math.inf if timeout < 0 else monotonic() + timeout
        try:
            with _signals.Signals(self._handlers.signums) as arrived:
                while (result := self._look(deadline)) is None:
                    if (left := deadline - monotonic()) <= 0:
                        return None
                    watched: list[int | Waitable] = [arrived, self._ended]
                    if (number := self._processes.fileno()) >= 0:
                        watched.append(number)
                    wait_readable(watched, soonest(left, self._processes.poll_timeout()))
                    self._raise(arrived)

            return result
        finally:
            # After the end, signals belong to the program again.
            if self._over:
                self._handlers.remove()

    def _raise(self, arrived: _signals.Signals) -> None:
        for signum in arrived.drain():
            raise _signals.interruption(signum, self._doing)

    def _look(self, deadline: float) -> RunProcsResult | None:
        """
        Return the result if it exists; wait only for another thread that ends the set, until
        *deadline*.
        """
        # The deadline may be infinite, and a lock refuses to wait for longer than this constant.
        if not self._lock.acquire(timeout=min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX)):
            return None
        try:
            if self._result is None:
                self._result = self._poll()
            return self._result
        finally:
            self._lock.release()

    def _stop_after_failure(self) -> None:
        """Begin to stop the other workers if one has failed."""
        present = self._processes.round
        if present.any_failed() and not present.gone():
            self._stopping = True
            self._processes.ask_to_stop(signal.SIGTERM, _GRACE)

    def _poll(self) -> RunProcsResult | None:
        if not self.nprocs:
            return RunProcsResult()

        self._processes.poll()
        present = self._processes.round
        if not self._stopping:
            self._stop_after_failure()
        have_ended = present.gone() or self._over
        if not have_ended:
            return None

        self._let_go()
        if present.all_succeeded():
            return RunProcsResult(present.return_values(), {}, self.stdouts, self.stderrs)

        # A set that neither failed nor succeeded was closed before its end.
        failures = present.failures() or present.cut_short()
        return RunProcsResult({}, failures, self.stdouts, self.stderrs)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """
        End the running processes and free all resources: *death_sig* (SIGTERM) first, SIGKILL
        after *timeout* seconds.

        When it returns, no process is left, including those that workers have started. You can
        call it in any state, twice, and while another thread waits; a later `wait` reports the
        processes that were cut short.

        A handled signal that arrives meanwhile goes to the program's own handler afterwards;
        SIGINT (Ctrl-C) means SIGKILL now. After a `wait` that reported success, it removes the
        log files that `DefaultLogsSpecs` keeps in a temporary folder.
        """
        number, grace = check_signal(death_sig), check_seconds("timeout", timeout)
        late: list[int] = []
        with _signals.Signals(self._handlers.signums) as arrived, self._lock:

            def watch(limit: float | None) -> None:
                wait_readable([arrived, self._processes], limit)
                for signum in arrived.drain():
                    late.append(signum)
                    # A person is waiting: the workers get no more time.
                    if signum == signal.SIGINT:
                        self._processes.hasten(signal.SIGKILL, 0.0)

            try:
                if self._started:
                    self._processes.stop(number, grace, watch, somebody_waits=True)
            finally:
                self._let_go()
                self._handlers.remove()

        # Again: some could not be restored below the handlers of this block.
        self._handlers.remove()
        if self._result is not None and not self._result.is_failed():
            self._logs.remove_if_temporary()
        # All is gone now: the program's own handlers may act on late signals.
        for signum in late:
            signal.raise_signal(signum)

    def _let_go(self) -> None:
        """Free the resources of the set except its processes, which are gone or will be killed."""
        try:
            self._over = True
            self._processes.dismiss()
        finally:
            _running.discard(self)
            os.eventfd_write(self._ended, 1)
            self._processes.finish(_CONSOLE_TIMEOUT, lambda: True)


class MultiprocessContext(PContext):
    """
    A `PContext` whose workers call a function, each with its own arguments.

    Exceptions are recorded without a decorator, and a return value may be of any size. (torch:
    ``torch.distributed.elastic.multiprocessing.MultiprocessContext``)
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: object | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.start_method = start_method
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters, numa_options=numa_options
        )

    def _plan(self, spec: MakesSpec) -> _plan.LaunchPlan:
        return plan_of_function(self.entrypoint, self.args, spec, self.start_method)  # type: ignore[arg-type]


class SubprocessContext(PContext):
    """
    A `PContext` whose workers are programs, each with its own arguments, turned into text.

    (torch: ``torch.distributed.elastic.multiprocessing.SubprocessContext``)
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: object | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters, numa_options=numa_options
        )

    @property
    def subprocess_handlers(self) -> dict[int, ProcessView]:
        """Handles of the processes by local rank; empty before the start."""

        def poll(rank: int) -> int | None:
            self._look(monotonic())
            end = self._processes.round.exits.get(rank)
            return None if end is None else end.exitcode

        return {
            rank: ProcessView(rank, ProcessOfSet(pid, partial(poll, rank)), partial(self._processes.signal, rank))
            for rank, pid in self.pids().items()
        }

    def _plan(self, spec: MakesSpec) -> _plan.LaunchPlan:
        return plan_of_program(self.entrypoint, self.args, spec)  # type: ignore[arg-type]

    def _spec(self, rank: int) -> StartSpec:
        return replace(super()._spec(rank), argv=[*self._job.common.argv, *map(str, self.args[rank])])


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "forkserver",
    numa_options: object | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """
    Start one process per local rank and return the handle of all.

    * *entrypoint* is a callable, or as text a program on PATH.
    * ``args[rank]`` are its arguments (a program's are turned into text), and ``envs[rank]`` the
      variables that a worker has beyond this program's. Both must have exactly the keys 0 to n-1.
    * *logs_specs* sets the place of the output. Lines of tee'd streams begin with
      ``log_line_prefixes[rank]``, by default ``[<name><rank>]:``.
    * *start_method* is for callables. ``forkserver``, unlike torch's ``spawn``, forks from a warm
      fork server without this program's threads and devices.
    * *numa_options* binds each worker to the CPUs near the GPU of its local rank.

    Raises `ConfigError` and its kinds before anything is started: `LocalRanksError` (a
    ``RuntimeError``) for other keys, `ProgramError` (a ``FileNotFoundError``) for a program that
    does not exist. Raises `StartError` if this machine cannot start the processes.

    (torch: ``torch.distributed.elastic.multiprocessing.start_processes``)
    """
    context: PContext
    rest = (logs_specs, log_line_prefixes, numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, *rest)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, *rest)

    try:
        context.start()
    except BaseException:
        # A signal may have arrived after all were started.
        context.close()
        raise

    return context


# The checks of a call, and the plan that it makes: nothing is started here.


class LocalRanksError(ConfigError, RuntimeError):
    """Raised when a mapping by local rank has other keys than 0 to n-1; a RuntimeError, as torch's."""


class VariableError(ConfigError, TypeError):
    """Raised when an environment variable of a worker is not text; a TypeError, as torch's."""


class ArgumentError(ConfigError, TypeError):
    """
    Raised when an argument has a type that is not valid there; a TypeError, as Python's own.
    """


class ProgramError(EntrypointError, FileNotFoundError):
    """
    Raised when the program to run does not exist or may not be run; a FileNotFoundError, as
    torch's.
    """


def _check_ranks(name: str, by_rank: object, count: int) -> None:
    if not isinstance(by_rank, Mapping):
        raise ConfigError.of_setting(
            name, f"{by_rank!r} must be a dictionary by local rank, such as {{0: ..., 1: ...}}"
        )
    if set(by_rank) != set(range(count)):
        raise LocalRanksError(
            f"{name} has entries for the local ranks {list(by_rank)}, but must have one for each local rank from 0 to "
            f"{count - 1}: args and envs need one entry for each process"
        )


def check_arguments(args: Mapping[int, Sequence[Any]]) -> dict[int, tuple[Any, ...]]:
    """Return *args* by local rank, in order."""
    # Any number for other types, which the check refuses.
    count = len(args) if isinstance(args, Mapping) else 1
    _check_ranks("args", args, count)
    return {rank: _rules.arguments(f"args[{rank}]", args[rank]) for rank in range(count)}


def check_variables(envs: Mapping[int, Mapping[str, str]], count: int) -> dict[int, dict[str, str]]:
    """Return *envs* of *count* processes by local rank, in order."""
    _check_ranks("envs", envs, count)
    for rank, env in envs.items():
        if not isinstance(env, Mapping):
            raise VariableError(f"envs[{rank}]={env!r} must be a dictionary of environment variables; {{}} for none")
        for name, value in env.items():
            _check_variable(rank, name, value)
    return {rank: dict(envs[rank]) for rank in range(count)}


def _check_variable(rank: int, name: object, value: object) -> None:
    """Raise an error of the environment of *rank* for a variable that no process can have."""
    if not isinstance(name, str) or not isinstance(value, str):
        raise VariableError(f"envs[{rank}] has {name!r}: {value!r}; names and values must be strings")
    is_name = name and "=" not in name and "\0" not in name
    if not is_name or "\0" in value:
        raise ConfigError(
            f"envs[{rank}] has {name!r}: {value!r}: a name must be non-empty and without '=', and neither name nor "
            "value can contain NUL"
        )


def line_prefixes(name: object, given: object, count: int) -> dict[int, bytes]:
    """
    Return the prefixes of the lines of *count* processes, from *given* or made of their *name*.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"log_line_prefixes={given!r} must be a dictionary by local rank, such as {{0: '[0]:'}}")

    texts = dict(given)
    _warn_of_strange_ranks(texts, count)
    for rank, text in texts.items():
        if not isinstance(text, str):
            raise ArgumentError(f"log_line_prefixes[{rank!r}]={text!r} must be a string")

    found = {}
    for rank in range(count):
        if rank in texts:
            found[rank] = _encoded(f"log_line_prefixes[{rank}]", texts[rank])
        else:
            found[rank] = _encoded("name", f"[{name}{rank}]:")

    return found


def _warn_of_strange_ranks(texts: Mapping[object, object], count: int) -> None:
    strange = [rank for rank in texts if rank not in range(count)]
    if not strange:
        return
    logger.warning(
        "log_line_prefixes names local rank%s %s, but this node has only %s: that has no effect",
        "s" * (len(strange) > 1),
        ", ".join(map(repr, strange)),
        ranks_text(range(count), "local rank"),
    )


def _encoded(setting: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError.of_setting(
            setting,
            f"{text!r} cannot be encoded in UTF-8: give another string",
        ) from None


def check_seconds(name: str, value: object) -> float:
    """Return *value* as seconds, of any size and sign."""
    if not isinstance(value, numbers.Real):
        raise ArgumentError.of_setting(name, f"{value!r} must be a number of seconds")
    if math.isnan(value):
        raise ConfigError.of_setting(name, "nan is not a time: give a number of seconds, or math.inf for no limit")
    return float(value)


def check_signal(value: object) -> int:
    """Return the number of the signal *value*, by default SIGTERM, that asks processes to end."""
    if not value:
        return signal.SIGTERM
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"death_sig={value!r} must be a signal, such as signal.SIGTERM")
    if value not in signal.valid_signals():
        raise ConfigError(f"death_sig={value!r} must be a signal of this system, such as signal.SIGTERM")
    return int(value)


MakesSpec: TypeAlias = Callable[..., WorkerSpec]
"""
Makes the specification of an entry point with its arguments; it knows the settings that functions
and programs share.
"""


def plan_of_function(
    function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]], spec: MakesSpec, start_method: str
) -> _plan.LaunchPlan:
    """Return the job whose workers call *function*, each with its own *args*."""
    _rules.check_choice("start_method", start_method, START_METHODS)

    # A class of paths may be callable too.
    is_name = isinstance(function, (str, os.PathLike))
    if is_name or not callable(function):
        raise EntrypointError(f"entrypoint={function!r} is not callable: give a program as a string")

    by_rank = tuple(args.values())
    try:
        job = _planned(spec(entrypoint=function, args=by_rank), start_method)
    except PicklingError:
        _raise_for_rank(function, args)
        raise

    job = evolve(job, common=replace(job.common, args_by_rank=True))
    if job.call is not None:
        job = evolve(job, call=lambda rank: function(*by_rank[rank]))
    return job


def _raise_for_rank(function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]) -> None:
    """Raise the `PicklingError` of the first rank whose arguments cannot be sent, with the rank."""
    for rank, own in args.items():
        try:
            _packing.pack_call(function, own, {})
        except PicklingError as error:
            raise PicklingError(f"local rank {rank}: {error}") from error


def plan_of_program(program: str, args: Mapping[int, tuple[Any, ...]], spec: MakesSpec) -> _plan.LaunchPlan:
    """Return the job whose workers are *program*; each adds its own arguments to the command line."""
    every = tuple(str(argument) for own in args.values() for argument in own)
    try:
        return _planned(spec(entrypoint=program, args=every, no_python=True), "forkserver")
    except EntrypointError as error:
        raise ProgramError(str(error)) from None


def _planned(spec: WorkerSpec, start_method: str) -> _plan.LaunchPlan:
    environment = _environment.without_secrets(os.environ)
    return _plan.plan(spec, start_method, environment, _thread_count(environment))


def with_threads(spec: StartSpec) -> StartSpec:
    """Return *spec* with the number of threads that the worker's own variables name, else the job's."""
    environment = spec.variables
    if _environment.THREADS_VARIABLE not in environment:
        return spec
    return replace(spec, threads=_thread_count(environment))


def _thread_count(environment: Mapping[str, str]) -> int:
    # Each worker computes with all CPUs, like any program: they are not divided among these
    # workers.
    return _environment.threads_per_worker(environment, _machine.cpu_count(), 1)
