"""
Torch's debug server inside a worker, on a Unix socket, started when the worker has loaded torch.

Rules of this file: a worker that never loads torch stays unchanged. A server that cannot start is
a line on stderr, never the end of the worker. One process serves a socket, so its children do not
get the variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SERVER_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
"""Variable with the socket of a requested server."""
SERVED_VARIABLE = "ELASTICLIB_WORKER_SERVER_SOCKET"
"""Variable with the socket that this process, or the one that started it, serves already."""
_running: list[object] = []
"""The server, kept for the life of the process."""


def when_torch_comes(path: str) -> None:
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


def open_server(path: str) -> Any:
    """
    Return torch's server on the Unix socket *path*, with a method ``shutdown``; imports torch.
    """
    import torch  # noqa: F401 - its compiled part comes with it
    from torch._C._distributed_c10d import _WorkerServer

    return _WorkerServer(path)


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

        def load_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            self.leave()
            load(module)
            self._then()

        loader.exec_module = load_and_tell
        return found
