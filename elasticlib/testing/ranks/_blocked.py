"""
Places of ranks that have not ended, from the stacks of their fault handlers. PURE.

Rules of this file: the main thread runs the test. Ranks at the same place are reported together. A
collective is named by its function in ``torch.distributed``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from elasticlib.stacks import Frame, is_users, ranks_text, threads_of

_COLLECTIVES = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional|algorithms/.*|tensor/.*)\.py$"
)
_WRAPPERS = frozenset({"wrapper", "_wrapped", "inner", "wait", "_wait", "__call__"})
_MOST_FRAMES = 12


@frozen
class Blocked:
    """Place of one rank."""

    frames: tuple[Frame, ...]
    """Frames of the test in its thread, innermost first, without the frames that call the test."""
    others: tuple[str, ...] = ()
    """Innermost line of user code in each other thread."""
    note: str = ""
    """Reason for missing frames."""

    def own(self) -> Frame | None:
        return _innermost_of_user(self.frames)

    def collective(self) -> str:
        """Return the function of ``torch.distributed`` that the rank is in; empty if none."""
        within = [frame.function for frame in self.frames if _COLLECTIVES.search(frame.file)]
        calls = [name for name in within if name not in _WRAPPERS]
        # The outermost one is the collective that the user has called.
        return calls[-1] if calls else ""

    def place(self) -> str:
        if not self.frames:
            return self.note or "(it runs no Python)"
        own, name = self.own() or self.frames[0], self.frames[0].function
        call = self.collective()
        inner = f" in the collective {call}" if call else "" if name == own.function else f" in {name}"
        return f"{os.path.basename(own.file)}:{own.line}{inner}"


def blocked(text: str) -> Blocked:
    threads = threads_of(text)
    if not threads:
        return Blocked((), note=text.strip())
    # The fault handler writes the main thread last.
    *others, main = (thread.frames for thread in threads)
    innermost = [frame for each in others if (frame := _innermost_of_user(each)) is not None]
    lines = tuple(f"{os.path.basename(each.file)}:{each.line} in {each.function}" for each in innermost)
    return Blocked(_of_the_test(main), lines)


def _innermost_of_user(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if is_users(frame.file)), None)


def _of_the_test(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return *frames* without those that call the test, below the outermost frame of user code."""
    own = [index for index, frame in enumerate(frames) if is_users(frame.file)]
    return frames[: own[-1] + 1] if own else frames


def describe(stacks: Mapping[int, str]) -> list[str]:
    """Return lines with the place of each rank; ranks at the same place share their lines."""
    together: dict[Blocked, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        together.setdefault(blocked(text), []).append(rank)
    lines = []
    for where, ranks in together.items():
        lines.append(f"{ranks_text(ranks)}: {where.place()}")
        lines += [f"    {each.file}:{each.line} in {each.function}" for each in where.frames[:_MOST_FRAMES]]
        lines += [f"    ... {len(where.frames) - _MOST_FRAMES} more frames"] * (len(where.frames) > _MOST_FRAMES)
        lines += [f"    another thread: {line}" for line in where.others]

    return lines


def in_short(stacks: Mapping[int, str]) -> str:
    together: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        together.setdefault(blocked(text).place(), []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} at {place}" for place, ranks in together.items())
