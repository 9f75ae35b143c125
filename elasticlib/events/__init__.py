"""
Events: what happened to agents and workers, and what you record besides. (torch: ``torch.distributed.elastic.events``)

    from elasticlib import events

    events.record(events.Event("epoch", events.EventSource.WORKER, metadata={"number": 3}), "console")

An agent sends its own to the destination that ``event_log_handler`` names: ``null`` (none are made), ``console``
(stderr), ``dynamic_rendezvous`` (also how the node finds its round), or one of yours:

    events.add_logging_handler("file", logging.FileHandler("events.jsonl"))
    elastic_launch(LaunchConfig(event_log_handler="file"), train)()

They are named ``torchelastic.worker.status.<STATE>``: of agents RENDEZVOUS and ASSIGN_WORKER_RANKS (with
``duration_ms``), SUCCEEDED (it did its work, whether or not workers failed) and FAILED; of workers START, and for the
last round SUCCEEDED, FAILED or TERMINATED (stopped with the others). The keys of their metadata are torch's. Differs
from torch: `Event.timestamp` is set; values of the JSON text under ``metadata`` are plain, where torch has lists of one
element; ``agent_restarts`` counts those of the job; workers that a signal stopped are told as TERMINATED too;
``dynamic_rendezvous`` shows its events on the console where nobody gave it a handler; a handler that fails ends no job.
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
