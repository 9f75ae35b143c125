"""
`worker_main`: for a worker's main function, under any launcher, an error file and torch's debug server.

Rules of this file: torch is loaded only where a socket is named.

(torch: ``torch.distributed.elastic.control_plane``)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from elasticlib.errors import ChildFailedError
from elasticlib.workers import _report
from elasticlib.workers._serving import VARIABLE, open_server
from elasticlib.workers.record import pass_on, with_file

TORCH_WORKER_SERVER_SOCKET = VARIABLE
"""Environment variable that names the Unix socket of the debug server."""

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]


@contextlib.contextmanager
def worker_main() -> Iterator[None]:
    """
    A decorator, or context manager, for a worker's main function; for decoration it is called: ``@worker_main()``.

    An exception that leaves it is written to the error file that the launcher named, as `elasticlib.record` does,
    and goes on. Where ``TORCH_WORKER_SERVER_SOCKET`` names a Unix socket, torch's debug server (``ping``,
    ``dump_traceback``, ...) answers there meanwhile; its errors, such as a socket that is taken, are ``RuntimeError``.
    Workers under ``LaunchConfig(worker_server=True)`` have that server without it.
    """
    try:
        with contextlib.ExitStack() as stack:
            path = os.environ.get(VARIABLE)
            if path is not None:
                stack.callback(open_server(path).shutdown)
            yield
    except ChildFailedError as error:
        pass_on(error)
        raise
    except Exception as error:
        entry = _report.of_exception(error, b"")
        with_file(lambda file: _report.write_error_file(file, entry))
        raise
