"""
The work of a pool's worker: one call after the other, each with its answer.

Rules of this file: a call gets the present folder, search path and variables of its caller. It
changes the worker for the next one, as a cell changes a kernel. Only changes after which the worker
cannot serve another call are reported as leaks. Calls come from the launcher alone, through a private socket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

from elasticlib import processes
from elasticlib.processes import Channel, Message, close_each, content_of_memory, enter_folder, names_of_parts
from elasticlib.stacks import CALLERS, is_users, users_part
from elasticlib.workers.child import (
    _function,
    _interpreter_end,
    _loaded,
    _report,
    _result_pickles,
    _showing,
    _worker_progress,
)
from elasticlib.workers.child._call_group import CallGroup

CALLS_MEMORY = "calls of local rank "
_descriptor = -1
_own: frozenset[str] = frozenset()
_server: _Server | None = None


def attach(memories: Mapping[str, int], local_rank: int, own: Collection[str]) -> None:
    """
    Keep this worker's socket, and close those of other workers; called before any of the user's
    code.

    *own*: the worker's own variables.
    """
    global _descriptor, _own
    for name, descriptor in memories.items():
        if name == f"{CALLS_MEMORY}{local_rank}":
            _descriptor, _own = descriptor, frozenset(own)
        elif name.startswith(CALLS_MEMORY):
            os.close(descriptor)


def is_worker_variable(variable: str) -> bool:
    """Return True if the *variable* belongs to the worker, not to its caller."""
    return variable in _own


def serve_calls(group: str | None) -> None:
    """Serve calls until the launcher ends them. Logs show this function's name as the work."""
    global _server
    _server = _Server(Channel.adopt(_descriptor), CallGroup(group))
    _server.serve()


def release_peers() -> None:
    """During a call that has failed: release ranks that wait in a collective of a fresh group."""
    if _server is not None:
        _server.group.release()


def ask_caller(message: Message) -> tuple[Message, list[int]] | None:
    """
    During a call: return the caller's answer to *message*, with descriptors; None without a
    caller.
    """
    return None if _server is None else _server.ask(message)


def notify_caller(message: Message) -> None:
    """During a call, from any thread: send *message* to the caller, which does not answer."""
    if _server is not None:
        _server.notify(message)


class _ProjectFiles:
    """The files of the user's project that this worker has imported."""

    def __init__(self) -> None:
        self._modules = 0
        self._seen: set[str | None] = set()
        self._read: dict[str, int] = {}
        """Files that were read since the last report, each with its time at that moment (ns)."""
        self._has_read = False

    def watch(self) -> None:
        """
        From now on, note the time of each file when it is read: at the end of the call it may
        differ.
        """
        plain = SourceFileLoader.path_stats

        @functools.wraps(plain)
        def path_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
            with contextlib.suppress(OSError, ValueError):
                self._read[path] = os.stat(path).st_mtime_ns
                self._has_read = True
            return plain(loader, path)

        SourceFileLoader.path_stats = path_stats  # type: ignore[assignment, method-assign]

    def new(self) -> dict[str, int]:
        """Return the files since the last call, each with its time (ns)."""
        # A reload does not change the number of modules, but reads a file.
        if len(sys.modules) == self._modules and not self._has_read:
            return {}

        self._modules, self._has_read = len(sys.modules), False
        files = set(map(_loaded.file_of_module, list(sys.modules.values())))
        read_again = files & self._read.keys()
        found = {}
        for file in (files - self._seen) | read_again:
            if file is None:
                continue
            read_at = self._read.pop(file, None)
            if is_users(file):
                # A file that another importer has read may be out of reach here.
                with contextlib.suppress(OSError):
                    found[file] = os.stat(file).st_mtime_ns if read_at is None else read_at

        self._seen |= files
        return found


class _Server:
    def __init__(self, channel: Channel, group: CallGroup) -> None:
        self._channel = channel
        self.group = group
        self._me = os.getpid()
        self._path: list[str] = []
        self._imports = _ProjectFiles()
        self._imports.watch()
        self._sending = threading.Lock()
        # A process that the user's code forks must not take the next call.
        os.register_at_fork(after_in_child=channel.close)

    def serve(self) -> None:
        with processes.own_descriptors() as itself:
            self._channel.send({"op": "ready"}, itself)
        while (received := self._channel.receive()) is not None:
            message, descriptors = received
            if message["op"] == "end":
                self.group.leave()
                self.group.finish()
                return
            self._answer(message, dict(zip(message["memories"], descriptors, strict=True)))

    def ask(self, message: Message) -> tuple[Message, list[int]] | None:
        """Return the caller's answer; None if the caller is gone."""
        with self._sending:
            is_sent = self._channel.send({**message, "op": "ask"})
        return self._channel.receive() if is_sent else None

    def notify(self, message: Message) -> None:
        """Send *message*, which has no answer."""
        with self._sending:
            self._channel.send({**message, "op": "notice"})

    def _answer(self, message: Message, memories: dict[str, int]) -> None:
        _worker_progress.clear()
        self.group.begin(message["call"], *message["group"], by_all=message["by_all"])
        report = self._report(message, memories)
        if os.getpid() != self._me:
            print(
                f"elasticlib: process {os.getpid()}, which the worker {self._me} forked, returned from the "
                "user's code: end such a process by os._exit()",
                file=sys.stderr,
            )
            os._exit(1)

        answer = _report.report_files(report)
        try:
            # After a failure the caller decides whether this worker is replaced.
            leak = self.group.end() if report.kind == "result" else ""
            reply = {"op": "answer", "call": message["call"], "leaks": leak, "files": self._imports.new()}
            with self._sending:
                self._channel.send(reply, tuple(answer))
        finally:
            close_each(answer)

    def _report(self, message: Message, memories: dict[str, int]) -> _report.Report:
        shared = message["shared"]
        try:
            call = self._call(message, memories)
            result = _showing.call_function(call)
            _interpreter_end.flush_lines()
        except SystemExit as stop:
            _interpreter_end.flush_streams(0)
            # A function that exits without a failure has succeeded, like a script.
            if stop.code not in (None, 0):
                return _result_pickles.report_of_failure(stop, shared)
            result = None
        except BaseException as error:
            _interpreter_end.flush_streams(1)
            return _result_pickles.report_of_failure(error.with_traceback(users_part(error)), shared)

        try:
            return _report.Report("result", _result_pickles.pack_result(result, shared))
        except Exception as error:
            return _result_pickles.report_of_failure(_result_pickles.unsendable(result, error), shared)

    def _call(self, message: Message, memories: dict[str, int]) -> Callable[[], Any]:
        try:
            self._surround(message)
        except BaseException:
            close_each(memories.values())
            raise

        try:
            content = content_of_memory("function", memories)
        finally:
            for name in names_of_parts("function", memories):
                os.close(memories.pop(name))

        called, args, kwargs = _function.unpacked(content, message["sources"], memories)
        return lambda: called(*args, **kwargs)

    def _surround(self, message: Message) -> None:
        """Set the variables, the search path and the folder of the caller."""
        for name, value in message["variables"].items():
            # Variables such as RANK belong to the worker, not to its caller.
            if name in _own:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

        if message["path"] != self._path:
            sys.path[:] = self._path = message["path"]
        enter_folder(message["cwd"], message["place"])


CALLERS.add(__file__)
