"""What is logged when timers expire. (torch: ``torch.distributed.elastic.timer.debug_info_logging``)"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

_log = logging.getLogger("elasticlib")


def log_debug_info_for_expired_timers(run_id: str, expired_timers: Mapping[int, Sequence[str]]) -> None:
    """Log which timers of the job *run_id* expired, as {process id: timers as text}; nothing for none."""
    if expired_timers:
        _log.info("job %s: timers expired: %s", run_id, dict(expired_timers))
