"""
The process that hosts the workers' store of one round, on the spawner's side: forked at the first
connection, and watched.

Rules of this file: workers cannot distinguish a dead store from a dead peer. So the end of the
store is reported under its name at once, also if it could not start.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
from collections.abc import Callable, Collection
from typing import NoReturn

from elasticlib import processes
from elasticlib.errors import name_of_signal
from elasticlib.processes import FEW_PROCESSES, close_all_but, die_with_parent, signal_process, write_exactly
from elasticlib.workers.child import _report

OnEnd = Callable[[str, int, int], None]
"""
Gets the reason why the store is gone, the id of its process (0: none was started), and its exit
status.
"""

_NAME = "the process that hosts the workers' store"


class StoreHost:
    """
    Host of torch's store on a socket that workers know; it calls *on_end* when the process is
    gone.
    """

    def __init__(
        self, selector: selectors.BaseSelector, keep: Collection[int], began: Callable[[int], None], on_end: OnEnd
    ) -> None:
        self._selector = selector
        self._keep = keep
        self._began = began
        """Gets the id of the process."""
        self._on_end = on_end
        self._listener: int | None = None
        self._pid = 0
        self._handle: processes.Handle | None = None
        self._words = -1
        """Memory for the process's message about its end."""

    def await_knock(self, listener: int) -> None:
        """
        Fork the process at the first connection to *listener*, which this object owns from now
        on.
        """
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self.open)

    def open(self) -> None:
        """Fork the process: a worker connects."""
        listener = self._listener
        if listener is None:
            # The round has ended in the meantime.
            return

        self._selector.unregister(listener)
        self._listener = None
        me, pid, words = os.getpid(), 0, -1
        try:
            words = processes.anonymous_file("store")
            pid = os.fork()
            if pid == 0:
                _host(listener, me, words, self._keep)
            self._handle = processes.handle_of(pid)
        except OSError as error:
            if pid:
                # A child that was not reaped: no other process has its number.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if words >= 0:
                os.close(words)
            fix = FEW_PROCESSES if error.errno == errno.EAGAIN else ""
            self._on_end(f"{_NAME} cannot be started: {error}{fix}", 0, 1)
        else:
            self._pid, self._words = pid, words
            self._selector.register(self._handle, selectors.EVENT_READ, self._ended)
            self._began(pid)
        finally:
            os.close(listener)

    def _ended(self) -> None:
        words = self._words
        if self._handle is None:
            # The round has ended in the meantime.
            return
        said = _report.read_text(words)
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        pid, code = self._pid, self._let_go()
        how = f"was ended by {name_of_signal(-code)}" if code < 0 else f"ended with status {code}"
        self._on_end(f"{_NAME} (pid {pid}) {how}{': ' if said else ''}{said}", pid, code)

    def pids(self) -> list[int]:
        """Return the process that hosts the store, if it exists."""
        return [] if self._handle is None else [self._pid]

    def signal(self, signum: int) -> None:
        """Signal the process, if it exists."""
        if self._handle is not None:
            signal_process(self._handle, signum)

    def end(self) -> None:
        """End the process: the store is not needed any more."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            os.close(self._listener)
            self._listener = None
        if self._handle is not None:
            signal_process(self._handle, signal.SIGKILL)
            self._let_go()

    def _let_go(self) -> int:
        """Reap the process, which ends now, and return its exit status."""
        assert self._handle is not None
        _, status = os.waitpid(self._pid, 0)
        self._selector.unregister(self._handle)
        self._handle.close()
        os.close(self._words)
        self._handle = None
        return os.waitstatus_to_exitcode(status)


def _host(listener: int, parent: int, words: int, keep: Collection[int]) -> NoReturn:
    """Host torch's TCPStore on *listener* until the spawner ends this process."""
    try:
        die_with_parent(parent)
        os.setsid()
        close_all_but({0, 1, 2, listener, words, *keep})
        import socket

        # Of a copy: the end of this socket must not close the listener.
        with socket.socket(fileno=os.dup(listener)) as bound:
            host, port = bound.getsockname()[:2]
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        signal.pause()
        del store
    except BaseException as error:
        write_exactly(words, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(1)
