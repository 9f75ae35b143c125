"""
A standard stream of this process, sent to a file for a while.

Rules of this file: it is the descriptor that is redirected, so C code and child processes follow; what waits in
buffers goes where it was meant to go; the former stream comes back whatever happens in between.
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
    """The C library of this process."""
    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """
    Within the block, *std*, ``"stdout"`` or ``"stderr"``, goes to the file *to_file*, which is written anew.

    It holds for all threads of this process. A Python stream without a descriptor, such as a notebook's, keeps what
    Python writes; only what C code and child processes write goes to the file then. Raises `ConfigError` (a
    ``ValueError``) for another stream, and OSError when the file cannot be opened.
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
        _flush(std)
        os.dup2(file, number)
        afterwards.callback(os.dup2, former, number)
        afterwards.callback(_flush, std)
        yield


def _descriptor(std: str) -> int:
    try:
        return int(getattr(sys, std).fileno())
    except (AttributeError, OSError, ValueError):
        return _NUMBERS[std]


def _flush(std: str) -> None:
    get_libc().fflush(None)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        getattr(sys, std).flush()


redirect_stdout = functools.partial(redirect, "stdout")
"""`redirect` of stdout."""
redirect_stderr = functools.partial(redirect, "stderr")
"""`redirect` of stderr."""


def get_std_cm(
    std_rd: str | None, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """``redirect_fn(std_rd)``, or a block that changes nothing where no file is named."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
