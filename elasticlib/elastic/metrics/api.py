"""Re-export: ``torch.distributed.elastic.metrics.api``."""

from elasticlib import _lazy
from elasticlib.metrics._metric_streams import *  # noqa: F403 - all that it lists

_lazy.offer(__name__)
