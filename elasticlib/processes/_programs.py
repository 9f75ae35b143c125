"""
Start of helper programs, and the handles that this program has of them.

Rules of this file:

* A helper gets a socket as descriptor 3 and a session of its own.
* It is held by a descriptor, never by its number, which the kernel gives away again.
* A child that the caller forks drops all handles, so that it can neither use them nor keep their
  processes alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elasticlib.errors import EntrypointError, StartError, name_of_signal
from elasticlib.processes._descriptors import close_each
from elasticlib.processes._handles import handle_of, received_handle
from elasticlib.processes._pidfd import Handle
from elasticlib.processes._refusals import FEW_DESCRIPTORS, FEW_PROCESSES
from elasticlib.processes._wire import Channel, wait_readable

_PYDEVD = "_pydev_bundle.pydev_monkey"
_START_LIMIT = 60.0
"""Seconds in which another interpreter must have imported elasticlib; a slow file system may take some."""
CHANNEL_FD = 3
"""Descriptor of a helper's channel."""

_ROOT = str(Path(__file__).parents[2])
# ``-c`` and not ``-m``: modules in the current folder must not shadow modules of the same name.
BOOT_CODE = f"import sys; p = sys.path; '' in p and p.remove(''); {_ROOT!r} in p or p.append({_ROOT!r}); "
"""First statements of a ``-c`` program that imports elasticlib."""

AT_START_CODE = "at_start = set(sys.modules); "
"""
Next statement: stores the modules that Python itself has imported, for the program's first
argument.
"""

_FRESH_BOOT = BOOT_CODE + AT_START_CODE + "from elasticlib.workers.child._child import run_fresh; run_fresh(at_start)"

BEGIN_CODE = (
    BOOT_CODE
    + "import json; from elasticlib.processes._descriptors import close_all_but; close_all_but({0, 1, 2, 3}); "
    + "p += [f for f in json.loads(sys.argv.pop()) if f not in p]; "
)
"""First statements of a program whose argument is the `search_path_argument`."""

_FLAGS = "bBdEIOPqRsSv"
"""
Options of the interpreter without a value; without ``-u``, which workers always have, ``-i`` and
``-x``.
"""
_CHECK_OF_HASHES = "--check-hash-based-pycs"
_OF_COMMANDS = ("-s", "-P", "-I", "-E")
"""Options in the first line of an installed command, which apply to that command alone."""
_COMMANDS = ("elasticrun", "elasticrun.exe")
NOT_THIS_USERS = "; the current user cannot execute it: make it and the folders above it readable for all users"
FROM_OUTSIDE = " (killed from outside, or out of memory)"
KILL_SECONDS = 5.0
"""Seconds in which a process ends after SIGKILL, unless it is in uninterruptible sleep."""


class HelperLostError(StartError):
    """Error for a helper that was ended from outside, so that it can be started again."""

    @classmethod
    def of(cls, name: str, pid: int, signum: int = 0) -> HelperLostError:
        """Return the error for the process *name*; 0 for an unknown *pid* or signal."""
        number = f" (pid {pid})" if pid else ""
        how = f"was killed by {name_of_signal(signum)}" if signum else "ended unexpectedly"
        return cls(f"the {name} process{number} {how}{FROM_OUTSIDE}")


class _Closable(Protocol):
    def close(self) -> object: ...


_Own = TypeVar("_Own", bound=_Closable)
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_in_forks(handle: _Own) -> _Own:
    """
    Return *handle*, and close it in each process that the caller forks: it belongs to the parent
    alone.
    """
    _own.add(handle)
    return handle


class Link(Channel):
    """A channel to a child of this process; a process that the caller forks closes it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel._sock)
        closed_in_forks(self)


def links_to_children() -> set[int]:
    """Return the descriptors of this process's links; -1 stands for closed ones."""
    return {handle.fileno() for handle in list(_own) if isinstance(handle, Link)}


def _drop_in_child() -> None:
    for handle in list(_own):
        with contextlib.suppress(OSError):
            handle.close()


os.register_at_fork(after_in_child=_drop_in_child)


class Process:
    """
    A process, held by its handle: signals and waits never reach another process with the same
    number.
    """

    def __init__(self, pid: int, handle: Handle | None = None) -> None:
        self.pid = pid
        self._handle = handle
        closed_in_forks(self)

    @classmethod
    def sent(cls, pid: int, descriptors: Sequence[int]) -> Process:
        """
        Return the process that sent *descriptors* as a handle; without a handle if it had no room
        for them.
        """
        return cls(pid, received_handle(descriptors) if descriptors else None)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended; -1 once closed."""
        return -1 if self._handle is None else self._handle.fileno()

    def send(self, signum: int) -> None:
        """Signal it; do nothing if it is gone, or this object is closed."""
        if self._handle is not None:
            # A program that has dropped its privileges may have lost the right to signal it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._handle.send(signum)

    def may_be_signalled(self) -> bool:
        """
        Return True if this program may signal it; a program that drops its privileges can lose
        that right.
        """
        try:
            if self._handle is not None:
                self._handle.send(0)
        except PermissionError:
            return False
        except ProcessLookupError:
            # It has ended; its owner notices that without this check.
            pass
        return True

    def ends(self, limit: float) -> bool:
        """Return True if it ends within *limit* seconds, has ended, or this object is closed."""
        return self._handle is None or bool(wait_readable([self], limit))

    def kill(self, limit: float = KILL_SECONDS) -> bool:
        """
        SIGKILL it, and return True if it is gone.

        Only a process in uninterruptible sleep can be left.
        """
        self.send(signal.SIGKILL)
        return self.ends(limit)

    def wait(self, limit: float) -> None:
        """
        Continue it if it is stopped, SIGKILL it if it has not ended after *limit* seconds, and
        close the handle.
        """
        self.send(signal.SIGCONT)
        if not self.ends(limit):
            self.kill()
        self._reap()
        self.close()

    def _reap(self) -> None:
        """Do nothing: its parent reaps it."""

    def close(self) -> None:
        """Close the handle."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


class ChildProcess(Process):
    """A child of this process, from its start on; `wait` reaps it."""

    def __init__(self, pid: int) -> None:
        handle = None
        # The caller's program may reap children that it did not start.
        with contextlib.suppress(ProcessLookupError):
            handle = handle_of(pid)
        super().__init__(pid, handle)

    def exitcode(self) -> int | None:
        """
        Return the exit status as `subprocess` does.

        None while it runs, and if it is not known (any more).
        """
        return None if self._handle is None else self._handle.exitcode()

    def _reap(self) -> None:
        if self._handle is not None:
            self._handle.reap()


def search_path_argument() -> str:
    """Return the module search path, as an argument for a helper."""
    return dumps([os.path.abspath(folder) for folder in sys.path if folder])


def check_system() -> None:
    """
    Raise `StartError` if the machine lacks ``/proc`` or ``/dev/null``, which every start needs.
    """
    if not os.path.exists("/proc/self/status"):
        raise StartError(
            "elasticlib needs /proc of this PID namespace, but /proc/self/status does not exist: mount it "
            "(mount -t proc proc /proc), or start the container with it"
        )

    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        is_device = False
    else:
        is_device = stat.S_ISCHR(os.fstat(null).st_mode)
        os.close(null)

    if not is_device:
        raise StartError(
            f"elasticlib needs {os.devnull}, but it is not a device that can be read and written: create it "
            f"(mknod -m 666 {os.devnull} c 1 3), or start the container with /dev"
        )


def above_standard_streams(descriptor: int) -> int:
    """
    Return a copy of *descriptor* with a number above those of the standard streams and
    `CHANNEL_FD`.
    """
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)


def start_error(what: str, error: OSError | RuntimeError) -> StartError:
    """Return the error for *what* the system refused to start, with the fix."""
    # For threads Python only says that it cannot start more.
    number = errno.EAGAIN if isinstance(error, RuntimeError) else error.errno
    fixes = {errno.EAGAIN: FEW_PROCESSES, errno.EMFILE: FEW_DESCRIPTORS, errno.EACCES: NOT_THIS_USERS}
    fix = fixes.get(number or 0, "")
    return StartError(f"cannot start {what}: {getattr(error, 'strerror', None) or error}{fix}")


@contextlib.contextmanager
def open_files_needed(what: str) -> Iterator[None]:
    """Raise `StartError` for *what*, with the fix, if this program may open no more files."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise start_error(what, error) from error


def start_thread(thread: threading.Thread) -> threading.Thread:
    """Start *thread* and return it. Raises `StartError` if the system has no room for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise start_error(f"the thread {thread.name}", error) from error
    return thread


def fresh_command(python: str, flags: Sequence[str] = ()) -> list[str]:
    """
    Return the command of a new interpreter that becomes a worker.

    The descriptor of the worker's order must be added as the last argument.
    """
    return [python, *flags, "-u", "-c", _FRESH_BOOT]


def flags_of(fresh_command: Sequence[str]) -> Sequence[str]:
    """
    Return the interpreter's options, including ``-u``, from a command that `fresh_command` made.
    """
    return fresh_command[1:-2]


def importable_by(python: str, environment: Mapping[str, str]) -> bool:
    """
    Return True if the interpreter *python* can run a fork server: it finds elasticlib and its
    dependencies.

    Raises `EntrypointError` if it cannot be run.
    """
    command = [python, "-c", BOOT_CODE + "import attrs, cloudpickle, elasticlib.workers.spawner._fork_server"]
    try:
        with unseen_by_debugger():
            done = subprocess.run(
                command, env=dict(environment), capture_output=True, check=False, timeout=_START_LIMIT
            )
    except subprocess.TimeoutExpired as error:
        why = f"PYTHON_EXEC={python!r} has not imported elasticlib within {_START_LIMIT:g} s"
        raise EntrypointError(f"{why}: give an interpreter that does") from error
    except OSError as error:
        raise EntrypointError(f"PYTHON_EXEC={python!r} cannot be run: {error.strerror}") from error
    return done.returncode == 0


def flags_here() -> tuple[str, ...]:
    """
    Return this interpreter's options (optimisation, warnings, isolation, ...), which its workers
    get too.
    """
    return flags_in(sys.orig_argv)


def flags_in(command: Sequence[str]) -> tuple[str, ...]:
    """
    Return the interpreter's own options in the *command* of a Python program, for another
    program.

    Environment variables such as ``PYTHONOPTIMIZE`` are inherited anyway, and are not included.
    """
    flags: list[str] = []
    arguments = iter(command[1:])
    for argument in arguments:
        # The only long option of the interpreter that takes a value.
        if argument == _CHECK_OF_HASHES:
            flags += [argument, next(arguments, "")]
        elif not _is_letters(argument):
            # The program begins here.
            is_command = os.path.basename(argument) in _COMMANDS
            return tuple(flag for flag in flags if not (is_command and flag in _OF_COMMANDS))
        else:
            found, is_program = _flags_of_letters(argument, arguments)
            flags += found
            if is_program:
                break

    return tuple(flags)


def _is_letters(argument: str) -> bool:
    """Return True for an argument of one-letter options, such as ``-uOO``."""
    return argument.startswith("-") and not argument.startswith("--") and argument != "-"


def _flags_of_letters(argument: str, arguments: Iterator[str]) -> tuple[list[str], bool]:
    """
    Return the options in *argument*, and True if the program follows.

    A value may be the next argument.
    """
    flags: list[str] = []
    for at, letter in enumerate(argument[1:], 2):
        # The rest of the command belongs to the program.
        if letter in "cm":
            return flags, True
        if letter in "WX":
            # The rest of the argument is its value, or else the next argument.
            value = argument[at:] or next(arguments, "")
            flags += [f"-{letter}", value]
            break
        if letter in _FLAGS:
            flags.append(f"-{letter}")

    return flags, False


def spawn(
    command: Sequence[str], environment: Mapping[str, str], descriptor: int, stderr: int | None = None
) -> ChildProcess:
    """
    Start *command* in a session of its own, with *descriptor* as `CHANNEL_FD`, and return the
    child.

    The caller must wait for it. It reads nothing, and writes only to *stderr* if that is given.
    Raises `StartError`.
    """
    check_system()

    # Copies with higher numbers: the actions below overwrite the numbers 0 to 3.
    copies = [above_standard_streams(descriptor), *(() if stderr is None else (above_standard_streams(stderr),))]
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, 0 if stderr is None else copies[1], 2),
        (os.POSIX_SPAWN_DUP2, copies[0], CHANNEL_FD),
    ]
    try:
        with unseen_by_debugger():
            return ChildProcess(
                os.posix_spawn(command[0], list(command), environment, file_actions=actions, setsid=True)
            )
    except OSError as error:
        raise start_error(command[0], error) from error
    finally:
        close_each(copies)


# A debugger that follows the children of this program: pydevd, which debugpy (VS Code) and
# PyCharm use. It replaces the calls that start a program, and makes each new interpreter call
# back. Only the workers of a job are the user's, so helpers are started without the debugger. A
# helper starts a worker where the debugger cannot see it, so the worker's command is made here as
# the debugger would make it.


def debugger_follows() -> bool:
    """Return True if a debugger would follow a program that this one starts."""
    return _follower() is not None


def followed_by_debugger(command: Sequence[str]) -> list[str]:
    """
    Return *command* with the debugger's additions, so that it stops at breakpoints; unchanged
    without a debugger.
    """
    follower = _follower()
    return list(command) if follower is None else list(follower.patch_args(list(command)))


@contextlib.contextmanager
def unseen_by_debugger() -> Iterator[None]:
    """Hide the programs that this thread starts in the block from the debugger."""
    pydevd = _pydevd()
    with contextlib.nullcontext() if pydevd is None else pydevd.skip_subprocess_arg_patch():
        yield


def _follower() -> Any:
    """Return pydevd's module for children if a client can debug them; else None."""
    return None if _is_kernel() else _pydevd()


def _pydevd() -> Any:
    """
    Return pydevd's module for children; None if it is not loaded, or does not follow children.
    """
    module = sys.modules.get(_PYDEVD)
    # pydevd keeps a call that it has replaced under this name.
    follows_children = hasattr(os, "original_posix_spawn")
    has_all = hasattr(module, "patch_args") and hasattr(module, "skip_subprocess_arg_patch")
    return module if follows_children and has_all else None


def _is_kernel() -> bool:
    """
    Return True in a kernel of Jupyter, whose front ends debug the cells alone.

    There, children under pydevd hang at their start: they wait for a client that never connects.
    """
    application: Any = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return application is not None and application.initialized()
