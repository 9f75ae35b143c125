"""
`worker_main`: an error file and torch's debug server for a worker's main function, under any
launcher.

Rules of this file: torch is loaded only if a socket is named.

(torch: ``torch.distributed.elastic.control_plane``)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from elasticlib.errors import ChildFailedError
from elasticlib.workers.child._record import get_error_handler
from elasticlib.workers.child._serving import SERVER_VARIABLE, open_server

TORCH_WORKER_SERVER_SOCKET = SERVER_VARIABLE
"""Environment variable that names the Unix socket of the debug server."""

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]


@contextlib.contextmanager
def worker_main() -> Iterator[None]:
    """
    Decorate a worker's main function (``@worker_main()``), or wrap it as a context manager.

    An exception that leaves it is written to the error file that the launcher named, as
    `elasticlib.record` does, and raised again. If ``TORCH_WORKER_SERVER_SOCKET`` names a Unix
    socket, torch's debug server (``ping``, ``dump_traceback``, ...) answers there meanwhile. Its
    errors, such as a socket in use, are ``RuntimeError``. Workers under
    ``LaunchConfig(worker_server=True)`` have that server without it.
    """
    handler = get_error_handler()
    handler.initialize()
    try:
        with contextlib.ExitStack() as stack:
            path = os.environ.get(SERVER_VARIABLE)
            if path is not None:
                stack.callback(open_server(path).shutdown)
            yield
    except ChildFailedError as error:
        # A launcher within the function failed: the report is that of its own worker.
        handler.dump_failure(error.get_first_failure()[1])
        raise
    except Exception as error:
        handler.record_exception(error)
        raise
