"""
The lease of a node's workers: the time until which they may run, in memory that several processes
share.

The process that keeps the contact with the job renews it. Every process that can end the workers
does so once it is over. By then the renewing process may be stopped, and so may the launcher,
while other nodes have this node's ranks.

Rules of this file: it stores one moment of this machine's monotonic clock, written and read
whole.
"""

from __future__ import annotations

import math
import os
import struct

from elasticlib.processes._memory_files import anonymous_file

CUT_OFF = (
    "contact with the job was lost for so long that other nodes may have taken the ranks of these workers: "
    "they were killed"
)
_MOMENT = struct.Struct("d")


class Lease:
    """
    A lease in the memory of *descriptor*, which this object owns from now on.

    Without a descriptor it is a new lease, which does not end.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = anonymous_file("lease") if descriptor is None else descriptor
        self._known = math.inf
        if descriptor is None:
            os.pwrite(self._descriptor, _MOMENT.pack(math.inf), 0)

    def fileno(self) -> int:
        """Return the descriptor from which another process makes the same lease; -1 once closed."""
        return self._descriptor

    def ends_at(self) -> float:
        """Return its end (monotonic seconds); infinite for a lease that does not end."""
        data = os.pread(self._descriptor, _MOMENT.size, 0)
        # Data that is not a moment must not end any workers.
        end: float = math.inf if len(data) < _MOMENT.size else _MOMENT.unpack(data)[0]
        return math.inf if math.isnan(end) else end

    def renew(self, end: float) -> None:
        """Set the end to that moment (monotonic seconds)."""
        if end != self._known:
            # In one write: a reader sees the former moment or this one.
            os.pwrite(self._descriptor, _MOMENT.pack(end), 0)
            self._known = end

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
