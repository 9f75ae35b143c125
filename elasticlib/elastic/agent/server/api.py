"""Re-export: ``torch.distributed.elastic.agent.server.api``."""

from elasticlib.agent._agent import DEFAULT_ROLE, ElasticAgent, SimpleElasticAgent
from elasticlib.spec import WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
