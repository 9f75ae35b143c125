"""Re-export: ``torch.distributed.elastic.events``."""

from elasticlib import _lazy
from elasticlib.elastic.events.api import *  # noqa: F403 - as torch's does, with all of it
from elasticlib.events import (
    construct_and_record_rdzv_event as construct_and_record_rdzv_event,
    get_logging_handler as get_logging_handler,
    record as record,
    record_rdzv_event as record_rdzv_event,
)

_lazy.offer(__name__)
