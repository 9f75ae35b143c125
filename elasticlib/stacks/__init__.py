"""
Stacks as text and as frames: what CPython writes of them, which frames are the user's, and ranks in words.

`crash_frames`, `place_of` and `threads_of` read tracebacks and the fault handler's stacks, whose format is documented
nowhere; `is_users` and its kin tell the user's files from those of libraries and ours; `ranks_text` spells ranks.
Rules of this package: the standard library only, since workers import it; what is no stack has no frames.
"""

from __future__ import annotations

import typing

from elasticlib import _lazy

if typing.TYPE_CHECKING:
    from elasticlib.stacks._frames import (
        CALLERS as CALLERS,
        ELSEWHERE as ELSEWHERE,
        Frame as Frame,
        is_launcher as is_launcher,
        is_ours as is_ours,
        is_users as is_users,
        users_frames as users_frames,
        users_part as users_part,
    )
    from elasticlib.stacks._rank_text import number_ranges as number_ranges, ranks_text as ranks_text
    from elasticlib.stacks._text import (
        Thread as Thread,
        crash_frames as crash_frames,
        frame_of as frame_of,
        is_heading as is_heading,
        place_of as place_of,
        threads_of as threads_of,
    )

__getattr__, __dir__, __all__ = _lazy.names(
    __name__,
    {
        "elasticlib.stacks._frames": "CALLERS ELSEWHERE Frame is_launcher is_ours is_users users_frames users_part",
        "elasticlib.stacks._rank_text": "number_ranges ranks_text",
        "elasticlib.stacks._text": "Thread crash_frames frame_of is_heading place_of threads_of",
    },
)
