"""
Stacks as text and as frames, the user's part of them, and ranks in words.

`crash_frames`, `place_of` and `threads_of` read tracebacks and the fault handler's stacks, whose
formats are not documented. `is_users` and similar functions distinguish the user's files from those of
libraries and of elasticlib. `ranks_text` writes ranks in words.

Rules of this package: it imports only the standard library, since workers import it. Text that is not
a stack has no frames.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.stacks._frames import (
        CALLERS as CALLERS,
        ELSEWHERE as ELSEWHERE,
        Frame as Frame,
        Thread as Thread,
        crash_frames as crash_frames,
        frame_of as frame_of,
        is_heading as is_heading,
        is_launcher as is_launcher,
        is_ours as is_ours,
        is_users as is_users,
        place_of as place_of,
        stack_text as stack_text,
        threads_of as threads_of,
        users_frames as users_frames,
        users_part as users_part,
        with_heading as with_heading,
    )
    from elasticlib.stacks._rank_text import number_ranges as number_ranges, ranks_text as ranks_text

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.stacks._frames": (
            "CALLERS ELSEWHERE Frame Thread crash_frames frame_of is_heading is_launcher is_ours is_users "
            "place_of stack_text threads_of users_frames users_part with_heading"
        ),
        "elasticlib.stacks._rank_text": "number_ranges ranks_text",
    },
)
