"""
Helpers: processes of ours that may die or stand still, and when they are woken or replaced.

`HelperWatch.tend` looks at them every `LOOK` seconds while somebody depends on them; `_liveness` has the rules.
"""

from elasticlib.helpers._ends import fork_server_lost, reaper_lost
from elasticlib.helpers._liveness import LOOK, Act
from elasticlib.helpers._watch import Finding, Helper, HelperWatch, Reported, first_child

__all__ = [
    "LOOK",
    "Act",
    "Finding",
    "Helper",
    "HelperWatch",
    "Reported",
    "first_child",
    "fork_server_lost",
    "reaper_lost",
]
