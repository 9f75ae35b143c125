"""
Helpers: processes of ours that may die or stand still, and when they are woken or replaced.

`HelperWatch.tend` looks at them every `LOOK` seconds while somebody depends on them; `_helper_liveness` has the rules.
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
