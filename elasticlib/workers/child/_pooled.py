"""
What a worker of a pool runs: one call after the other, each with its answer, and the process group that they share.

Rules of this file: a call finds the folder, the search path and the variables that its caller has now, and changes the
worker for the next one as a cell changes a kernel; only what makes that unfit for use is told as dirt. Calls come from
the launcher alone, through a socket that nobody else has.
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
from elasticlib.workers.child import _function, _loaded, _report, _result_pickles, _showing, _worker_progress

CALLS_MEMORY = "calls of local rank "
_ARRIVED, _ALL_ARRIVED = "ranks in the group", "all ranks in the group"
"""Keys of a group's store."""
_ARRIVAL_LIMIT = datetime.timedelta(seconds=10)
_STORE_LIMIT = datetime.timedelta(minutes=5)
"""Torch's own for a store."""
_descriptor = -1
_own: frozenset[str] = frozenset()
_server: _Server | None = None


def attach(memories: Mapping[str, int], local_rank: int, own: Collection[str]) -> None:
    """In a worker, before any of the user's code: keep its socket, and no other's. *own*: its own variables."""
    global _descriptor, _own
    for name, descriptor in memories.items():
        if name == f"{CALLS_MEMORY}{local_rank}":
            _descriptor, _own = descriptor, frozenset(own)
        elif name.startswith(CALLS_MEMORY):
            os.close(descriptor)


def is_worker_variable(variable: str) -> bool:
    """Whether the *variable* is the worker's, and not its caller's."""
    return variable in _own


def serve_calls(group: str | None) -> None:
    """Serve calls until there will be no more. It has the name by which logs call the work."""
    global _server
    _server = _Server(Channel.adopt(_descriptor), _CallGroup(group))
    _server.serve()


def release_peers() -> None:
    """In the midst of a call that has failed: have ranks that wait in a collective of a fresh group wait no more."""
    if _server is not None:
        _server.group.release()


def ask_caller(message: Message) -> tuple[Message, list[int]] | None:
    """In the midst of a call: what its caller answers to *message*, with descriptors; None where nobody does."""
    return None if _server is None else _server.ask(message)


def tell_caller(message: Message) -> None:
    """In the midst of a call, from any thread: have its caller hear *message*, to which there is no answer."""
    if _server is not None:
        _server.tell(message)


class _CallGroup:
    """The process group of the calls: ``shared`` by calls one after the other, ``fresh`` for one, or None of ours."""

    def __init__(self, kind: str | None) -> None:
        self._made: object = None
        self._whole: Any = None
        """The launcher's store; one connection for all groups, for each may ask a slow name server for its peer."""
        self._store: Any = None
        """Of the group that is made."""
        self._kind: tuple[str | None, str | None] = (None, None)
        """What is made, and its back end."""
        self._ending = threading.Lock()
        """Held while a group is taken down."""
        self._number = 0
        self._parts_stores = False
        self._hook: Any = None
        """The ``sys.excepthook`` of before, which torch wraps anew for each group."""
        self._port = os.environ.get("MASTER_PORT", "")
        if kind == "shared":
            self._make(None)
            self._kind = (kind, None)
        elif kind == "fresh":
            # Now, while no call waits for this import.
            importlib.import_module("torch.distributed")

    def _make(self, backend: str | None) -> None:
        dist: Any = importlib.import_module("torch.distributed")
        # Keys of a former group are still in the store: each has its own, of a number that all ranks know.
        if self._whole is None:
            self._whole = dist.TCPStore(os.environ["MASTER_ADDR"], int(self._port), is_master=False)
        # A call may have changed it.
        self._whole.set_timeout(_STORE_LIMIT)
        store = dist.PrefixStore(f"pool/{self._number}", self._whole)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        self._made, self._store = dist.group.WORLD, store
        if store.add(_ARRIVED, 1) == size:
            store.set(_ALL_ARRIVED, "")

    def begin(self, call: int, kind: str | None, backend: str | None, *, by_all: bool) -> None:
        """
        Prepare the group for the call with this number: one of this *kind*, over *backend*.

        None is torch's default. Where it is not made *by all* ranks, the call has no group of its
        own, and the present one stays.
        """
        needs_another = by_all and (kind, backend) != self._kind
        # Here and not at the end of the call before: by now all ranks have made that one, none waits for another there,
        # and a rank that has ended early did not seem lost to those that were in a collective.
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
        """Keep a group that a call makes by itself from the keys of the one that a call before has made."""
        # torch takes the launcher's store as it is: it expects one group in the life of a process.
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
        """After a call: say why the next one cannot be served; empty where it can."""
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
        """Let go of a fresh one, once all ranks are in it: those that are in a collective fail there."""
        if self._kind[0] == "fresh":
            self.leave()

    def leave(self) -> None:
        """Let go of ours, while all others do."""
        self._kind = (None, None)
        if self._made is not None:
            # A rank may be back from making the group while another one still connects to it: what ends its
            # connections then fails there, as the loss of a peer.
            # If a rank died meanwhile, the launcher knows it already.
            with contextlib.suppress(Exception):
                self._store.wait([_ALL_ARRIVED], _ARRIVAL_LIMIT)
            made = [self._made]
            self._made = self._store = None
            dist: Any = sys.modules["torch.distributed"]
            # The call may have destroyed the group itself.
            if dist.is_initialized() and dist.group.WORLD is made[0]:
                dist.destroy_process_group()
            # Its end takes gloo's loop 10 ms, in which the next group can be made. No thread of `threading`, for a call
            # may count those.
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
        """Wait for the end of groups that were left: none may be under way while the interpreter ends."""
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
        """Files that were read since they were told, each with the time that it had then."""
        self._has_read = False

    def watch(self) -> None:
        """Note from here on what time a file has when it is read: at the end of the call it may be another one."""
        plain = SourceFileLoader.path_stats

        @functools.wraps(plain)
        def path_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
            with contextlib.suppress(OSError, ValueError):
                self._read[path] = os.stat(path).st_mtime_ns
                self._has_read = True
            return plain(loader, path)

        SourceFileLoader.path_stats = path_stats  # type: ignore[assignment, method-assign]

    def new(self) -> dict[str, int]:
        """Return the files since the last call, each with its time."""
        # A reload changes no number of modules, but reads a file.
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
        """What the caller answers."""
        with self._sending:
            is_sent = self._channel.send({**message, "op": "ask"})
        return self._channel.receive() if is_sent else None

    def tell(self, message: Message) -> None:
        """To which there is no answer."""
        with self._sending:
            self._channel.send({**message, "op": "tell"})

    def _answer(self, message: Message, memories: dict[str, int]) -> None:
        _worker_progress.clear()
        self.group.begin(message["call"], *message["group"], by_all=message["by_all"])
        report = self._report(message, memories)
        if os.getpid() != self._me:
            print(
                f"elasticlib: process {os.getpid()}, which the worker {self._me} forked, came back from the user's "
                "code: end such a process by os._exit()",
                file=sys.stderr,
            )
            os._exit(1)
        answer = _report.report_files(report)
        try:
            leak = self.group.end() if report.kind == "result" else ""
            reply = {"op": "answer", "call": message["call"], "dirt": leak, "files": self._imports.new()}
            with self._sending:
                self._channel.send(reply, tuple(answer))
        finally:
            close_each(answer)

    def _report(self, message: Message, memories: dict[str, int]) -> _report.Report:
        shared = message["shared"]
        try:
            call = self._call(message, memories)
            result = _showing.call_function(call)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                return _result_pickles.report_of_failure(stop, shared)
            result = None
        except BaseException as error:
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
        """Have the variables, the search path and the folder that the caller has."""
        for name, value in message["variables"].items():
            # Variables such as RANK are the worker's, whatever its caller has.
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
