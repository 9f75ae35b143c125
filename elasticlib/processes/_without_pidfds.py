"""
Handles of processes for kernels without pidfds, before Linux 5.3, and containers whose seccomp profile refuses them.

    whose handle             how its end is seen                     how it is signalled
    a child                  a thread that waits for it              by its number, while it is not reaped
    the parent               a thread that the kernel wakes at       not at all
                             its end, and that looks twice a second
    any other process        by its number and the time of its       the kernel signals the owner of a pipe at each
                             start                                   write, and an owner is a process, no number
    one that sent its        it alone has the other end of a pipe    by the same, with SIGKILL or SIGCONT alone
    `own_descriptors`

Rules of this file: no signal ever goes to another process that got a number; threads are seen by nobody, and a process
that is forked from this one needs none of them.
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
"""Seconds between two looks at a parent, where no signal tells of its end."""


def handle_of(pid: int) -> Handle:
    """Hold the process that now has this number. Raises OSError."""
    return Child(pid) if _is_unreaped_child(pid) else Other(pid)


def _is_unreaped_child(pid: int) -> bool:
    """Whether the number is that of a child of this process that nobody has reaped, and so of no other process."""
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
        # The thread has a descriptor of its own: this one may be closed, and its number be another file's by then.
        try:
            copy = os.dup(self._descriptor)
            _thread.start_new_thread(_ring, (wait, copy))
        except RuntimeError as error:
            os.close(copy)
            os.close(self._descriptor)
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error

    def fileno(self) -> int:
        return self._descriptor

    def has_thread(self) -> bool:
        """Whether its thread can be there: a process that was forked from ours has none."""
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
    """What has a thread for its end, from the first time on that somebody wants to wait for that."""

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
    """A child of this process: its number is nobody else's until it is reaped."""

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
    The parent of the process that made this handle; one that is forked from it may use the handle too.

    The kernel sends SIGCONT at the parent's end where that was asked for (PR_SET_PDEATHSIG); else a look finds it.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._child = os.getpid()
        self._began = _start_of(pid)
        if self._began is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        # Blocked in all threads, so that it waits for the one that takes it; it wakes a stopped process all the same.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})

    def has_ended(self) -> bool:
        if os.getpid() == self._child:
            # The kernel changes this at once, while /proc may be late.
            return os.getppid() != self._pid
        return _start_of(self._pid) != self._began

    def send(self, signum: int) -> None:
        raise PermissionError(errno.EPERM, "a parent cannot be signalled without pidfds")

    def _wait(self) -> None:
        while not self.has_ended():
            signal.sigtimedwait({signal.SIGCONT}, _LOOK)


class Other(Handle):
    """Any process: the owner of a pipe that the kernel signals at each write. An owner is a process, and no number."""

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
        raise NotImplementedError("without pidfds nothing tells of the end of a process that is no relative")

    def has_ended(self) -> bool:
        return self._began is None or _start_of(self._pid) != self._began

    def send(self, signum: int) -> None:
        if self.has_ended():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        # Signal 0 is none: it raises where this process may not send any.
        os.kill(self._pid, 0)
        if signum:
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signum)
            os.write(self._writer, b"!")
            os.read(self._descriptor, 1)

    def reap(self) -> None:
        """Nothing: it is no child."""

    def close(self) -> None:
        super().close()
        writer, self._writer = self._writer, -1
        if writer >= 0:
            os.close(writer)


def _own(descriptor: int, pid: int, signum: int) -> None:
    """Have the kernel send *signum* to the process *pid* whenever the pipe *descriptor* gets something to read."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
    # Old kernels accept a number that no process has.
    if fcntl.fcntl(descriptor, fcntl.F_GETOWN) != pid:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signum)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def _start_of(pid: int) -> bytes | None:
    """When the process with that number began, in the kernel's words; None when it has ended, or is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            facts = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # One whose first thread alone has ended looks like a zombie, too.
    is_zombie = facts[0] in (b"Z", b"X") and int(facts[17]) <= 1
    return None if is_zombie else facts[19]


class _OwnEnds:
    """Pipes that end with this process: it alone has the ends that are read, and is signalled at each write."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, tuple[int, int]]] = []
        writers = []
        for signum in (signal.SIGKILL, signal.SIGCONT):
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            # It keeps both: were the last end for writing closed elsewhere, the kernel would signal that, too.
            self._ends += [(reader, _identity(reader)), (writer, _identity(writer))]
            _own(reader, os.getpid(), signum)
            writers.append(writer)
        self.writers = tuple(writers)

    def drop(self) -> None:
        """Let go of them in a process that was forked from theirs."""
        for descriptor, identity in self._ends:
            with contextlib.suppress(OSError):
                # The program may have closed all descriptors, and opened files of its own.
                if _identity(descriptor) == identity:
                    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


_ends: list[_OwnEnds] = []


def own_descriptors() -> tuple[int, ...]:
    """Descriptors by which another process can hold this one, as `PipeHandle`; they stay this process's."""
    if not _ends:
        _ends.append(_OwnEnds())
    return _ends[0].writers


def _drop_in_child() -> None:
    while _ends:
        _ends.pop().drop()


os.register_at_fork(after_in_child=_drop_in_child)


class PipeHandle(Handle):
    """A process, by the pipes that it sent: a byte in *kill* is a SIGKILL, one in *wake* a SIGCONT."""

    def __init__(self, kill: int, wake: int = -1) -> None:
        super().__init__(kill)
        self._wake = wake

    def inherited(self) -> tuple[int, ...]:
        return tuple(number for number in (self._descriptor, self._wake) if number >= 0)

    def send(self, signum: int) -> None:
        pipes: dict[int, int] = {signal.SIGKILL: self._descriptor, signal.SIGCONT: self._wake}
        descriptor = pipes.get(signum, -1)
        if descriptor < 0:
            raise PermissionError(errno.EPERM, "without pidfds there is no such signal for this process")
        # The program may have given SIGPIPE its default action, which is to end it.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            os.write(descriptor, b"!")
        except BlockingIOError:
            # The pipe is full: the process has got thousands of signals.
            pass
        except BrokenPipeError as error:
            if signal.SIGPIPE not in former:
                signal.sigtimedwait({signal.SIGPIPE}, 0)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def reap(self) -> None:
        """Nothing: its parent does."""

    def close(self) -> None:
        super().close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
