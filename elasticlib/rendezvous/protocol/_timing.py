"""
The times of the protocol, as shares of the heartbeat time that the coordinator announces. Pure.

The order is 0 .. INTERVAL .. FENCE .. FENCE + GRACE < KILL .. 1.

* A node sends a heartbeat each INTERVAL, and reads the coordinator's.
* The coordinator reads all heartbeats each LOOK, and reports which it has read.
* FENCE after a node sent the last one that was read, it stops its workers. They have GRACE for it.
* At KILL they are killed.
* 1 after the coordinator read it, the node counts as lost.

So each side only needs its own clock, whatever is lost, late or removed.
"""

SHORTEST_HEARTBEAT = 0.1
"""Seconds: a shorter heartbeat time leaves no time for a message and its answer."""
LOOK = 0.1
"""Share of the heartbeat time between two readings of all heartbeats."""
INTERVAL = 0.15
"""
Share of the heartbeat time between two heartbeats of a node; it reads the coordinator's with each.
"""
STALE = 0.5
"""
Share after which ranks that come are believed only once the coordinator reports a later heartbeat
of the node.
"""
FENCE = 0.75
"""Share after which a node whose heartbeats were not read stops its workers."""
GRACE = 0.15
"""Share that workers have to stop."""
KILL = 0.95
"""Share after which they are killed."""
DEAF = 0.45
"""
Share for which a sidecar may be silent, before its launcher takes it for stopped.

That is about when its workers are killed: when it stops, the last heartbeat that was read may be 2
INTERVAL + LOOK old.
"""
STILL = 0.15
"""
Share without growth of the coordinator's heartbeat, though it was read, after which it stands
still.
"""
TICK = 0.05
"""Share of the heartbeat time in which the coordinator's heartbeat grows by one."""
