"""
Measured values: those of the agent, and your own. (torch: ``torch.distributed.elastic.metrics``)

A metric has a group, a name and a value. By default all are dropped; a handler takes those of one group, or of all:

    from elasticlib import metrics

    metrics.configure(metrics.ConsoleMetricHandler())                 # all groups, to stdout
    metrics.configure(MyHandler(), group="input")                     # one group elsewhere

    metrics.put_metric("rows", 512, "input")

    @metrics.prof(group="input")                                      # success or failure, and duration.ms
    def load(path): ...

``LaunchConfig(metrics_cfg={"handler": "console"})``, or ``"null"``, takes the place of the configured handlers for what
the agent of that launch measures, and for nothing else.

Agents put theirs into the group ``torchelastic``: ``workers.<role>.run_total``, ``run_success_no_retries``,
``run_success_with_retries``, ``run_failed_no_retries``, ``run_failed_with_retries`` (0 or 1), ``flakiness`` (share of
the restarts used up, 0 to 100; 100 for a failure), and at each look at the workers ``remaining_restarts`` and
``workers.<role>.<state>``; besides ``.success`` or ``.failure`` and ``.duration.ms`` of their steps
(``SimpleElasticAgent._rendezvous``, ``LocalElasticAgent._start_workers``, ...). Differs from torch: restarts are those
of the whole job, and a local agent looks when something happened, not ten times a second.
"""

from elasticlib import _lazy
from elasticlib.metrics._metric_sink import MetricSink as MetricSink
from elasticlib.metrics._metric_streams import *  # noqa: F403 - those of torch's module
from elasticlib.metrics._metric_streams import (
    MEASURED_BY_PROF as MEASURED_BY_PROF,
    handler_of as handler_of,
    initialize_metrics as initialize_metrics,
)

_lazy.offer(__name__)
