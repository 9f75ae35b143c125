"""Re-export: ``torch.distributed.elastic.metrics.api``."""

from elasticlib.metrics._config import MetricsConfig
from elasticlib.metrics._profiling import get_elapsed_time_ms, prof, profile
from elasticlib.metrics._streams import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
