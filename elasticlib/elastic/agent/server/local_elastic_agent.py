"""Re-export: ``torch.distributed.elastic.agent.server.local_elastic_agent``."""

from elasticlib.agent._local import LocalElasticAgent
from elasticlib.agent._worker_watch import (
    ENABLE as TORCHELASTIC_ENABLE_FILE_TIMER,
    FILE as TORCHELASTIC_TIMER_FILE,
    HEALTH_CHECK_PORT as TORCHELASTIC_HEALTH_CHECK_PORT,
    UNINTERRUPTIBLE_STATE_TIMEOUT as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
)

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]
