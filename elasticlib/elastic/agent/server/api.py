"""Re-export: ``torch.distributed.elastic.agent.server.api``."""

from elasticlib import _lazy
from elasticlib.agent._agent import (
    DEFAULT_ROLE as DEFAULT_ROLE,
    ElasticAgent as ElasticAgent,
    SimpleElasticAgent as SimpleElasticAgent,
)
from elasticlib.spec import WorkerSpec as WorkerSpec
from elasticlib.state import (
    RunResult as RunResult,
    Worker as Worker,
    WorkerGroup as WorkerGroup,
    WorkerState as WorkerState,
)

_lazy.offer(__name__)
