"""
Torch's servers inside a worker, once it has loaded torch: the debug server on a Unix socket, and
stores at an address that the program itself has set.

Tutorials set ``os.environ["MASTER_PORT"] = "12355"``. But under a launcher torch lets no rank host
a store: the launcher's own exists, at the address that workers get. At any other address all ranks
would wait half an hour for a store that no rank opens. If a worker serves a pool, a test or a
cell, and its job has one node, rank 0 opens that store. Elsewhere the address may belong to a
store outside of the job. Then ranks wait for it, as torch does, and a warning names the cause if
the address does not answer.

Rules of this file:

* A worker that never loads torch stays unchanged.
* A debug server that cannot start is a line on stderr, never the end of the worker. One process
  serves a socket, so its children do not get the variable.
* The launcher's address, and any other on its port, stays the launcher's. Only torch's look at its
  variable is changed.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from elasticlib._clock import monotonic
from elasticlib.processes import start_thread
from elasticlib.workers.child._record import SERVER_VARIABLE, open_server

SERVED_VARIABLE = "ELASTICLIB_WORKER_SERVER_SOCKET"
"""Variable with the socket that this process, or the one that started it, serves already."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_RENDEZVOUS, _CREATE = "torch.distributed.rendezvous", "_create_c10d_store"
WATCH_NAME = "elasticlib-own-master"
"""Name of the thread that checks whether the address is open."""
_PATIENCE = 4.0
"""Seconds until the warning if the address does not answer."""
_PAUSE = 0.5
_running: list[object] = []
"""The server, kept for the life of the process."""


def serve_with_torch(path: str) -> None:
    """
    Serve *path* from now on if torch is loaded, otherwise from the moment when this process loads
    it.
    """
    when_imported("torch", lambda: _serve(path))


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call *then* when this process has imported the module *name*, which may be now."""
    if name in sys.modules:
        then()
    else:
        ImportWaiter(name, then).enter()


def _serve(path: str) -> None:
    try:
        _running.append(open_server(path))
    except Exception as error:
        print(f"elasticlib: this worker has no debug server at {path}: {error}", file=sys.stderr)
    # A decorator in the user's script, or a process that it starts, would find the socket in use.
    os.environ.pop(SERVER_VARIABLE, None)
    os.environ[SERVED_VARIABLE] = path


class ImportWaiter:
    """
    An importer that imports nothing: it calls *then* when this same process has imported the
    module *name*.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then
        self._pid = os.getpid()
        self._asks = False
        """True while it asks the other importers: Python then asks it too."""

    def enter(self) -> None:
        """Become the first importer that Python asks."""
        sys.meta_path.insert(0, self)

    def leave(self) -> None:
        """Leave Python's list of importers."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """
        Return the spec of the module from the other importers, None for other modules.

        Its loader calls *then* after the module has loaded.
        """
        if name != self._name or self._asks:
            return None

        self._asks = True
        try:
            found = find_spec(name)
        finally:
            self._asks = False

        loader: Any = None if found is None else found.loader

        # A loader without attributes cannot be wrapped; a forked process leaves the socket to the
        # worker.
        if not hasattr(loader, "__dict__") or os.getpid() != self._pid:
            return found

        load = loader.exec_module

        def load_and_report(module: ModuleType) -> None:
            # The module keeps its loader, which must be as before.
            del loader.exec_module
            self.leave()
            load(module)
            self._then()

        loader.exec_module = load_and_report
        return found


# Stores at an address of the program's own.


def attach_own_master(variables: Mapping[str, str], *, is_hosted: bool) -> None:
    """
    Handle the addresses of process groups in a worker with these *variables*.

    *is_hosted*: rank 0 opens their stores.
    """
    port = variables.get("MASTER_PORT", "")
    if variables.get(_AGENT_STORE) == "True" and port.isdecimal():
        hosted = is_hosted and variables.get("GROUP_WORLD_SIZE") == "1"
        # One warning for each node is enough.
        speaks = variables.get("LOCAL_RANK") == "0"
        when_imported(
            _RENDEZVOUS, lambda: _wrap_create(sys.modules[_RENDEZVOUS], int(port), is_hosted=hosted, speaks=speaks)
        )


def _wrap_create(module: Any, launchers_port: int, *, is_hosted: bool, speaks: bool) -> None:
    create = getattr(module, _CREATE, None)
    if not callable(create):
        # Another version of torch does it in another way.
        return

    @functools.wraps(create)
    def create_at(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if port == launchers_port or os.environ.get(_AGENT_STORE) != "True":
            return create(hostname, port, *args, **kwargs)
        if is_hosted:
            return _without_agent_store(lambda: create(hostname, port, *args, **kwargs))

        has_store = threading.Event()
        if speaks:
            start_thread(
                threading.Thread(
                    target=_warn_of_silence, args=(hostname, port, has_store), name=WATCH_NAME, daemon=True
                )
            )

        try:
            return create(hostname, port, *args, **kwargs)
        finally:
            has_store.set()

    setattr(module, _CREATE, create_at)


def _without_agent_store(create: Callable[[], Any]) -> Any:
    del os.environ[_AGENT_STORE]
    try:
        return create()
    finally:
        os.environ[_AGENT_STORE] = "True"


def _warn_of_silence(hostname: str, port: int, has_store: threading.Event) -> None:
    """Warn unless the address opens, or *has_store* is set, within the time limit."""
    deadline = monotonic() + _PATIENCE
    while not has_store.wait(_PAUSE):
        if _is_open(hostname, port):
            return
        if monotonic() >= deadline:
            print(
                f"elasticlib: the ranks wait for a store at {hostname}:{port}, where no process listens: "
                "the program sets MASTER_ADDR, MASTER_PORT or an init_method itself, but under a launcher "
                "no rank opens a store; leave them as the launcher has set them",
                file=sys.stderr,
                flush=True,
            )
            return


def _is_open(hostname: str, port: int) -> bool:
    try:
        socket.create_connection((hostname, port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
