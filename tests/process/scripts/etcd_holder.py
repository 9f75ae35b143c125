"""Stands for election and prints what happens; saves each line that it reads: ENDPOINT NODE."""

import json
import os
import queue
import sys

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores._election import LeadershipLost, StateLog
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend


def report(what: object) -> None:
    """One line, whole: two threads may have something to say."""
    os.write(1, json.dumps(what).encode() + b"\n")


journals: queue.Queue[StateLog] = queue.Queue()
endpoint, node = sys.argv[1:]
job = NodeJob(run_id="held", node=node, backend="etcd", endpoint=endpoint, heartbeat=4.0)
candidate = EtcdBackend(job).candidate(node, journals.put, lambda why: report(["lost", why]))
candidate.start()
state_log = journals.get()
state = state_log.load()
report(["elected", state and state.decode()])
for line in sys.stdin:
    try:
        state_log.save(line.strip().encode())
        report("saved")
    except LeadershipLost as error:
        report(["turned down", str(error)])
candidate.close()
