"""Re-export: ``torch.distributed.elastic.agent.server``."""

from elasticlib.agent._agent import ElasticAgent, SimpleElasticAgent
from elasticlib.agent._watchdog import ENABLE as TORCHELASTIC_ENABLE_FILE_TIMER, FILE as TORCHELASTIC_TIMER_FILE
from elasticlib.spec import WorkerSpec
from elasticlib.state import RunResult, Worker, WorkerGroup, WorkerState

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
