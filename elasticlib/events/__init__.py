"""
Events of agents and workers, and your own. (torch: ``torch.distributed.elastic.events``)

    from elasticlib import events

    events.record(events.Event("epoch", events.EventSource.WORKER, metadata={"number": 3}), "console")

An agent sends its events to the destination in ``event_log_handler``: ``null`` (no events),
``console`` (stderr), ``dynamic_rendezvous`` (also events of the rendezvous), or your own:

    events.add_logging_handler("file", logging.FileHandler("events.jsonl"))
    elastic_launch(LaunchConfig(event_log_handler="file"), train)()

Their names are ``torchelastic.worker.status.<STATE>``:

* agents: RENDEZVOUS and ASSIGN_WORKER_RANKS (with ``duration_ms``), SUCCEEDED (the agent did its
  work, whether or not workers failed) and FAILED;
* workers: START, and for the last round SUCCEEDED, FAILED or TERMINATED (stopped with the others).

The keys of their metadata are torch's. Differs from torch:

* `Event.timestamp` is set;
* values of the JSON text under ``metadata`` are plain, not lists of one element;
* ``agent_restarts`` counts the restarts of the job;
* workers that a signal stopped are reported as TERMINATED too;
* ``dynamic_rendezvous`` writes its events to the console if it has no handler;
* a handler that fails does not end the job.
"""

from elasticlib import _lazy
from elasticlib.events._destinations import (
    add_logging_handler as add_logging_handler,
    construct_and_record_rdzv_event as construct_and_record_rdzv_event,
    get_logging_handler as get_logging_handler,
    record as record,
    record_rdzv_event as record_rdzv_event,
)
from elasticlib.events._event import *  # noqa: F403 - all that it lists
from elasticlib.events._event_sink import (
    JobFacts as JobFacts,
    Standing as Standing,
    sinks as sinks,
    status_event as status_event,
)

_lazy.offer(__name__)
