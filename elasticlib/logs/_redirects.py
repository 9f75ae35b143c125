"""
Temporary redirection of a standard stream of this process to a file.

Rules of this file: the descriptor is redirected, so C code and child processes follow. Buffered text
goes to its former destination. The former stream is always restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from elasticlib.errors import ConfigError

_NUMBERS = {"stdout": 1, "stderr": 2}


def get_libc() -> ctypes.CDLL:
    """Return the C library of this process."""
    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """
    Redirect *std*, ``"stdout"`` or ``"stderr"``, to the file *to_file* within the block.

    The file is emptied first. The redirection affects all threads of this process. If the Python stream
    has no descriptor, as in a notebook, it keeps Python's output. Then only the output of C code and child
    processes goes to the file. Raises `ConfigError` (a ``ValueError``) for another stream, and OSError if
    the file cannot be opened.
    (torch: ``torch.distributed.elastic.multiprocessing.redirects.redirect``)
    """
    if std not in _NUMBERS:
        raise ConfigError(f"standard stream {std!r} is unknown: give one of {', '.join(_NUMBERS)}")

    number = _descriptor(std)
    with contextlib.ExitStack() as afterwards:
        file = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        afterwards.callback(os.close, file)
        former = os.dup(number)
        afterwards.callback(os.close, former)

        # Text that C or Python holds back by now belongs to the former stream.
        _flush(std)
        os.dup2(file, number)
        afterwards.callback(os.dup2, former, number)

        # It runs before the stream comes back: text of the block belongs to the file.
        afterwards.callback(_flush, std)
        yield


def _descriptor(std: str) -> int:
    try:
        return int(getattr(sys, std).fileno())
    except (AttributeError, OSError, ValueError):
        # In a notebook only C code and child processes use the usual descriptor.
        return _NUMBERS[std]


def _flush(std: str) -> None:
    get_libc().fflush(None)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        getattr(sys, std).flush()


redirect_stdout = functools.partial(redirect, "stdout")
"""`redirect` for stdout."""
redirect_stderr = functools.partial(redirect, "stderr")
"""`redirect` for stderr."""


def get_std_cm(
    std_rd: str | None, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Return ``redirect_fn(std_rd)``, or a context manager without effect if no file is named."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
