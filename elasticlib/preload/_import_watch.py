"""
Where the first worker of a restart is while it imports, so that the job can say at its end what `preload` would save.

Rules of this file: time is an argument; a worker's first answer that is no import of an installed package is the last
of that restart. The spawner asks none that sleeps in a system call, which the signal would interrupt: where the worker
is stays unknown then, and after a few such looks in a row nobody looks again. PURE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from attrs import define, field

from elasticlib import records
from elasticlib.stacks import crash_frames

FIRST = 2.0
"""Seconds after the start of the workers at which one is asked first: shorter imports are not worth a word."""
EVERY = 1.0
"""Seconds between two questions."""
MOST_UNKNOWN = 3
"""Looks in a row that may find a worker asleep."""
_MOST_NAMED = 3
"""Modules that one line names."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<name>[\w/]+)\.py$")
_REFUSED = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
"""Packages that read their rank at import, so that `preload` refuses them; what they import it takes."""


@define
class ImportWatch:
    """The imports of one launch's restarts."""

    _preload: tuple[str, ...] = ()
    """What is imported ahead already."""
    _is_restart: bool = False
    """Whether the next start of workers is one."""
    _due: float | None = None
    _awaited: float | None = None
    """When the question was due whose answer is awaited."""
    _unknown: int = 0
    """Looks in a row that did not find out where the worker is."""
    _seconds: dict[str, float] = field(factory=dict)
    """By module, in this restart."""
    _found: dict[str, float] = field(factory=dict)
    """The same of the last restart in which that was long."""

    def begin(self, preload: tuple[str, ...], now: float) -> None:
        """Workers are started. Without *preload* they are to import for themselves, or have to."""
        is_watched = self._is_restart and bool(preload)
        self._preload, self._is_restart, self._seconds = preload, True, {}
        self._due = now + FIRST if is_watched else None
        self._awaited, self._unknown = None, 0

    def rest(self) -> None:
        """Workers are being stopped, and have better things to do."""
        self._due = self._awaited = None

    def due_in(self, now: float) -> float | None:
        """Seconds until the worker is to be asked where it is; None where it is not."""
        return None if self._due is None else max(0.0, self._due - now)

    def tend(self, ask: Callable[[], object], now: float) -> None:
        """*Ask* the worker where it is, if that is due; the answer is to be `heard`."""
        if self._due is not None and now >= self._due:
            self._due, self._awaited = None, self._due
            ask()

    def heard(self, stacks: str) -> None:
        """Take in where the worker was; an empty text, or one in brackets, does not say that."""
        due, self._awaited = self._awaited, None
        if due is None:
            return
        module = imported(stacks)
        if module:
            self._add(module)
        if is_unknown(stacks):
            self._unknown += 1
        else:
            self._unknown = 0
        may_ask_again = 0 < self._unknown < MOST_UNKNOWN
        # A worker at any other place is done with its imports.
        if module or may_ask_again:
            self._due = due + EVERY

    def _add(self, module: str) -> None:
        """Note that the worker was at the import of *module* for the time since the last question."""
        # The first look comes later than the others.
        passed = EVERY if self._seconds else FIRST
        self._seconds[module] = self._seconds.get(module, 0.0) + passed
        self._found = self._seconds

    def advice(self) -> records.PreloadAdvised | None:
        """What to import ahead, and the time that it takes in each restart; None where that was not seen to be long."""
        longest = sorted(self._found, key=lambda module: -self._found[module])[:_MOST_NAMED]
        if not longest:
            return None
        return records.PreloadAdvised(tuple(longest), sum(self._found[each] for each in longest), self._preload)


def is_unknown(stacks: str) -> bool:
    """Whether *stacks* do not say where the worker was: it slept, or gave no answer."""
    return not crash_frames(stacks)


def imported(stacks: str) -> str:
    """Return the outermost module of an installed package at whose import a thread is; empty without one."""
    for importer, frame in pairwise(crash_frames(stacks)):
        is_import = importer.file.startswith("<frozen importlib") and frame.function == "<module>"
        name = _installed_module(frame.file) if is_import else ""
        if name:
            return name
    return ""


def _installed_module(file: str) -> str:
    """Return the name of the module of an installed package; empty for others, and for refused ones."""
    found = _INSTALLED.search(file)
    if found is None:
        return ""
    name = found["name"].removesuffix("/__init__").replace("/", ".")
    return "" if name.partition(".")[0] in _REFUSED else name
