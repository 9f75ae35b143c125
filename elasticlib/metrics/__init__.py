"""
Metrics of the agent, and your own. (torch: ``torch.distributed.elastic.metrics``)

A metric has a group, a name and a value. By default all metrics are dropped. A handler gets those
of one group or of all:

    from elasticlib import metrics

    metrics.configure(metrics.ConsoleMetricHandler())                 # all groups, to stdout
    metrics.configure(MyHandler(), group="input")                     # one group elsewhere

    metrics.put_metric("rows", 512, "input")

    @metrics.prof(group="input")                                      # success or failure, and duration.ms
    def load(path): ...

``LaunchConfig(metrics_cfg={"handler": "console"})``, or ``"null"``, replaces the configured
handlers, but only for the metrics of its own agent.

The metrics of agents are in the group ``torchelastic``. Names begin with ``workers.<role>.`` or
with the name of a step:

* at the end of a run ``run_total``, ``run_success_no_retries``, ``run_success_with_retries``,
  ``run_failed_no_retries`` and ``run_failed_with_retries`` (0 or 1);
* at the end of a run ``flakiness``: the percentage of restarts that were used; 100 for a failure;
* at each check of the workers ``remaining_restarts`` and ``<state>``;
* for each step (``SimpleElasticAgent._rendezvous``, ``LocalElasticAgent._start_workers``, ...)
  ``<step>.success`` or ``<step>.failure``, and ``<step>.duration.ms``.

Differs from torch: restarts are those of the whole job. A local agent checks its workers when
something has happened, not ten times a second.
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
