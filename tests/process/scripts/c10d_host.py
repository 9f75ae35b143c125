"""Hosts the store of a job at an endpoint, says where, and ends with its standard input."""

from __future__ import annotations

import sys
import time

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores._c10d import C10dBackend

endpoint, run_id = sys.argv[1:]
backend = C10dBackend(NodeJob(run_id=run_id, node="host", backend="c10d", endpoint=endpoint, max_nodes=9))
assert backend.serve(time.monotonic() + 30)
print(backend.endpoint, flush=True)
sys.stdin.read()
