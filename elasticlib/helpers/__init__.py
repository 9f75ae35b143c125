"""
Watch over helper processes: when a helper that has died or stands still is woken or replaced.

`HelperWatch.tend` looks at the helpers every `LOOK` seconds while a job depends on them.
`_helper_liveness` has the rules.
"""

from elasticlib.helpers._ends import fork_server_lost, reaper_lost
from elasticlib.helpers._helper_liveness import LOOK, HelperAction
from elasticlib.helpers._watch import Finding, Helper, HelperWatch, Reported, first_child

__all__ = [
    "LOOK",
    "Finding",
    "Helper",
    "HelperAction",
    "HelperWatch",
    "Reported",
    "first_child",
    "fork_server_lost",
    "reaper_lost",
]
