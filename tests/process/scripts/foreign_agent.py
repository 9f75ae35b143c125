"""An agent with *PACKAGE*'s handler: ``PACKAGE ENDPOINT RESTARTS WORKER [ARGUMENTS]``; its outcome as JSON."""

import importlib
import json
import sys

from elasticlib import DefaultLogsSpecs, LocalElasticAgent, WorkerSpec

package, endpoint, restarts, *worker = sys.argv[1:]
rendezvous = importlib.import_module(f"{package}.rendezvous")
registry = importlib.import_module(f"{package}.rendezvous.registry")
params = rendezvous.RendezvousParameters(
    "c10d", endpoint, "job", 2, 2, "127.0.0.1", join_timeout=60, last_call_timeout=1
)
handler = registry.get_rendezvous_handler(params)
spec = WorkerSpec(
    role="trainer",
    local_world_size=1,
    rdzv_handler=handler,
    entrypoint=worker[0],
    args=tuple(worker[1:]),
    max_restarts=int(restarts),
    preload=(),
)
agent = LocalElasticAgent(spec, DefaultLogsSpecs())
result = agent.run()
assert handler.shutdown()
failures = {rank: failure.message for rank, failure in result.failures.items()}
print(json.dumps([result.state.value, agent.get_worker_group().group_rank, failures]), flush=True)
