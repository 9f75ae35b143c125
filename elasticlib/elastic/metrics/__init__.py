"""Re-export: ``torch.distributed.elastic.metrics``."""

from elasticlib import _lazy
from elasticlib.elastic.metrics.api import *  # noqa: F403 - as torch's does, with all of it
from elasticlib.metrics import initialize_metrics as initialize_metrics

_lazy.offer(__name__)
