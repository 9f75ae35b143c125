"""
The first code in a worker: it turns a forked or fresh process into one that looks like ``python
-u script.py``.

The order is the same for each way of starting:

* own session, death with the parent, streams and descriptors, signals, environment, folder and
  limits;
* multiprocessing's record of this process;
* the user's function, script, module or program;
* the end of the program (`_interpreter_end`).

Rules of this file: no code of the user runs before the process looks right, and every end of the
user's code leaves a report.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import errno
import faulthandler
import functools
import importlib.machinery
import importlib.util
import io
import logging
import multiprocessing.util
import os
import runpy
import signal
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from json import loads
from multiprocessing.process import current_process
from typing import Any, NoReturn

from elasticlib._clock import wall_time
from elasticlib.processes import (
    Surroundings,
    absolute_path,
    close_all_but,
    close_each,
    content_of_files,
    content_of_memory,
    die_with_parent,
    enter_folder as enter_folder,
    flags_of,
    names_of_parts,
    process_facts,
)
from elasticlib.stacks import CALLERS, is_ours, users_part
from elasticlib.workers.child import (
    _announcing,
    _function,
    _interpreter_end,
    _own_modules,
    _pooled,
    _randomness,
    _record,
    _report,
    _result_pickles,
    _serving,
    _showing,
    _threads,
    _worker_progress,
)
from elasticlib.workers.child._start_spec import STDIN, Handed, StartSpec, from_both

# The process object of this program, before any fork.
_FIRST_PROCESS = current_process()
STACKS_SIGNAL = signal.SIGRTMAX - 1
"""Makes a worker write the stacks of all its threads to a file for its launcher, at any time."""
OWN_STACK_SIGNAL = signal.SIGRTMAX - 2
"""The same for the thread that handles it alone, which is safe while other threads run Python."""
base_path: list[str] = []
"""The interpreter's own ``sys.path``, without a script's folder."""
CALLERS.update((__file__, "<frozen runpy>", runpy.__file__))


def enter(spec: StartSpec, handed: Handed, parent: int, keep: Collection[int], drop: Collection[int] | None) -> None:
    """
    Make this process a session of its own with the settings of *spec*.

    Close all descriptors except *keep*, or only *drop* if that is given.
    """
    os.setsid()
    die_with_parent(parent)
    for target, descriptor in enumerate(handed.streams):
        os.dup2(descriptor, target)
    if drop is None:
        close_all_but({0, 1, 2, *keep})
    else:
        close_each(drop)

    _set_signals(spec)
    _set_environment(handed.environment)
    Surroundings.of(spec.surroundings).take_over()
    try:
        os.sched_setaffinity(0, spec.affinity)
    except OSError:
        # The allowed CPUs have shrunk since the launch began.
        if spec.bound:
            # These CPUs were requested, and no others.
            raise

    enter_folder(spec.cwd, spec.place)


def _set_signals(spec: StartSpec) -> None:
    for signum in signal.valid_signals():
        wanted = signal.SIG_IGN if signum in spec.ignored else signal.SIG_DFL
        if signal.getsignal(signum) not in (wanted, None):
            signal.signal(signum, wanted)

    # As in every Python program.
    raises_interrupts = signal.SIGINT not in spec.ignored and spec.kind != "program"
    if raises_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    # Signals were blocked up to here, so that none was lost: pending ones are handled now.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    for name, value in environment.items():
        # The fork server already has most variables with these values.
        if os.environ.get(name) != value:
            os.environ[name] = value


def disown_finalizers() -> None:
    """
    Leave the present objects to the process that made them: forked children do not finalize them.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _renew_output() -> None:
    """
    Renew stdout and stderr, whose descriptors have changed since the start of the interpreter.

    They store whether these are seekable; a change of their encoding fails if that is wrong.
    """
    for stream, descriptor, name in ((sys.__stdout__, 1, "<stdout>"), (sys.__stderr__, 2, "<stderr>")):
        if not isinstance(stream, io.TextIOWrapper) or stream.closed:
            continue
        raw, former = io.FileIO(descriptor, "w", closefd=False), stream.buffer
        raw.name = name

        # The same objects, because loggers may hold them.
        stream.__init__(  # type: ignore[misc]
            raw if isinstance(former, io.FileIO) else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        stream.mode = "w"  # type: ignore[misc]


def _buffer_lines() -> None:
    """
    Write each line of stdout and stderr at once and as a whole, with ``\\r`` as the end of a line, too.

    The streams are those of ``python -u``, which torchrun gives its workers: each argument of a
    ``print`` would be a write of its own, and all ranks write to the same pipe or terminal, where
    their lines would mix. A terminal is no exception: Python itself shows there what has no line
    end only after a flush, so programs that draw dots flush, as prompts, debuggers and bars do.
    Only text waits: bytes that the program writes to ``sys.stdout.buffer`` do not.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(line_buffering=True, write_through=False)


def _forget_the_caller() -> None:
    """
    Print to the worker's own descriptors, and drop exit handlers, which concern the caller's
    files and threads.
    """
    if sys.__stdout__ is not None and sys.__stderr__ is not None:
        # The worker's own streams, in place of those of a notebook or a test runner.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        sys.stdout.reconfigure(line_buffering=True)
    disown_finalizers()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def forget_the_fork_server() -> None:
    """
    Set multiprocessing, random generators and stdin to their state in a program's first process.
    """
    from multiprocessing import context, process

    process._current_process = _FIRST_PROCESS  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    process._dangling.clear()  # type: ignore[attr-defined]
    context._default_context._actual_context = None  # type: ignore[attr-defined]

    # multiprocessing has closed it: its children have no stdin.
    former = sys.__stdin__
    raw = io.FileIO(0, "r", closefd=False)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(raw),
        encoding=former.encoding if former else None,
        errors=former.errors if former else None,
        line_buffering=raw.isatty(),
        write_through=True,
    )
    raw.name = "<stdin>"
    sys.stdin.mode = "r"  # type: ignore[misc]
    logging._startTime = wall_time()  # type: ignore[attr-defined]


def _show_as(command: list[str]) -> None:
    """
    Show *command* in ``ps`` and ``pgrep``, cut to the room of this process's own command line.
    """
    sys.orig_argv[:] = command
    facts = process_facts(os.getpid())
    assert facts is not None
    # Fields 48 and 49 of proc(5): begin and end of the command line in this process's memory.
    start, room = int(facts[45]), int(facts[46]) - int(facts[45])
    text = b"\0".join(os.fsencode(argument) for argument in command)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


def run_forked(
    spec: StartSpec,
    handed: Handed,
    parent: int,
    keep: Collection[int],
    drop: Collection[int] | None = None,
    call: Callable[..., Any] | None = None,
) -> NoReturn:
    """
    Be the worker of *spec* in a process that was just forked; *call* is a function that was not
    pickled.
    """
    try:
        enter(spec, handed, parent, keep, drop)
        handed = replace(handed, pid=os.getpid())
        if spec.kind == "program":
            _execute(spec, handed)
        forget_the_fork_server()

        # The libraries were loaded in the fork server, with its number of threads.
        _threads.set_blas_threads(spec.threads)
        _renew_output()
        if call is None:
            # Programs do not share this key, but all forks of a fork server would.
            _FIRST_PROCESS.authkey = os.urandom(32)
            _randomness.reseed()
        else:
            _randomness.reseed_caller()
            _forget_the_caller()
            _interpreter_end.begin_from_caller()

        _interpreter_end.finish(_run(spec, handed, call), functools.partial(_announcing.announce, handed))
    except BaseException:
        # No code of the user has run, or its end was already reported.
        traceback.print_exc()
        _interpreter_end.flush_streams(1)
        os._exit(1)


def _execute(spec: StartSpec, handed: Handed) -> NoReturn:
    argv = list(spec.argv)
    for descriptor in handed.inherit:
        os.set_inheritable(descriptor, True)
    # Only Python ignores these, and a program inherits ignored signals.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, handed.environment)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error}\n".encode(errors="surrogateescape"))
        _report.write_report(handed.report, _report.report_of_exception(error, b"", f"cannot run {argv[0]!r}: {error}"))
        # As in a shell: 127 if the program does not exist, 126 if it cannot be executed.
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run_fresh(at_start: Collection[str]) -> NoReturn:
    """
    Be the worker of a start spec in a fresh interpreter.

    The interpreter's last argument lists the descriptors of the spec's files, separated by
    commas. *at_start* are the modules that Python itself had imported.
    """
    _own_modules.note_start(at_start)
    descriptors = [int(number) for number in sys.argv.pop().split(",")]
    spec, handed = from_both(loads(content_of_files(descriptors)))
    base_path[:] = sys.path
    for inherited in handed.inherit:
        os.set_inheritable(inherited, False)
    close_each(descriptors)
    handed = replace(handed, pid=os.getpid())
    _interpreter_end.inherit()
    _interpreter_end.finish(_run(spec, handed, None), functools.partial(_announcing.announce, handed))


def _run(spec: StartSpec, handed: Handed, call: Callable[..., Any] | None) -> int:
    """Run the user's program; return its exit status, or ``-n`` for signal ``n``."""
    _attach(spec, handed)
    if call is None:
        _show_as(_command_of(spec))
    Surroundings.of(spec.surroundings).keep_memory_private()
    if spec.kind in ("script", "package", "module"):
        return _run_program(spec, handed)
    if call is None:
        return _run_function(spec, handed)

    if spec.args_by_rank:
        call = functools.partial(call, spec.local_rank)
    return _outcome(lambda: _showing.call_function(call), handed, shared=None, keeps_result=True)


def _attach(spec: StartSpec, handed: Handed) -> None:
    """
    Connect the modules that serve the program with its launcher, before any of the user's code.
    """
    # A separate descriptor: the user's stderr may be closed or replaced before a crash. The fault
    # handler cannot check that the descriptor is still its own.
    faults = _report.moved_up(handed.faults)
    faulthandler.enable(file=faults, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=faults, all_threads=True)
    faulthandler.register(OWN_STACK_SIGNAL, file=faults, all_threads=False)
    _report.has_the_stacks_of_crashes = True
    if not spec.unbuffered:
        _buffer_lines()
    _report.note_stderr(handed.tail)
    _worker_progress.attach(handed.memories.get("progress"), spec.local_rank)
    _pooled.attach(handed.memories, spec.local_rank, spec.variables)
    _serving.attach_own_master(spec.variables, is_hosted=spec.serves_caller)
    if spec.server is not None:
        _serving.serve_with_torch(spec.server)
    if spec.kind == "function":
        rank = int(spec.variables.get("RANK", spec.local_rank))
        _showing.attach(spec.displays, spec.displays_of, rank, spec.stdout)
        if not spec.has_keyboard:
            _showing.refuse_to_ask(_showing.ON_OTHER_MACHINE)


def _command_of(spec: StartSpec) -> list[str]:
    """Return the command line by which a plain Python would run the program."""
    module = [spec.entry] if spec.kind == "module" else []
    return [sys.executable, *flags_of(spec.python), *spec.argv[:1], *module, *spec.argv[1:]]


def _run_program(spec: StartSpec, handed: Handed) -> int:
    """Run a script, package or module."""
    first = _first_on_path(spec)
    sys.path[:] = [*first, *base_path]
    sys.argv[:] = spec.argv
    _own_modules.make_way(first)
    main = _new_main()
    return _outcome(lambda: _run_main(spec, handed, main), handed, shared=())


def _first_on_path(spec: StartSpec) -> list[str]:
    """Return the folder or archive of the program, if Python searches it first."""
    if spec.kind == "package":
        return [spec.path0]
    if _is_safe_path():
        return []
    # With ``-m``, Python searches the current folder first, unless it was removed.
    was_removed = spec.kind == "module" and not spec.path0
    return [] if was_removed else [spec.path0]


def _run_function(spec: StartSpec, handed: Handed) -> int:
    """Run a function that was sent pickled."""
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    _own_modules.make_way(_own_modules.folders_before(spec.sys_path, base_path))
    if not spec.shows_errors:
        # The user's own hook is called. A hook that wraps the present one, such as torch's for
        # each process group, must print nothing.
        sys.excepthook = _nothing
    return _outcome(lambda: _showing.call_function(_loaded(spec, handed)), handed, spec.shared, keeps_result=True)


def _is_safe_path() -> bool:
    """
    Return True if Python leaves the folder of a script or module off the search path (``-P``,
    ``-I``).
    """
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if "multiprocessing.process" in sys.modules:
        # multiprocessing sets this name at its import, which is over by now.
        sys.modules["__mp_main__"] = main
    return main


def _run_main(spec: StartSpec, handed: Handed, main: types.ModuleType) -> None:
    """
    Run a script, package or module as *main*, which stays the present one: its threads may need
    it to their end.
    """
    if spec.kind == "script":
        code = _code_of(spec.argv[0], handed, main)
        # Not by runpy.run_path, which would restore the former __main__ at its end.
        exec(code, main.__dict__)
    elif spec.kind == "module":
        # As ``python -m`` does.
        runpy._run_module_as_main(spec.entry)  # type: ignore[attr-defined]
    else:
        # As Python runs a folder or an archive, which comes first on the search path.
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _code_of(script: str, handed: Handed, main: types.ModuleType) -> types.CodeType:
    """Return the code of a *script*, and set the names in *main* that Python gives it."""
    path, content = absolute_path(script), b""
    if from_launcher := names_of_parts("script", handed.memories):
        content = content_of_memory("script", handed.memories)
        for part in from_launcher:
            os.close(handed.memories[part])
    else:
        with io.open_code(path) as file:
            content = file.read()

    if script == STDIN:
        main.__dict__.update(__file__="<stdin>", __cached__=None, __loader__=importlib.machinery.BuiltinImporter)
        # Without the ``__future__`` statements of this file.
        return compile(content, "<stdin>", "exec", dont_inherit=True)

    is_compiled = path.endswith(".pyc") or content.startswith(importlib.util.MAGIC_NUMBER)
    kind = importlib.machinery.SourcelessFileLoader if is_compiled else importlib.machinery.SourceFileLoader
    loader = kind("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    if not is_compiled:
        return compile(content, path, "exec", dont_inherit=True)

    code = loader.get_code("__main__")
    assert code is not None
    return code


def _loaded(spec: StartSpec, handed: Handed) -> Callable[[], Any]:
    """
    Return the function that the launcher pickled, bound to its arguments; its ``__main__`` is set
    up.
    """
    main = _new_main()
    if spec.main_file is not None:
        main.__dict__["__file__"] = spec.main_file
    content = content_of_memory("function", handed.memories)
    function, args, kwargs = _function.unpacked(content, spec.sources, handed.memories)
    return functools.partial(function, *(args[spec.local_rank] if spec.args_by_rank else args), **kwargs)


def _outcome(run: Callable[[], Any], handed: Handed, shared: Collection[str] | None, keeps_result: bool = False) -> int:
    """
    Run the user's code, and report and announce its end.

    Return the exit status, or ``-n`` for signal ``n``.
    """
    try:
        result = run()
        _interpreter_end.flush_lines()
    except SystemExit as stop:
        status = _interpreter_end.flush_streams(_exit_status(stop.code), shows=False)
        _announcing.announce(handed, _announcing.ProgramOutcome.ENDED, status)
        return status
    except BaseException as error:
        # An interrupted script ends as under `python`, a function's process as one of
        # `torch.multiprocessing`.
        interrupted = 128 + signal.SIGINT if keeps_result else -signal.SIGINT
        status = interrupted if isinstance(error, KeyboardInterrupt) else 1
        error = error.with_traceback(users_part(error))
        _interpreter_end.flush_streams(status, shows=False)
        _raised(error, handed, shared, status)
        return _shown(error, status)

    if not keeps_result:
        _announcing.announce(handed, _announcing.ProgramOutcome.ENDED, 0)
        return 0

    try:
        payload = _result_pickles.pack_result(result, shared)
    except Exception as error:
        unsendable = _result_pickles.unsendable(result, error)
        _raised(unsendable, handed, shared, 1)
        print(f"elasticlib: {unsendable}", file=sys.stderr)
        return 1

    status = 0 if _deliver(_report.Report("result", payload), handed) else 1
    _announcing.announce(handed, _announcing.ProgramOutcome.RETURNED, status)
    if status == 0:
        _announcing.await_release(handed)
    return status


def _nothing(*_: object) -> None:
    """Do nothing: the hook of a program whose caller shows its exceptions."""


def _shown(error: BaseException, status: int) -> int:
    """
    Show *error* with the program's hook, as the interpreter does.

    Return the exit status, which the hook may change.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        if sys.excepthook is sys.__excepthook__:
            # Unlike the interpreter's own hook, it finds the lines of a notebook's cells, too.
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        return _exit_status(stop.code)
    except BaseException as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)

    return status


def _raised(error: BaseException, handed: Handed, shared: Collection[str] | None, status: int) -> None:
    is_shown = _shows_tracebacks(sys.excepthook) and sys.stderr is sys.__stderr__
    entry = replace(_result_pickles.report_of_failure(error, shared), is_shown=is_shown)
    if _deliver(entry, handed):
        _record.leave(entry)
    _announcing.announce(handed, _announcing.ProgramOutcome.RAISED, status)


def _shows_tracebacks(hook: Callable[..., object]) -> bool:
    """
    Return True for the interpreter's hook, for torch's, which writes "[rank1]: " before each of its
    lines, and for that of a launch in this worker.
    """
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        # Each init_process_group() wraps the present hook, and keeps it in its closure.
        names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
        wrapped = dict(zip(names, cells, strict=True)).get("old_hook")
        if wrapped is None:
            return False
        hook = wrapped.cell_contents
    return hook is sys.__excepthook__ or _is_of_a_launch(hook)


def _is_of_a_launch(hook: Callable[..., object]) -> bool:
    """Return True for the hook that a launch in this worker has set."""
    return isinstance(hook, types.FunctionType) and is_ours(hook.__code__.co_filename)


def _deliver(report: _report.Report, handed: Handed) -> bool:
    """Write *report* for the launcher; return False, with a line on stderr, if that fails."""
    # A process that the user's code has forked must not write the report of the worker.
    if os.getpid() != handed.pid:
        print(
            f"elasticlib: process {os.getpid()}, which the worker {handed.pid} forked, returned from the "
            f"user's code: its {report.kind} is dropped; end such a process by os._exit()",
            file=sys.stderr,
        )
        return report.kind == "result"

    try:
        try:
            _report.write_report(_report.reopened(handed.report, handed.identity, handed.spawner), report)
        except OSError as failure:
            if failure.errno != errno.EFBIG:
                raise
            # The file size limit leaves no room for it: the spawner may have no limit.
            _announcing.pour(handed, _report.packed_report(report))
    except OSError as failure:
        print(f"elasticlib: this worker's {report.kind} is lost: {failure}", file=sys.stderr)
        return False

    return True


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        # The interpreter keeps the lowest eight bits of a number that fits its integers.
        return code & 0xFF if -(2**63) <= code < 2**63 else 255
    print(code, file=sys.stderr)
    return 1
