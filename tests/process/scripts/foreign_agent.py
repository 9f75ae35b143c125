"""An agent whose peers torch's own handler finds: ``ENDPOINT RESTARTS WORKER [ARGUMENTS]``; its verdict as JSON."""

import json
import sys

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elasticlib import DefaultLogsSpecs, LocalElasticAgent, WorkerSpec

endpoint, restarts, *worker = sys.argv[1:]
params = RendezvousParameters("c10d", endpoint, "job", 2, 2, "127.0.0.1", join_timeout=60, last_call_timeout=1)
spec = WorkerSpec(
    role="trainer",
    local_world_size=1,
    rdzv_handler=get_rendezvous_handler(params),
    entrypoint=worker[0],
    args=tuple(worker[1:]),
    max_restarts=int(restarts),
    preload=(),
)
agent = LocalElasticAgent(spec, DefaultLogsSpecs())
result = agent.run()
failures = {rank: failure.message for rank, failure in result.failures.items()}
print(json.dumps([result.state.value, agent.get_worker_group().group_rank, failures]), flush=True)
