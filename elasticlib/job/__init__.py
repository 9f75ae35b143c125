"""
Launches as objects: one that runs beside the program that made it is watched, awaited and stopped by its `Job`.

Rules of this package: a job is carried out by one thread of its own; what others want of it they leave in its inbox,
and what happens to it comes as records. Nothing here decides anything about workers.
"""

from elasticlib import _lazy
from elasticlib.job._job import Job as Job
from elasticlib.job._register import jobs as jobs
from elasticlib.job._results import Place as Place, Results as Results
from elasticlib.job._status import JobStatus as JobStatus, RankStatus as RankStatus, Stacks as Stacks

_lazy.offer(__name__)
