"""Re-export: ``torch.distributed.elastic.metrics.api``."""

from elasticlib import _lazy
from elasticlib.metrics._profiling import get_elapsed_time_ms as get_elapsed_time_ms, prof as prof, profile as profile
from elasticlib.metrics._streams import (
    ConsoleMetricHandler as ConsoleMetricHandler,
    MetricData as MetricData,
    MetricHandler as MetricHandler,
    MetricsConfig as MetricsConfig,
    MetricStream as MetricStream,
    NullMetricHandler as NullMetricHandler,
    configure as configure,
    getStream as getStream,
    publish_metric as publish_metric,
    put_metric as put_metric,
)

_lazy.offer(__name__)
