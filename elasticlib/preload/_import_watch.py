"""
Sampling of a restart's imports: at the end the job can say how much time `preload` would save.

Rules of this file: time is an argument. The watch ends for a restart with the first answer that
shows no import of an installed package. The spawner does not ask a worker that sleeps in a system
call, which the signal would interrupt. That worker's place stays unknown, and after a few such
looks in a row the watch stops. PURE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from attrs import define, field

from elasticlib import records
from elasticlib.stacks import crash_frames

FIRST = 2.0
"""Seconds from the start of the workers to the first question: shorter imports need no advice."""
EVERY = 1.0
"""Seconds between two questions."""
MOST_UNKNOWN = 3
"""Looks in a row that may find the worker asleep."""
_MOST_NAMED = 3
"""Modules that one line names."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<name>[\w/]+)\.py$")
_REFUSED = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
"""
Packages that read their rank at import, so that `preload` refuses them; it accepts the packages
that they import.
"""


@define
class ImportWatch:
    """The imports of one launch's restarts."""

    _preload: tuple[str, ...] = ()
    """Modules that are imported ahead already."""
    _is_restart: bool = False
    """True if the next start of workers is a restart."""
    _due: float | None = None
    _awaited: float | None = None
    """Time at which the question was due whose answer is awaited."""
    _unknown: int = 0
    """Looks in a row that did not find the worker's place."""
    _seconds: dict[str, float] = field(factory=dict)
    """Seconds by module, in this restart."""
    _found: dict[str, float] = field(factory=dict)
    """The same of the last restart with long imports."""

    def begin(self, preload: tuple[str, ...], now: float) -> None:
        """Note a start of workers; it is watched only if it is a restart with a *preload*."""
        is_watched = self._is_restart and bool(preload)
        self._preload, self._is_restart, self._seconds = preload, True, {}
        self._due = now + FIRST if is_watched else None
        self._awaited, self._unknown = None, 0

    def rest(self) -> None:
        """Note that workers are being stopped, so that none is asked."""
        self._due = self._awaited = None

    def due_in(self, now: float) -> float | None:
        """
        Return the seconds until the worker must be asked for its place; None if no question is
        due.
        """
        return None if self._due is None else max(0.0, self._due - now)

    def tend(self, ask: Callable[[], object], now: float) -> None:
        """Call *ask* if a question is due; pass the answer to `note_answer`."""
        if self._due is not None and now >= self._due:
            self._due, self._awaited = None, self._due
            ask()

    def note_answer(self, stacks: str) -> None:
        """Add the worker's place; an empty text, or one in brackets, does not show it."""
        due, self._awaited = self._awaited, None

        # The question was asked before the workers were stopped or started again.
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
        # The first question is asked later than the others.
        passed = EVERY if self._seconds else FIRST
        self._seconds[module] = self._seconds.get(module, 0.0) + passed
        # Not at the start: a restart with short imports keeps the times of an earlier one.
        self._found = self._seconds

    def advice(self) -> records.PreloadAdvised | None:
        """
        Return the modules to import ahead, and their time in each restart; None if no import was
        long.
        """
        longest = sorted(self._found, key=lambda module: -self._found[module])[:_MOST_NAMED]
        if not longest:
            return None
        return records.PreloadAdvised(tuple(longest), sum(self._found[each] for each in longest), self._preload)


def is_unknown(stacks: str) -> bool:
    """Return True if *stacks* do not show where the worker was: it slept, or did not answer."""
    return not crash_frames(stacks)


def imported(stacks: str) -> str:
    """
    Return the outermost module of an installed package that a thread is importing; empty without
    one.
    """
    for importer, frame in pairwise(crash_frames(stacks)):
        # While a module is imported, the import system calls its body.
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
