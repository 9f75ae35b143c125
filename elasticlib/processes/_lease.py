"""
Until when a node's workers may run, in memory that some of its processes share.

The process that keeps the contact with the job renews it. Whoever can end the workers does so once it is over: that
process may be stopped by then, and so may the launcher, while others have this node's ranks.

Rules of this file: one moment of this machine's monotonic clock, written and read whole.
"""

from __future__ import annotations

import math
import os
import struct

from elasticlib.processes._memory_files import anonymous_file

CUT_OFF = (
    "contact with the job was lost for so long that other nodes may have the ranks of these workers: they were killed"
)
_MOMENT = struct.Struct("d")


class Lease:
    """A lease in the memory *descriptor*, which is this object's from now on; a new one, without an end, in its own."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = anonymous_file("lease") if descriptor is None else descriptor
        self._known = math.inf
        if descriptor is None:
            os.pwrite(self._descriptor, _MOMENT.pack(math.inf), 0)

    def fileno(self) -> int:
        """What another process gets, to make the same lease of it; -1 once closed."""
        return self._descriptor

    def ends_at(self) -> float:
        """Monotonic seconds; infinite while nothing ends it."""
        data = os.pread(self._descriptor, _MOMENT.size, 0)
        end: float = math.inf if len(data) < _MOMENT.size else _MOMENT.unpack(data)[0]
        return math.inf if math.isnan(end) else end

    def renew(self, end: float) -> None:
        """Let it end at that moment."""
        if end != self._known:
            # In one write: a reader sees the former moment or this one.
            os.pwrite(self._descriptor, _MOMENT.pack(end), 0)
            self._known = end

    def close(self) -> None:
        """Forget it; may come twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
