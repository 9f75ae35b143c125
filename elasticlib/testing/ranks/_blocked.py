"""
Where ranks are that do not end, by the stacks of their fault handlers. PURE.

Rules of this file: the main thread runs the test; ranks at the same place are told together, and a call of a
collective is named by its function in ``torch.distributed``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from attrs import frozen

from elasticlib._stack_text import is_library

_THREAD = re.compile(r"^(?:Current thread|Thread) [^\n]*\(most recent call first\):\n", re.MULTILINE)
_IDENTITY = re.compile(r"0x[0-9a-f]+")
_FRAME = re.compile(r'^ +File "([^"\n]+)", line (\d+),? in (\S+)', re.MULTILINE)
_COLLECTIVES = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional|algorithms/.*|tensor/.*)\.py$"
)
_WRAPPERS = frozenset({"wrapper", "_wrapped", "inner", "wait", "_wait", "__call__"})
_MOST_FRAMES = 12


@frozen
class Blocked:
    """Where one rank is."""

    frames: tuple[tuple[str, int, str], ...]
    """(file, line, function) of the thread that runs the test, the innermost first; without what calls the test."""
    others: tuple[str, ...] = ()
    """The innermost line of the user's own in each further thread."""
    note: str = ""
    """Why there are no frames."""

    def own(self) -> tuple[str, int, str] | None:
        """The innermost frame of the user's."""
        return next((frame for frame in self.frames if not is_library(frame[0])), None)

    def collective(self) -> str:
        """The call of ``torch.distributed`` that it is in; empty where it is in none."""
        calls = [name for file, _, name in self.frames if _COLLECTIVES.search(file) and name not in _WRAPPERS]
        return calls[-1] if calls else ""

    def place(self) -> str:
        """In a few words."""
        if not self.frames:
            return self.note or "(it runs no Python)"
        own, name = self.own() or self.frames[0], self.frames[0][2]
        call = self.collective()
        inner = f" in the collective {call}" if call else "" if name == own[2] else f" in {name}"
        return f"{os.path.basename(own[0])}:{own[1]}{inner}"


def blocked(text: str) -> Blocked:
    """Where the rank is whose stacks are *text*."""
    starts = list(_THREAD.finditer(text))
    if not starts:
        return Blocked((), note=text.strip())
    ends = [*(each.start() for each in starts[1:]), len(text)]
    threads = [_frames(text[start.end() : end]) for start, end in zip(starts, ends, strict=True)]
    main = threads[-1]  # the fault handler begins with the newest thread
    others = [next((frame for frame in each if not is_library(frame[0])), None) for each in threads[:-1]]
    lines = tuple(f"{os.path.basename(each[0])}:{each[1]} in {each[2]}" for each in others if each is not None)
    return Blocked(_of_the_test(main), lines)


def _frames(text: str) -> tuple[tuple[str, int, str], ...]:
    return tuple((file, int(line), name) for file, line, name in _FRAME.findall(text))


def _of_the_test(frames: tuple[tuple[str, int, str], ...]) -> tuple[tuple[str, int, str], ...]:
    """Without the frames that call the test: those below the outermost one of the user's."""
    own = [index for index, frame in enumerate(frames) if not is_library(frame[0])]
    return frames[: own[-1] + 1] if own else frames


def of_threads(text: str, ranks: Mapping[int, int]) -> dict[int, str]:
    """Of the stacks *text* of one process by rank that of its thread; *ranks*: {a thread's identity: its rank}."""
    starts = list(_THREAD.finditer(text))
    ends = [*(each.start() for each in starts[1:]), len(text)]
    found = {}
    for start, end in zip(starts, ends, strict=True):
        identity = _IDENTITY.search(start[0])
        if identity is not None and int(identity[0], 16) in ranks:
            found[ranks[int(identity[0], 16)]] = text[start.start() : end]
    return dict(sorted(found.items()))


def told(stacks: Mapping[int, str]) -> list[str]:
    """Lines that tell where each rank is, those at the same place together."""
    together: dict[Blocked, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        together.setdefault(blocked(text), []).append(rank)
    lines = []
    for where, ranks in together.items():
        lines.append(f"{ranks_named(ranks)}: {where.place()}")
        lines += [f"    {file}:{line} in {name}" for file, line, name in where.frames[:_MOST_FRAMES]]
        lines += [f"    ... {len(where.frames) - _MOST_FRAMES} more frames"] * (len(where.frames) > _MOST_FRAMES)
        lines += [f"    another thread: {line}" for line in where.others]
    return lines


def in_short(stacks: Mapping[int, str]) -> str:
    """The same in one line."""
    together: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        together.setdefault(blocked(text).place(), []).append(rank)
    return ", ".join(f"{ranks_named(ranks)} at {place}" for place, ranks in together.items())


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    several = len(spans) > 1 or (spans and spans[0][0] != spans[0][1])
    return f"rank{'s' if several else ''} {', '.join(parts)}"
