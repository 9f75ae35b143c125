"""
Handles of processes without pidfds: kernels before Linux 5.3, and containers whose seccomp
profile refuses them.

    whose handle             how its end is seen                     how it is signalled
    a child                  a thread that waits for it              by its number, while it is not reaped
    the parent               a thread that the kernel wakes at       not at all
                             its end, and that looks twice a second
    any other process        by its number and the time of its       the kernel signals the owner of a pipe at
                             start                                   each write; an owner is a process, not a
                                                                     number
    one that sent its        it alone has the other end of a pipe    the same way, with SIGKILL or SIGCONT alone
    `own_descriptors`

Rules of this file: no signal ever reaches another process that reuses a number. The threads are
invisible to the program, and a forked process needs none of them.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable

from elasticlib.processes._pidfd import Handle, exitcode_of

_LOOK = 0.5
"""Seconds between two looks at a parent, if no signal reports its end."""


def handle_of(pid: int) -> Handle:
    """Return a handle of the process that now has this number. Raises OSError."""
    return Child(pid) if _is_unreaped_child(pid) else Other(pid)


def _is_unreaped_child(pid: int) -> bool:
    """
    Return True if *pid* is a child of this process that is not reaped, so that no other process
    has the number.
    """
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _Bell:
    """A descriptor that becomes readable when *wait* has returned, in a thread of its own."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._made_in = os.getpid()

        # The thread has a descriptor of its own: this one may be closed, and its number reused,
        # by then.
        try:
            copy = os.dup(self._descriptor)
        except OSError:
            os.close(self._descriptor)
            raise

        try:
            _thread.start_new_thread(_ring, (wait, copy))
        except RuntimeError as error:
            os.close(copy)
            os.close(self._descriptor)
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error

    def fileno(self) -> int:
        return self._descriptor

    def has_thread(self) -> bool:
        """
        Return True if its thread can exist: a process that was forked from its creator has none.
        """
        return self._made_in == os.getpid()

    def close(self) -> None:
        os.close(self._descriptor)


def _ring(wait: Callable[[], object], descriptor: int) -> None:
    # Signals are for the program's own threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    wait()
    os.eventfd_write(descriptor, 1)
    os.close(descriptor)


class _Awaited(Handle):
    """A process with a thread that waits for its end, from the first call of `fileno` on."""

    def __init__(self, pid: int) -> None:
        super().__init__(-1)
        self._pid = pid
        self._bell: _Bell | None = None
        self._closed = False

    def fileno(self) -> int:
        if self._closed:
            return -1
        if self._bell is None or not self._bell.has_thread():
            self._bell = _Bell(self._wait)
        return self._bell.fileno()

    def inherited(self) -> tuple[int, ...]:
        return ()

    def _wait(self) -> None:
        raise NotImplementedError

    def exitcode(self) -> int | None:
        return exitcode_of(os.P_PID, self._pid)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        bell, self._bell, self._closed = self._bell, None, True
        if bell is not None:
            bell.close()


class Child(_Awaited):
    """A child of this process: no other process has its number until it is reaped."""

    def has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def send(self, signum: int) -> None:
        if not _is_unreaped_child(self._pid):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        os.kill(self._pid, signum)

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)


class Parent(_Awaited):
    """
    The parent of the process that made this handle; a process that is forked from that one may
    use the handle too.

    If PR_SET_PDEATHSIG asked for it, the kernel sends SIGCONT at the parent's end; otherwise a
    look finds the end.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._child = os.getpid()
        self._began = _start_of(pid)
        if self._began is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        # Blocked in all threads, so that sigtimedwait receives it; it continues a stopped process
        # all the same.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})

    def has_ended(self) -> bool:
        if os.getpid() == self._child:
            # The kernel changes this at once, while /proc may be late.
            return os.getppid() != self._pid
        return _start_of(self._pid) != self._began

    def send(self, signum: int) -> None:
        raise PermissionError(
            errno.EPERM, "pidfd_open is not available here, so the parent process cannot be signalled"
        )

    def _wait(self) -> None:
        while not self.has_ended():
            signal.sigtimedwait({signal.SIGCONT}, _LOOK)


class Other(Handle):
    """
    Any process: the owner of a pipe, which the kernel signals at each write.

    The kernel stores the owner as a process, not as a number.
    """

    def __init__(self, pid: int) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        super().__init__(reader)
        self._pid = pid
        try:
            _own(reader, pid, signal.SIGCONT)
            self._began = _start_of(pid)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        raise NotImplementedError(
            "pidfd_open is not available here, so the end of a process that is not a child cannot be waited for; "
            "use has_ended()"
        )

    def has_ended(self) -> bool:
        return self._began is None or _start_of(self._pid) != self._began

    def send(self, signum: int) -> None:
        if self.has_ended():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        # Signal 0 sends nothing: it raises if this process may not signal that one.
        os.kill(self._pid, 0)
        if signum:
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signum)
            os.write(self._writer, b"!")
            # The pipe must be empty again, or the next write is not an event for the kernel.
            os.read(self._descriptor, 1)

    def reap(self) -> None:
        """Do nothing: it is not a child."""

    def close(self) -> None:
        super().close()
        writer, self._writer = self._writer, -1
        if writer >= 0:
            os.close(writer)


def _own(descriptor: int, pid: int, signum: int) -> None:
    """
    Make the kernel send *signum* to the process *pid* whenever the pipe *descriptor* becomes
    readable.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
    # Old kernels accept a number that no process has.
    if fcntl.fcntl(descriptor, fcntl.F_GETOWN) != pid:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signum)
    # Last, since it enables the signals, whose owner and number must be known.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def _start_of(pid: int) -> bytes | None:
    """
    Return the start time of the process with that number (the kernel's text).

    None if it has ended or does not exist.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            facts = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # A process whose first thread alone has ended looks like a zombie, too.
    # Counted from the state letter: 17 is the number of threads, 19 the start time in clock ticks.
    is_zombie = facts[0] in (b"Z", b"X") and int(facts[17]) <= 1
    return None if is_zombie else facts[19]


class _OwnEnds:
    """
    Pipes that end with this process: it alone has the read ends, and gets a signal at each write.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, tuple[int, int]]] = []
        writers = []
        for signum in (signal.SIGKILL, signal.SIGCONT):
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            # It keeps both: if the last write end were closed elsewhere, the kernel would signal
            # that too.
            self._ends += [(reader, _identity(reader)), (writer, _identity(writer))]
            _own(reader, os.getpid(), signum)
            writers.append(writer)

        self.writers = tuple(writers)

    def drop(self) -> None:
        """Close them in a forked process, if the program has not replaced them."""
        for descriptor, identity in self._ends:
            with contextlib.suppress(OSError):
                # The program may have closed all descriptors, and opened files with these
                # numbers.
                if _identity(descriptor) == identity:
                    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


_ends: list[_OwnEnds] = []


def own_descriptors() -> tuple[int, ...]:
    """
    Return descriptors with which another process can hold this one, as `PipeHandle`; this process
    owns them.
    """
    if not _ends:
        _ends.append(_OwnEnds())
    return _ends[0].writers


def _drop_in_child() -> None:
    while _ends:
        _ends.pop().drop()


os.register_at_fork(after_in_child=_drop_in_child)


class PipeHandle(Handle):
    """
    A process, held by the pipes that it sent: a byte in *kill* is a SIGKILL, one in *wake* a
    SIGCONT.
    """

    def __init__(self, kill: int, wake: int = -1) -> None:
        super().__init__(kill)
        self._wake = wake

    def inherited(self) -> tuple[int, ...]:
        return tuple(number for number in (self._descriptor, self._wake) if number >= 0)

    def send(self, signum: int) -> None:
        pipes: dict[int, int] = {signal.SIGKILL: self._descriptor, signal.SIGCONT: self._wake}
        descriptor = pipes.get(signum, -1)
        if descriptor < 0:
            raise PermissionError(
                errno.EPERM, "pidfd_open is not available here, so this signal cannot be sent to the process"
            )

        # The program may have set SIGPIPE to its default action, which would end it.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            os.write(descriptor, b"!")
        except BlockingIOError:
            # The pipe is full: the process has received thousands of signals.
            pass
        except BrokenPipeError as error:
            if signal.SIGPIPE not in former:
                # The write has left a SIGPIPE, which could end the program once it is not blocked.
                signal.sigtimedwait({signal.SIGPIPE}, 0)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def reap(self) -> None:
        """Do nothing: its parent reaps it."""

    def close(self) -> None:
        super().close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
