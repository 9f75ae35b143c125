"""Re-export: ``torch.distributed.elastic.agent.server``."""

from elasticlib import _lazy
from elasticlib.agent._agent import ElasticAgent as ElasticAgent, SimpleElasticAgent as SimpleElasticAgent
from elasticlib.elastic.agent.server.local_elastic_agent import (
    TORCHELASTIC_ENABLE_FILE_TIMER as TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE as TORCHELASTIC_TIMER_FILE,
)
from elasticlib.spec import WorkerSpec as WorkerSpec
from elasticlib.state import (
    RunResult as RunResult,
    Worker as Worker,
    WorkerGroup as WorkerGroup,
    WorkerState as WorkerState,
)

_lazy.offer(__name__)
