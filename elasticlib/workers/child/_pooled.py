"""
The work of a pool's worker: one call after the other, each with its answer, and the process group
that they share.

Rules of this file: a call gets the present folder, search path and variables of its caller. It
changes the worker for the next one, as a cell changes a kernel. Only changes after which the worker
cannot serve another call are reported as leaks. Calls come from the launcher alone, through a private socket.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import functools
import importlib
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

CALLS_MEMORY = "calls of local rank "
_ARRIVED, _ALL_ARRIVED = "ranks in the group", "all ranks in the group"
"""Keys of a group's store."""
_ARRIVAL_LIMIT = datetime.timedelta(seconds=10)
_STORE_LIMIT = datetime.timedelta(minutes=5)
"""Torch's own limit for a store."""
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
    _server = _Server(Channel.adopt(_descriptor), _CallGroup(group))
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
        _server.tell(message)


class _CallGroup:
    """
    Process group of the calls: ``shared`` by consecutive calls, ``fresh`` for each, or None for
    no group of the pool.
    """

    def __init__(self, kind: str | None) -> None:
        self._made: object = None
        self._whole: Any = None
        """
        The launcher's store.

        All groups use one connection, because each new one may ask a slow name server for its
        peer.
        """
        self._store: Any = None
        """Store of the current group."""
        self._kind: tuple[str | None, str | None] = (None, None)
        """Kind of the current group, and its backend."""
        self._ending = threading.Lock()
        """Held while a group is taken down."""
        self._number = 0
        self._parts_stores = False
        self._hook: Any = None
        """The former ``sys.excepthook``, which torch wraps again for each group."""
        self._port = os.environ.get("MASTER_PORT", "")
        if kind == "shared":
            self._make(None)
            self._kind = (kind, None)
        elif kind == "fresh":
            # Now, while no call waits for this import.
            importlib.import_module("torch.distributed")

    def _make(self, backend: str | None) -> None:
        dist: Any = importlib.import_module("torch.distributed")

        # Keys of a former group are still in the store: each has its own prefix, with a number
        # that all ranks know.
        if self._whole is None:
            self._whole = dist.TCPStore(os.environ["MASTER_ADDR"], int(self._port), is_master=False)
        # A call may have changed it.
        self._whole.set_timeout(_STORE_LIMIT)
        store = dist.PrefixStore(f"pool/{self._number}", self._whole)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        self._made, self._store = dist.group.WORLD, store
        # From then on no rank still connects to another one, so that each may close its
        # connections.
        if store.add(_ARRIVED, 1) == size:
            store.set(_ALL_ARRIVED, "")

    def begin(self, call: int, kind: str | None, backend: str | None, *, by_all: bool) -> None:
        """
        Prepare the group for the call with this number: one of this *kind*, over *backend*.

        None is torch's default. If not all ranks make it (*by_all*), the call has no group of its
        own, and the present one stays.
        """
        needs_another = by_all and (kind, backend) != self._kind

        # Here and not at the end of the call before: by now all ranks have made that group, and
        # none waits for another there. So a rank that ended early did not seem lost to those in a
        # collective.
        if self._kind[0] == "fresh" or needs_another:
            self.leave()
        if not by_all:
            return

        self._number = call
        if kind is None:
            self._part_stores()
        elif self._made is None:
            self._make(backend)
            self._kind = (kind, backend)

    def _part_stores(self) -> None:
        """Separate the keys of groups that calls make for themselves, in the launcher's store."""
        # torch uses the launcher's store directly: it expects one group in the life of a process.
        rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
        make = getattr(rendezvous, "_create_c10d_store", None)
        if make is None or self._parts_stores:
            return

        @functools.wraps(make)
        def make_apart(*args: Any, **kwargs: Any) -> Any:
            store = make(*args, **kwargs)
            return sys.modules["torch.distributed"].PrefixStore(f"pool/{self._number}", store)

        rendezvous._create_c10d_store = make_apart
        self._parts_stores = True

    def end(self) -> str:
        """
        Return the reason why the next call cannot be served; empty if it can.

        Called after a call.
        """
        found = _present_group()
        if found is None and self._kind[0] == "fresh":
            # A training script destroys its group at its end.
            return ""
        if found is self._made:
            return ""
        if found is None:
            return "it destroyed the pool's process group"
        return "it left a process group"

    def release(self) -> None:
        """Release a fresh group, once all ranks are in it: those in a collective fail there."""
        if self._kind[0] == "fresh":
            self.leave()

    def leave(self) -> None:
        """Release the pool's group, while all others do."""
        self._kind = (None, None)
        if self._made is not None:
            # A rank may have made the group while another one still connects to it. Closed
            # connections would then fail there, as the loss of a peer. If a rank died meanwhile,
            # the launcher knows it already.
            with contextlib.suppress(Exception):
                self._store.wait([_ALL_ARRIVED], _ARRIVAL_LIMIT)
            made = [self._made]
            self._made = self._store = None
            dist: Any = sys.modules["torch.distributed"]

            # The call may have destroyed the group itself.
            if dist.is_initialized() and dist.group.WORLD is made[0]:
                dist.destroy_process_group()
            # Its end takes gloo's loop 10 ms, in which the next group can be made. Not a thread
            # of `threading`, because a call may count those.
            self._ending.acquire()
            _thread.start_new_thread(self._let_go, (made,))
            if getattr(sys.excepthook, "__module__", "").startswith("torch.distributed"):
                sys.excepthook = self._hook

    def _let_go(self, made: list[object]) -> None:
        try:
            made.clear()
        finally:
            self._ending.release()

    def finish(self) -> None:
        """Wait for the end of former groups: none may be in progress while the interpreter ends."""
        with self._ending:
            pass


def _present_group() -> object:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    return dist.group.WORLD if dist.is_initialized() else None


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
    def __init__(self, channel: Channel, group: _CallGroup) -> None:
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

    def tell(self, message: Message) -> None:
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
