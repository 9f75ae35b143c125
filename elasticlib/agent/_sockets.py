"""
Where the workers of a node offer torch's debug server: a private folder with one Unix socket each.

Rules of this file: paths are short, for a socket's address has 108 bytes; nothing of it is left when the run ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from attrs import evolve

from elasticlib.workers.child._serving import VARIABLE
from elasticlib.workers.child._start_spec import StartSpec

_LONGEST = 107
_RANK_DIGITS = 6


class Sockets:
    """The sockets of one agent's workers; off unless *wanted*."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._folder: str | None = None

    def open(self) -> str | None:
        """Make the folder and return it; None where no servers are wanted."""
        if self._wanted and self._folder is None:
            self._folder = _private_folder()
        return self._folder

    def serving(self, spec: StartSpec) -> StartSpec:
        """*spec* for a round that is about to start, with a socket to serve; none of an earlier one is left."""
        if self._folder is None:
            return spec
        path = os.path.join(self._folder, str(spec.local_rank))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        # Where the worker is no Python of ours, the variable tells what it starts.
        return evolve(spec, server=path, variables={**spec.variables, VARIABLE: path})

    def close(self) -> None:
        """Remove the folder; may come twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="elasticlib_")
    if len(os.fsencode(folder)) + 1 + _RANK_DIGITS <= _LONGEST:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="elasticlib_", dir="/tmp")
