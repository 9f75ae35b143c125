"""
The reaper: nothing outlives the launcher. Each process in the chain watches its parent and kills
the processes below.

Run as a script, this file is the reaper: a tiny process in a session of its own, between the
launcher and the fork server. When the launcher is gone, it kills every descendant and ends. Only
the processes that remove the named shared memory of killed workers live a moment longer. When the
fork server is gone, it becomes the parent of the spawners, which continue, and it ends with the
last one.

Fork server and spawner use the same three steps, so any process of the chain may be killed. If
one of them is stopped, the kernel continues it when its parent dies.

Rules of this file: it never signals a number that another process may have by now. It imports the
standard library and only the modules below, since the reaper must start in milliseconds and stay
small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import types
from collections.abc import Collection, Container, Iterable, Sequence
from typing import NoReturn

if __name__ == "__main__":
    # Run by its path, this file has no package: this package skips the real __init__.
    sys.modules["elasticlib"] = _package = types.ModuleType("elasticlib")
    _package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from elasticlib._clock import monotonic, sleep
from elasticlib.processes._descriptors import close_all_but
from elasticlib.processes._handles import handle_of, handle_of_parent, wait_for_ends
from elasticlib.processes._memory_files import anonymous_file
from elasticlib.processes._pidfd import Handle
from elasticlib.processes._refusals import FEW_PROCESSES
from elasticlib.processes._sessions import SharedSessions

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
REAPER_PATH = os.path.abspath(__file__)
"""Path of the reaper's program."""
FORK_SERVER_FD = 3
"""Descriptor of a fork server's control socket."""
KEPT_FD = 4
"""Descriptor of a fork server's file of the sessions that outlive their launch."""
_RESOURCE_TRACKER = b"resource_tracker import main"
"""Part of the command line of Python's resource tracker, and of the one of loky (joblib)."""
_TORCHS_MANAGER = b"torch_shm_manager"
_LONGEST_COMMAND = 4096
_LOOKS_AT_SLEEP, _LOOK = 20, 0.005
"""Number of looks at a process in uninterruptible sleep, and the seconds between them."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


_libc = ctypes.CDLL(None, use_errno=True)


# Services of the kernel for this process when its parent, or a process below, ends.


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option}, {argument})")


def die_with_parent(parent: int) -> None:
    """
    Make the kernel SIGKILL this process when the thread that forked it ends; end now if *parent*
    has ended.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # The parent may have died before the signal was armed.
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """
    Make this process watch its parent and kill the processes below, in place of
    `die_with_parent`.

    A stopped process could do neither, so the kernel continues it when its parent, or just the
    thread that forked it, ends.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def wake_with_parent() -> None:
    """
    Do as `outlive_parent` in a process that has nothing to kill; it also works without the
    signal.
    """
    with contextlib.suppress(OSError):
        outlive_parent()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, including those in other sessions."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


# Work of this process itself.


def settle_signals() -> None:
    """
    Ignore stop signals, also when a scheduler signals every process of the job: the launcher
    stops the workers.

    Children must wait to be reaped, even if the launcher was started with SIGCHLD ignored.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def process_facts(pid: int) -> list[bytes] | None:
    """
    Return the fields of ``/proc/PID/stat`` from the state letter on; None if the process is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may hold blanks and brackets: the fields begin after the last
            # bracket.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _children_by_parent() -> dict[int, list[tuple[int, str]]]:
    """Return (pid, state letter) of the children of each process of this machine, by parent."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        facts = process_facts(int(entry)) if entry.isdigit() else None
        if facts is not None:
            children.setdefault(int(facts[1]), []).append((int(entry), facts[0].decode()))
    return children


def descendants(root: int, spare: Collection[int] = (), kept: Container[int] = ()) -> list[tuple[int, int, str]]:
    """
    Return (pid, parent, state letter) of every descendant of *root*.

    Those in *spare* or *kept* are left out, with their descendants.
    """
    children = _children_by_parent()
    found: list[tuple[int, int, str]] = []
    parents = [root]
    while parents:
        parent = parents.pop()
        for pid, state in children.get(parent, ()):
            if pid not in spare and pid not in kept:
                found.append((pid, parent, state))
                parents.append(pid)

    return found


def kill_descendants(spare: Collection[int] = (), limit: float = 5.0, kept: Container[int] = ()) -> list[int]:
    """
    SIGKILL and reap every descendant of this process except *spare*, *kept* and their
    descendants.

    Return the processes that are left after *limit* seconds. Only a process in uninterruptible
    sleep can be left, and those that remove the others' memory. The latter end without help, and
    are not waited for. The caller must be a sub-reaper.
    """
    me = os.getpid()
    deadline = monotonic() + limit
    while _has_children():
        members = [each for each in descendants(me, spare, kept) if not _still_removes_memory(me, each[0])]

        # Including apparent zombies: a process whose first thread alone has ended looks like one.
        alive = [pid for pid, parent, _ in members if not (parent == me and reap(pid))]

        # A process may fork while it is listed: the sweep repeats until a listing is empty.
        for pid in alive:
            signal_descendant(me, pid, signal.SIGKILL)
        if not members:
            return []
        left = deadline - monotonic()
        if left <= 0:
            return alive
        wait_until_gone(alive, left)

    return []


def is_memory_cleaner(pid: int) -> bool:
    """
    Return True for Python's resource tracker and for ``torch_shm_manager``, which unlink other
    processes' shared memory.

    Only they know the names. The tracker ends at once, ``torch_shm_manager`` some seconds later.
    If they were killed with the others, that memory would stay on the machine.
    """
    # Reading the command line of a process in state D may block forever.
    if _settled_state(pid) in ("", "Z", "X", "D"):
        return False
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program, *arguments = file.read(_LONGEST_COMMAND).split(b"\0")
    except OSError:
        return False
    return os.path.basename(program) == _TORCHS_MANAGER or any(_RESOURCE_TRACKER in each for each in arguments)


def _settled_state(pid: int) -> str:
    """
    Return the state letter; empty if the process is gone.

    Uninterruptible sleep counts only if it lasts, because a page fault is one too.
    """
    state = ""
    for _ in range(_LOOKS_AT_SLEEP):
        facts = process_facts(pid)
        state = "" if facts is None else facts[0].decode()
        # Any wait for a disk is such a sleep: only one that lasts counts.
        if state != "D":
            break
        sleep(_LOOK)
    return state


def _still_removes_memory(root: int, pid: int) -> bool:
    if not is_memory_cleaner(pid):
        return False
    # It may have been stopped with the others.
    signal_descendant(root, pid, signal.SIGCONT)
    return True


def signal_descendant(root: int, pid: int, signum: int) -> None:
    """Signal *pid* if it still is a descendant of *root*."""
    try:
        handle = handle_of(pid)
    except OSError:
        # It is gone; or no descriptor is free, and the next turn of the sweep tries again.
        return

    try:
        # It may have ended since it was listed, and another process may have its number: the held
        # process is checked.
        if _is_below(root, pid):
            signal_process(handle, signum)
    finally:
        handle.close()


def _is_below(root: int, pid: int) -> bool:
    while pid > 1 and (facts := process_facts(pid)) is not None:
        pid = int(facts[1])
        if pid == root:
            return True
    return False


def is_ending(pid: int) -> bool:
    """Return True if *pid* has ended or is ending: a zombie, or still in the kernel's do_exit."""
    facts = process_facts(pid)
    # The seventh field from the state letter on holds the flags of the task (proc(5)).
    return facts is None or facts[0] in (b"Z", b"X") or bool(int(facts[6]) & _PF_EXITING)


def is_paused(pid: int) -> bool:
    """Return True if *pid* is stopped, by a signal or a debugger: it does nothing until it continues."""
    facts = process_facts(pid)
    return facts is not None and facts[0] in (b"T", b"t")


def _has_children() -> bool:
    """
    Return True if this process has children: a sub-reaper without children has no descendants.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap(pid: int) -> bool:
    """Reap the child *pid* if it has ended; return True if it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def signal_process(handle: Handle, signum: int) -> None:
    """Signal the process of *handle*; do nothing if it is gone."""
    try:
        handle.send(signum)
    except (ProcessLookupError, PermissionError):
        pass


def signal_group(leader: int, handle: Handle, signum: int) -> None:
    """
    Signal the process group of *leader*, a child that is not reaped yet.

    Until then no other process or group can have its number.
    """
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        # Just forked, it has not made its session yet.
        signal_process(handle, signum)
    except PermissionError:
        # The program has changed its user. Its end is still seen, and it dies with this process.
        pass


def wait_until_gone(pids: Iterable[int], limit: float) -> None:
    """
    Return when the processes with these numbers have ended, after at most *limit* seconds; send
    no signal.
    """
    handles = []
    for pid in pids:
        try:
            handles.append(handle_of(pid))
        except OSError:
            continue

    try:
        wait_for_ends(handles, limit)
    finally:
        for handle in handles:
            handle.close()


def new_parent(guardian: int) -> Handle | None:
    """
    Return a handle of *guardian* if it is the new parent of this process; else None.

    Called when the former parent has ended.
    """
    if not guardian or os.getppid() != guardian:
        return None
    outlive_parent()
    return living_parent(guardian)


def living_parent(parent: int) -> Handle:
    """Return a handle of *parent*; end this process if *parent* has ended."""
    try:
        handle = handle_of_parent(parent)
    except OSError:
        os._exit(1)
    # It ended before the handle was made, which may be that of another process with its number.
    if os.getppid() != parent:
        os._exit(1)
    return handle


def guard_child(parent: int, child: int, kept: SharedSessions, command: Sequence[str] = ()) -> NoReturn:
    """
    Wait until *parent* or *child* ends, and kill every descendant. Exit with the number of the
    signal that ended *child*.

    Processes in the *kept* sessions outlive *child*, but not *parent*.

    If *child* is a fork server, *command* is its command line. Its spawners then continue without
    it until they or *parent* end: the launches that they serve do not need the fork server.
    """
    # The launcher continues a child at its imports through this process: it holds no handle of
    # such a child.
    signal.signal(signal.SIGCONT, lambda *_: os.kill(child, signal.SIGCONT))
    launcher = living_parent(parent)
    if not _any_ends_before([child], launcher):
        kill_descendants()
        os._exit(0)

    signum = max(0, -_code_of(child))
    while True:
        spawners = [pid for pid in _children() if _is_spawner(pid, command)]
        # A spawner that has ended may have left processes behind.
        kill_descendants(spawners, kept=kept)
        if not spawners:
            os._exit(signum)
        if not _any_ends_before(spawners, launcher):
            kill_descendants()
            os._exit(signum)


def _any_ends_before(children: Iterable[int], launcher: Handle) -> bool:
    """Wait until one of *children* (True) or the *launcher* (False) has ended; do not reap it."""
    handles = [handle_of(child) for child in children]
    poll = select.poll()
    for handle in (launcher, *handles):
        poll.register(handle, select.POLLIN)
    try:
        while not (ready := poll.poll()):
            pass
        # If both have ended, the end of the launcher counts: nothing may outlive it.
        return launcher.fileno() not in dict(ready)
    finally:
        for handle in handles:
            handle.close()


def _code_of(child: int) -> int:
    # The signal is no longer forwarded: the child's number is about to be free.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    _, code = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(code)


def _children() -> list[int]:
    me = os.getpid()
    return [pid for pid, parent, state in descendants(me) if parent == me and state != "Z"]


def _is_spawner(pid: int, command: Sequence[str]) -> bool:
    """Return True if the fork server forked *pid* for a launch: *pid* has a session of its own."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            # A fork keeps the command line of its parent; a program that was executed has its own.
            same = file.read() == b"".join(os.fsencode(argument) + b"\0" for argument in command)
        return same and os.getsid(pid) == pid
    except OSError:
        # It has ended.
        return False


def _main(argv: Sequence[str]) -> NoReturn:
    """
    Run ``_reaper.py LAUNCHER_PID COMMAND...``: start COMMAND with descriptor 3 kept, then guard
    it.
    """
    launcher = int(argv[1])

    # Inheritable descriptors of the launcher's program are closed: its peers wait for the last
    # copy to close.
    close_all_but({0, 1, 2, FORK_SERVER_FD})
    os.dup2(anonymous_file("detached sessions"), KEPT_FD)
    settle_signals()
    adopt_orphans()
    outlive_parent()
    handle = living_parent(launcher)
    me = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        os.write(2, f"no process can be started: {error}{FEW_PROCESSES}".encode())
        os._exit(1)

    if child == 0:
        os.setsid()
        die_with_parent(me)
        handle.close()
        os.set_inheritable(FORK_SERVER_FD, True)
        os.set_inheritable(KEPT_FD, True)
        try:
            os.execv(argv[2], list(argv[2:]))
        except OSError as error:
            os.write(2, f"cannot run {argv[2]}: {error}\n".encode())
            os._exit(127)

    handle.close()

    # Only the fork server may hold the control socket: its end of file must mean that a peer is
    # gone.
    os.close(FORK_SERVER_FD)
    guard_child(launcher, child, SharedSessions(KEPT_FD), argv[2:])


if __name__ == "__main__":
    _main(sys.argv)
