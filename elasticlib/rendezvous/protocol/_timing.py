"""
The times of the protocol, as shares of the heartbeat time that the coordinator announces. Pure.

0 .. INTERVAL .. FENCE .. FENCE + GRACE < KILL .. 1: a heartbeat each INTERVAL; after FENCE without an answer it
stops its workers, which have GRACE for it; at KILL they are killed; at 1 the coordinator takes the node for lost.
Where the coordinator's heartbeat was removed: IN_DOUBT, what is left of GRACE, IN_DOUBT + GRACE.
"""

SHORTEST_HEARTBEAT = 0.1
"""Seconds: a shorter heartbeat time leaves no time for a message and its answer."""
INTERVAL = 0.3
"""Share of the heartbeat time between two heartbeats."""
FENCE = 0.6
"""Share after which, unacknowledged, the workers are told to stop."""
IN_DOUBT = 0.3
"""
The same where the coordinator's heartbeat was removed: `IN_DOUBT` + `GRACE` after one that counted, all have ended.

The coordinator may not have read that one, but missed none before it: it read one within `MISSED` of its time before,
and waits for all of it from there.
"""
GRACE = 0.15
"""Share that they have for it."""
KILL = 0.85
"""Share after which they are killed."""
TICK = 0.05
"""Share of the heartbeat time in which the coordinator's heartbeat grows by one."""
