"""
`record`: a decorator that writes a function's exception to the error file that its launcher
named. `worker_main` does so too, and can open torch's debug server, under any launcher.

Rules of this file: the file is written whole or not at all. A failure to write it is reported on
stderr and never replaces the exception itself. Torch is loaded only if a socket is named.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from elasticlib import errors
from elasticlib.errors import NOT_AVAILABLE, ChildFailedError, ProcessFailure, read_error_file
from elasticlib.workers.child import _report

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "TORCHELASTIC_ERROR_FILE"
SERVER_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
"""Variable with the Unix socket of a requested debug server."""

logger = logging.getLogger(__name__)


class ErrorHandler:
    """
    Writes exceptions, in torch's JSON form, to the file that ``TORCHELASTIC_ERROR_FILE`` names.

    Subclasses may override `initialize`, `record_exception`, `record_success`, `_get_error_file_path` and
    `maybe_enrich_signal_failure_message`. (torch: ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``)
    """

    _fn_name: str | None = None
    """Qualified name of the recorded function; None without one."""

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """
        Set the qualified name of the recorded function, None if it has none; called before
        `initialize`.
        """
        self._fn_name = fn_name

    def record_success(self) -> None:
        """
        Handle the return of the recorded function.

        Subclasses may send a notice; their exceptions are not recorded as its failure.
        """

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """
        Return *message*, which describes a worker that a signal ended, with additional facts.

        The launcher calls it when it writes its summary. Subclasses may add facts that they find
        beside *error_file*.
        """
        del error_file
        return message

    def _get_error_file_path(self) -> str | None:
        """Return the path for errors; None, an empty path or `os.devnull` for nowhere."""
        return os.environ.get(VARIABLE)

    def initialize(self) -> None:
        """
        Make crashes print the stacks of all threads; called before the recorded function runs.
        """
        if _report.has_the_stacks_of_crashes:
            # In elasticlib's own workers the stacks are part of the report, not of stderr.
            return

        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:
            if faulthandler.is_enabled():
                # It writes elsewhere, as in a notebook or under pytest.
                return
            warnings.warn(f"faulthandler cannot be enabled: {type(error).__name__}: {error}", stacklevel=2)

    def record_exception(self, e: BaseException) -> None:
        """Write *e* to the error file, and replace its content; do nothing if no file is named."""
        self._write(_report.error_file_content(_report.report_of_exception(e, b"")))

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """
        Put *error_code* into *rootcause_error*, which was read from *rootcause_error_file*.

        The child cannot have known it if a signal ended it. Data whose message is missing or
        plain text stays unchanged, with a warning.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            logger.warning(
                "the message in %s is not a dictionary, so the exit status %d is not added to it",
                rootcause_error_file,
                error_code,
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """
        Copy the child's *rootcause_error_file* to this process's own error file, with
        *error_code* unless that is 0.

        Existing content is logged and replaced. Raises the errors of opening or parsing the
        child's file.
        """
        content = read_error_file(rootcause_error_file)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, content, error_code)
        self._replace(content)

    def dump_failure(self, failure: ProcessFailure) -> None:
        """
        Write *failure* to this process's own error file.

        The source is the child's error file, or the known facts if that cannot be read.
        """
        try:
            self.dump_error_file(failure.error_file, failure.exitcode)
        except (OSError, ValueError, AttributeError):
            content = dict(failure.error_file_data)
            if not isinstance(content.get("message"), dict):
                extra = {"py_callstack": failure.traceback, "timestamp": str(failure.timestamp)}
                content["message"] = {"message": failure.message, "extraInfo": extra}
            if failure.exitcode:
                content["message"] = {**content["message"], "errorCode": failure.exitcode}
            self._replace(content)

    def _replace(self, content: dict[str, Any]) -> None:
        path = self._get_error_file_path()
        if not path:
            logger.info("this process has no error file, so the error of its child process is not reported")
        elif os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                logger.warning("%s already exists and will be replaced; it contains: %s", path, file.read())
        self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        path = self._get_error_file_path()
        if not path or path == os.devnull:
            return
        try:
            _report.write_json(path, content)
        except OSError as failure:
            print(f"elasticlib: the error file was not written: {failure}", file=sys.stderr)


def get_error_handler() -> ErrorHandler:
    """Return the handler that `record` uses by default."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """
    Make *fn* write its exception to ``TORCHELASTIC_ERROR_FILE`` before raising it to its caller.

    Under `elastic_launch` workers need no decorator; this one is for code that other launchers
    start.

    A `ChildFailedError` is recorded as its root cause, so that a launcher within a launcher
    forwards it; not if the child left no error file. ``SystemExit`` is not recorded; with status
    0 the call returns None. *error_handler* does the writing.

    (torch: ``torch.distributed.elastic.multiprocessing.errors.record``)
    """
    handler = error_handler if error_handler is not None else _handler_in_use()

    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.set_entrypoint_fn_name(getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            value = fn(*args, **kwargs)
        except SystemExit as stop:
            if stop.code in (None, 0):
                return None
            raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.error_file != NOT_AVAILABLE:
                handler.dump_failure(failure)
            else:
                logger.info(
                    "rank %d wrote no error file, so the error file of this process does not contain its failure", rank
                )
            raise
        except Exception as error:
            handler.record_exception(error)
            raise

        handler.record_success()
        return value

    return recorded


def _handler_in_use() -> ErrorHandler:
    """
    Return the result of `get_error_handler`, or of the program's replacement at torch's place for
    it.
    """
    door = sys.modules.get("elasticlib.elastic.multiprocessing.errors")
    found: ErrorHandler = getattr(door, "get_error_handler", get_error_handler)()
    return found


def _about_signal(message: str, error_file: str) -> str:
    try:
        return _handler_in_use().maybe_enrich_signal_failure_message(message, error_file)
    except Exception:
        logger.warning("the error handler failed, so the message about the signal is unchanged", exc_info=True)
        return message


errors.about_signal = _about_signal


def write_error_file(error: ChildFailedError) -> None:
    """Write the root cause of *error* to this process's own error file, and replace its content."""
    get_error_handler().dump_failure(error.get_first_failure()[1])


def leave(report: _report.Report) -> None:
    """
    Write *report* to the error file that this process's launcher named, if it did; keep an
    earlier file.
    """
    if not os.path.exists(os.environ.get(VARIABLE, "")):
        ErrorHandler()._write(_report.error_file_content(report))


# A worker's main function (torch: ``torch.distributed.elastic.control_plane``).

TORCH_WORKER_SERVER_SOCKET = SERVER_VARIABLE
"""The same variable, under the name that torch gives it."""


def open_server(path: str) -> Any:
    """
    Return torch's server on the Unix socket *path*, with a method ``shutdown``; imports torch.
    """
    import torch  # noqa: F401 - its compiled part comes with it
    from torch._C._distributed_c10d import _WorkerServer

    return _WorkerServer(path)


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
